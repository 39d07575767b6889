"""A machine without a cluster, for tests of the parts of its agent."""

from tests.support.local_host import assignment, machine, model

__all__ = ["assignment", "machine", "model"]
