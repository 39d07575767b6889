"""The control socket of `pomona up`: its status, and the calls by which other commands change what it serves."""
