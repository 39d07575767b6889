"""The views for people and programs: the density API, which says what fits where, how fast, and at what cost."""
