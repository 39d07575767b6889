"""What hardware is: facts about this machine and its processes, each behind a probe that may answer "unknown"."""
