"""Weights: parse their sources, inspect their headers, download and verify them, and keep them on a host."""
