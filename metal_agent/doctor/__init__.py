"""The doctor: checks of this installation, each with the way out, for the owner of a host that does not serve."""
