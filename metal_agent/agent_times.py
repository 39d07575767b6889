"""Times of the agent of one host, in seconds."""

from typing import Final

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
