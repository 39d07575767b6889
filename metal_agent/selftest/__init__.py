"""The self test: checks of everything that the agent relies on, which the owner of a Mac runs on that Mac."""
