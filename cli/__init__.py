"""The `pomona` command: one module for each sub-command."""
