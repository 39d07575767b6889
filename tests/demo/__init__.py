"""`make demo`: the main job on one Linux machine, with real parts only."""
