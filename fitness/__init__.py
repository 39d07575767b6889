"""Memory estimates: what fits where."""
