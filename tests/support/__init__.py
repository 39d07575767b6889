"""Helpers that tests share; CONTRIBUTING.md says which one serves which kind of test."""
