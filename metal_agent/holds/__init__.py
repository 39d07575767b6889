"""Holds: the reasons for which a host starts no engine now, each from a source of its own, and their one gate."""
