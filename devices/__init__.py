"""Facts about this machine and its processes. Every probe may fail, and a fact that it could not read is None."""
