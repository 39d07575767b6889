"""What people and programs look at: the density API, which says what fits where, how fast, and at what cost."""
