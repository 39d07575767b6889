"""A machine without a cluster, for tests of the parts of its agent."""

from tests.machine import assignment, machine, model

__all__ = ["assignment", "machine", "model"]
