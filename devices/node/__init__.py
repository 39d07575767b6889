"""Probes of a node's hardware: one file for each vendor, with pure parsers and a thin reader."""
