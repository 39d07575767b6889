"""The self test: checks of all that the agent relies on, so that the owner of a Mac can run them on that Mac."""
