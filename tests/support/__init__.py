"""Helpers that tests share; CONTRIBUTING.md lists them by the kind of test."""
