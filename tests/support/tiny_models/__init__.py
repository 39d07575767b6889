"""Tiny models with generated weights that real engines load and answer from."""
