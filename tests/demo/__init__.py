"""`make demo`: the main job on one Linux machine, with every part real."""
