"""The self test: checks on this machine what the agent relies on, so that the owner of a Mac can verify it there."""
