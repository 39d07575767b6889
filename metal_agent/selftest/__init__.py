"""What the agent relies on, looked at on this very machine: what only a Mac can prove, its owner proves with this."""
