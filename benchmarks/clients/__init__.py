"""Clients that put load on what a benchmark measures, and cost less than it does."""
