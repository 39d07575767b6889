"""The control socket of the agent: its status, and the call that stops everything."""
