"""Weights: where they are, what they say of themselves, and how they get here whole."""
