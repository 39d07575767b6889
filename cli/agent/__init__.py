"""`pomona agent`: the agent of a host, and the commands that install, look at and update it."""
