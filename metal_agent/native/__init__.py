"""Native processes: starting, adopting and ending them, their command lines and their log files."""
