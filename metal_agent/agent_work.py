"""The work of the agent of one host: the keys of its queue, and the times of its loops in seconds."""

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
REPORT_SECONDS: Final = 60.0
"""Interval between two checks of this host's MetalHost and EndpointSlices, which may have been deleted."""
EXPOSE_SECONDS: Final = 10.0
"""Interval between two tries to configure a proxy that cannot serve everything yet."""
LIVENESS_SECONDS: Final = 5.0
"""Time for engines to answer after a gap; then the engines that answered are made ready without the others."""
LAST_REPORT_SECONDS: Final = 10.0
"""Time for the last reports of an agent that has stopped everything."""
WITHDRAWAL_SECONDS: Final = 5.0
"""Time for the API server to accept that a machine that shuts down withdraws its endpoints."""
RECONCILE_SECONDS: Final = 30.0
"""The longest that one key of the work queue may take."""
