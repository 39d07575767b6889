"""Agents with real engines and processes, without an API server: a machine is all that they have."""

from tests.support.local_host import assignment, machine, model

__all__ = ["assignment", "machine", "model"]
