"""Leases: one leader among replicas, and the heartbeat of a host.

Clocks of two machines are never compared: a holder is dead when its lease was seen unchanged for its whole duration
on our own monotonic clock. The leader gives up before others may take over, and its work is cancelled first.
"""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

import structlog

from kube.client import Client, Obj
from kube.errors import ApiError, Conflict, NotFound, Unreachable
from kube.resources import LEASES
from kube.time import micro_time

log = structlog.get_logger()


class LeadershipLost(Exception):  # noqa: N818 - what happened, as client-go calls it
    """The lease could not be renewed in time, or somebody else holds it. The led work has been cancelled."""


def _now() -> float:
    """Seconds of the loop's clock, which never jumps."""
    return asyncio.get_running_loop().time()


def may_take(spec: Obj, identity: str, unchanged_seconds: float) -> bool:
    """Whether `identity` may write itself into a lease that it has seen unchanged for so long."""
    holder = spec.get("holderIdentity") or ""
    return holder in ("", identity) or unchanged_seconds >= spec.get("leaseDurationSeconds", 0)


class Elector:
    """Leader election on the Lease `namespace/name` as `identity`, which no other process may have.

    Work that does not end within `duration_seconds - renew_deadline_seconds` of its cancellation may overlap with
    that of the next leader.
    """

    def __init__(
        self,
        client: Client,
        namespace: str,
        name: str,
        identity: str,
        *,
        duration_seconds: int = 15,
        renew_deadline_seconds: float = 10.0,
        retry_seconds: float = 2.0,
    ) -> None:
        self._client = client
        self._namespace = namespace
        self._name = name
        self._identity = identity
        self._duration = duration_seconds
        self._deadline = renew_deadline_seconds
        self._retry = retry_seconds
        self._version = ""
        """resourceVersion of the lease as we last saw it; empty when it must be read again."""
        self._spec: Obj = {}
        self._seen_at = 0.0

    async def run(self, work: Callable[[], Awaitable[None]]) -> None:
        """Wait until we lead, run `work`, release the lease when it ended, failed or was cancelled.

        Raises:
            LeadershipLost: after `work` was cancelled because the lease was lost.
        """
        try:
            held_since = await self._acquire()
            log.info("leading", lease=self._name, identity=self._identity)
            async with asyncio.TaskGroup() as group:
                renewal = group.create_task(self._keep(held_since))
                await work()
                renewal.cancel()
        except ExceptionGroup as failed:
            if len(failed.exceptions) > 1:
                raise
            raise failed.exceptions[0] from None
        finally:
            await self._attempt(self._deadline / 2, self._release)

    async def _acquire(self) -> float:
        """Try until we hold the lease; returns the monotonic time from which it counts."""
        while True:
            started = _now()
            if await self._attempt(self._deadline / 2, self._take):
                return started
            self._version = ""
            await asyncio.sleep(self._retry)

    async def _keep(self, renewed_at: float) -> None:
        """Renew until it fails for too long; raises LeadershipLost."""
        while True:
            await asyncio.sleep(self._retry)
            started = _now()
            left = renewed_at + self._deadline - started
            if left <= 0:
                raise LeadershipLost(f"lease {self._namespace}/{self._name} was not renewed for {self._deadline} s")
            if await self._attempt(min(left, self._deadline / 2), self._take):
                # What counts is when the request left, since the server's record is no younger.
                renewed_at = started
            elif (holder := self._spec.get("holderIdentity")) not in ("", None, self._identity):
                raise LeadershipLost(f"lease {self._namespace}/{self._name} is held by {holder}")

    async def _attempt(self, seconds: float, step: Callable[[], Awaitable[bool]]) -> bool:
        """One bounded try; after a failure the lease is read again, since the write may have happened."""
        try:
            async with asyncio.timeout(seconds):
                return await step()
        except Conflict:
            self._version = ""
        except (ApiError, Unreachable, TimeoutError) as error:
            self._version = ""
            log.warning("lease not written", lease=self._name, error=str(error) or f"no answer within {seconds} s")
        return False

    async def _take(self) -> bool:
        """Take or renew the lease, if we may."""
        if not self._version:
            try:
                self._see(await self._client.get(LEASES, self._name, self._namespace))
            except NotFound:
                metadata = {"namespace": self._namespace, "name": self._name}
                lease = {"metadata": metadata, "spec": self._claim({})}
                self._see(await self._client.create(LEASES, lease))
                return True
        if not may_take(self._spec, self._identity, _now() - self._seen_at):
            return False
        await self._write(self._claim(self._spec))
        return True

    async def _release(self) -> bool:
        """Let the next leader in at once, if the lease is ours."""
        if not self._version:
            self._see(await self._client.get(LEASES, self._name, self._namespace))
        if self._spec.get("holderIdentity") != self._identity:
            return False
        await self._write({**self._spec, "holderIdentity": "", "leaseDurationSeconds": 1})
        return True

    async def _write(self, spec: Obj) -> None:
        operations: list[Obj] = [
            {"op": "test", "path": "/metadata/resourceVersion", "value": self._version},
            {"op": "add", "path": "/spec", "value": spec},
        ]
        self._see(await self._client.patch_json(LEASES, self._name, self._namespace, operations))

    def _see(self, lease: Obj) -> None:
        self._version = lease["metadata"]["resourceVersion"]
        spec = lease.get("spec") or {}
        if spec != self._spec:
            self._spec, self._seen_at = spec, _now()

    def _claim(self, spec: Obj) -> Obj:
        now = micro_time(datetime.now(UTC))
        ours = spec.get("holderIdentity") == self._identity
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": self._duration,
            "acquireTime": spec.get("acquireTime", now) if ours else now,
            "renewTime": now,
            "leaseTransitions": spec.get("leaseTransitions", 0) + (not ours),
        }


async def renew(
    client: Client,
    namespace: str,
    name: str,
    *,
    field_manager: str,
    duration_seconds: int = 40,
    interval_seconds: float = 10.0,
    on_renewed: Callable[[], None] | None = None,
) -> None:
    """Keep the Lease of a host alive for ever: created if absent, every failure logged and soon tried again.

    `on_renewed` is called after each renewal that the server confirmed.
    """
    while True:
        spec = {"holderIdentity": name, "leaseDurationSeconds": duration_seconds}
        spec["renewTime"] = micro_time(datetime.now(UTC))
        lease = {"metadata": {"namespace": namespace, "name": name}, "spec": spec}
        wait = interval_seconds
        try:
            async with asyncio.timeout(interval_seconds):
                await client.apply(LEASES, lease, field_manager=field_manager)
        except (ApiError, Unreachable, TimeoutError) as error:
            log.warning("host lease not renewed", lease=name, error=str(error) or f"no answer in {interval_seconds} s")
            wait = interval_seconds / 5
        else:
            if on_renewed:
                on_renewed()
        await asyncio.sleep(wait)
