"""The recorder of Kubernetes Events.

An Event that repeats becomes a count on the first one, written at most once a minute. An Event reports news, not
state: a failed write is logged and not retried.
"""

import asyncio
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

import structlog

from kube.client import Client, Obj
from kube.errors import ApiError, NotFound, Unreachable
from kube.resources import EVENTS
from kube.time import micro_time

log = structlog.get_logger()

EventType = Literal["Normal", "Warning"]

WRITE_SECONDS = 5.0
REFRESH_SECONDS = 60.0
SERIES_SECONDS = 360.0
"""As in client-go: after six minutes without a repetition, the same event is a new one."""
_SERIES_KEPT = 1024
_NOTE_BYTES = 1024


@dataclass(slots=True)
class _Series:
    """One event on the server, and its count since. Times are monotonic."""

    namespace: str
    name: str
    happened_at: float
    written_at: float
    count: int = 1


class EventRecorder:
    """A recorder that writes Events as `controller` (such as `pomona.dev/controller`), process `instance`."""

    def __init__(self, client: Client, controller: str, instance: str) -> None:
        self._client = client
        self._controller = controller
        self._instance = instance
        self._series: dict[tuple[str, ...], _Series] = {}
        """By what makes two events equal: the last events, the one that happened longest ago first."""

    async def event(self, regarding: Obj, type: EventType, reason: str, note: str, action: str) -> None:  # noqa: A002 - the API's name
        """Report that `reason` (CamelCase) happened to `regarding` while doing `action`; `note` is the message.

        A repetition is counted, and written at most once a minute. An event of a cluster-scoped object is in namespace
        `default`. Takes at most 5 seconds, and never raises because a write failed.
        """
        metadata = regarding["metadata"]

        # 1. Count it in its series.
        key = (regarding["kind"], metadata.get("uid", metadata["name"]), type, reason, note, action)
        now = asyncio.get_running_loop().time()

        series = self._series.pop(key, None)  # what is known of an equal event before; put back below
        if series is None or now - series.happened_at >= SERIES_SECONDS:
            name = f"{metadata['name'][:200].rstrip('-.')}.{time.time_ns():x}"
            namespace = metadata.get("namespace") or "default"
            series = _Series(namespace=namespace, name=name, happened_at=now, written_at=now, count=0)

        series.happened_at = now
        series.count += 1
        # Popped and put back, so the dict is in the order of last use: its first series is the one to drop.
        self._series[key] = series
        if len(self._series) > _SERIES_KEPT:
            del self._series[next(iter(self._series))]
        # The first event of a series is written at once, a repetition at most once in `REFRESH_SECONDS`.
        if series.count > 1 and now - series.written_at < REFRESH_SECONDS:
            return

        # 2. Write the event, or the count of its series; without an answer the next one begins a new series.
        series.written_at = now
        reference = {key: metadata[key] for key in ("namespace", "name", "uid", "resourceVersion") if key in metadata}
        body: Obj = {
            "eventTime": micro_time(datetime.now(UTC)),
            "reportingController": self._controller,
            "reportingInstance": self._instance,
            "regarding": {"apiVersion": regarding["apiVersion"], "kind": regarding["kind"], **reference},
            "type": type,
            "reason": reason,
            "action": action,
            "note": note.encode()[:_NOTE_BYTES].decode(errors="ignore"),
        }

        try:
            async with asyncio.timeout(WRITE_SECONDS):
                await self._write(series, body)
        except (ApiError, Unreachable, TimeoutError) as error:
            self._series.pop(key, None)
            log.warning("event_write_failed", reason=reason, note=note, error=str(error) or "time-out")

    async def _write(self, series: _Series, body: Obj) -> None:
        """Write the count of a series, or the Event itself if it is the first or the server has forgotten it."""
        if series.count > 1:
            observed = {"count": series.count, "lastObservedTime": micro_time(datetime.now(UTC))}
            operation = {"op": "add", "path": "/series", "value": observed}
            try:
                await self._client.patch_json(EVENTS, series.name, series.namespace, [operation])
            except NotFound:
                # The server forgets events after an hour.
                body = {**body, "series": observed}
            else:
                return
        metadata = {"namespace": series.namespace, "name": series.name}
        await self._client.create(EVENTS, {"metadata": metadata, **body})
