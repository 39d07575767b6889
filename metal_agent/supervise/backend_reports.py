"""Follow the proxy's reports on the engines behind it, by one open stream: a sick engine is known at once."""

import asyncio
from collections.abc import Mapping
from typing import Final, get_args

import structlog

from gateway.http.control_client import ControlRefusedError, ControlUnreachableError
from gateway.proxy.config import BackendHealth
from gateway.proxy.control_client import ProxyClient
from kube.backoff import backoff_seconds
from metal_agent.engine_health import Suspicion, SuspicionReason
from metal_agent.process_events import Suspected, Trusted
from metal_agent.supervise.runner import Runner

_FIRST_PAUSE_SECONDS: Final = 0.1
_LAST_PAUSE_SECONDS: Final = 10.0

log = structlog.get_logger()


async def follow_backend_health(proxy: ProxyClient, runners: Mapping[str, Runner]) -> None:
    """Send each health report of the proxy to the runner of its engine, as an event, until cancelled.

    A stream that fails or ends is opened again after a pause that grows with each failure in a row.
    """
    failures = 0
    while True:
        try:
            async for health in proxy.watch_health():
                failures = 0  # it answers
                if runner := runners.get(health.uid):
                    runner.notify(read_report(health))
        except (ControlUnreachableError, ControlRefusedError):
            failures += 1  # a proxy that does not answer is reported by the task that keeps it running
        except Exception:  # a defect here must not end the agent
            failures += 1
            log.exception("backend_reports_failed")
        await asyncio.sleep(backoff_seconds(failures, first=_FIRST_PAUSE_SECONDS, most=_LAST_PAUSE_SECONDS))


def read_report(health: BackendHealth) -> Suspected | Trusted:
    """Return the event of a report. A reason that this version does not know counts as `Slow`."""
    if not health.suspect:
        return Trusted()
    reason: SuspicionReason = next((name for name in get_args(SuspicionReason) if name == health.reason), "Slow")
    return Suspected(Suspicion(reason, health.message))
