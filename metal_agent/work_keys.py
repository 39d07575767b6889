"""Keys of the agent's work queue: each names work that `Agent._reconcile` does from the state at that time."""

from typing import Final

WorkKey = tuple[str, ...]
"""The kind of work, then its object: the keys below, ("process", UID) for the report of one MetalProcess, and
("slice", NAMESPACE, SERVICE) for one EndpointSlice."""
ASSIGN: Final[WorkKey] = ("assign",)
"""Start and stop runners by the assignments in the store."""
LIST_AGAIN: Final[WorkKey] = ("list_again",)
"""List the assignments anew after a gap in the contact with the API."""
PROXY: Final[WorkKey] = ("proxy",)
"""Send the proxy its configuration."""
REPORT: Final[WorkKey] = ("host",)
"""Write the MetalHost."""
SLICES: Final[WorkKey] = ("slices",)
"""Find EndpointSlices that are missing or left behind."""
EVENTS: Final[WorkKey] = ("events",)
"""Send the queued Events."""
