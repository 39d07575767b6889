"""Agents with real engines and processes on one machine, without an API server."""

from tests.support.local_host import assignment, machine, model

__all__ = ["assignment", "machine", "model"]
