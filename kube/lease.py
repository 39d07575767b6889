"""Leases: leader election among replicas, and the heartbeat of a host.

Clocks of two machines are never compared: a holder is dead when its lease was observed unchanged for its whole duration
on our own monotonic clock. The leader gives up before others may take over, and its work is cancelled first.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

import structlog

from kube.client import Client, Obj
from kube.errors import ApiError, Conflict, LeadershipLost, NotFound, Unreachable
from kube.resources import LEASES
from kube.time import micro_time

log = structlog.get_logger()


def _now() -> float:
    """Return the seconds of the loop's clock, which never jumps."""
    return asyncio.get_running_loop().time()


def may_take(spec: Obj, identity: str, unchanged_seconds: float) -> bool:
    """Decide whether `identity` may take over a lease that it has observed unchanged for `unchanged_seconds`."""
    holder = spec.get("holderIdentity") or ""
    return holder in ("", identity) or unchanged_seconds >= spec.get("leaseDurationSeconds", 0)


@dataclass(eq=False)
class Elector:
    """Leader election on the Lease `namespace/name` as `identity`, which no other process may have.

    Work that does not end within `duration_seconds - renew_deadline_seconds` of its cancellation may overlap with
    that of the next leader.
    """

    client: Client
    namespace: str
    name: str
    identity: str
    duration_seconds: int = 15
    renew_deadline_seconds: float = 10.0
    retry_seconds: float = 2.0
    _version: str = field(default="", init=False)
    """resourceVersion of the lease as we last saw it; empty when it must be read again."""
    _spec: Obj = field(default_factory=dict, init=False)
    _spec_changed_at: float = field(default=0.0, init=False)
    _leads_until: float = field(default=-math.inf, init=False)
    """Time by which the led work ends unless the lease is renewed."""

    def require_leadership(self) -> None:
        """Raise LeadershipLost unless we lead.

        A process that was suspended may continue its led work after the deadline and before its cancellation.
        """
        if _now() >= self._leads_until:
            seconds = self.renew_deadline_seconds
            raise LeadershipLost(f"lease {self.namespace}/{self.name} was not renewed for {seconds} s")

    async def run(self, work: Callable[[], Awaitable[None]]) -> None:
        """Wait for the lease, run `work` while a task renews the lease, and release it when the work has ended.

        It is released also if the work fails or is cancelled.

        Raises:
            LeadershipLost: after `work` was cancelled because the lease was lost.
        """
        try:
            await self._acquire()
            log.info("leadership_acquired", lease=self.name, identity=self.identity)
            async with asyncio.TaskGroup() as group:
                renewal = group.create_task(self._renew_until_lost())
                await work()
                renewal.cancel()
        except ExceptionGroup as failed:
            if len(failed.exceptions) > 1:
                raise
            raise failed.exceptions[0] from None  # a single failure is raised as it is
        finally:
            self._leads_until = -math.inf
            # Even if `_acquire` has not ended: a write without an answer may have taken the lease.
            await self._attempt(self.renew_deadline_seconds / 2, self._release)

    async def _acquire(self) -> None:
        """Try until we hold the lease."""
        while not await self._try_lead(self.renew_deadline_seconds / 2):
            self._version = ""  # read the lease again
            await asyncio.sleep(self.retry_seconds)

    async def _renew_until_lost(self) -> None:
        """Renew the lease for ever; raise LeadershipLost once another process holds it, or no renewal came in time.

        One try takes at most half of the renew deadline, so that a failed one can be repeated before that ends.
        """
        while True:
            await asyncio.sleep(self.retry_seconds)
            self.require_leadership()  # raises if no renewal came in time
            if await self._try_lead(min(self._leads_until - _now(), self.renew_deadline_seconds / 2)):
                continue
            holder = self._spec.get("holderIdentity")
            if holder and holder != self.identity:
                raise LeadershipLost(f"lease {self.namespace}/{self.name} is held by {holder}")

    async def _try_lead(self, seconds: float) -> bool:
        """Take or renew the lease within `seconds`, and lead until its deadline; return False if that failed."""
        started = _now()
        if not await self._attempt(seconds, self._take_or_renew):
            return False
        # Counted from before the request, the earliest time at which the server can have recorded the renewal.
        self._leads_until = started + self.renew_deadline_seconds
        return True

    async def _attempt(self, seconds: float, step: Callable[[], Awaitable[bool]]) -> bool:
        """Return what `step` returns within `seconds`; False after a failure, which is logged but for a conflict."""
        try:
            async with asyncio.timeout(seconds):
                return await step()
        except Conflict:
            pass
        except (ApiError, Unreachable, TimeoutError) as error:
            log.warning("lease_write_failed", lease=self.name, error=str(error) or f"no answer within {seconds} s")
        return False

    async def _take_or_renew(self) -> bool:
        """Take or renew the lease, and create it if there is none; return False if another process may hold it.

        It is read first only if its version is not known, as at the start or after a failed try.
        """
        if not self._version:
            try:
                self._remember(await self.client.get(LEASES, self.name, self.namespace))
            except NotFound:
                metadata = {"namespace": self.namespace, "name": self.name}
                lease = {"metadata": metadata, "spec": self._build_spec({})}
                self._remember(await self.client.create(LEASES, lease))
                return True

        # It is free if it is ours or released, or if its holder has not changed it for its whole duration.
        if not may_take(self._spec, self.identity, _now() - self._spec_changed_at):
            return False
        await self._write(self._build_spec(self._spec))
        return True

    async def _release(self) -> bool:
        """Release the Lease if it is ours, so that the next leader need not wait for it to expire.

        Return False if it is not ours.
        """
        while True:
            if not self._version:
                self._remember(await self.client.get(LEASES, self.name, self.namespace))
            if self._spec.get("holderIdentity") != self.identity:
                return False
            try:
                await self._write({**self._spec, "holderIdentity": "", "leaseDurationSeconds": 1})  # released
            except Conflict:
                continue  # a renewal of ours that was cancelled has arrived only now
            return True

    async def _write(self, spec: Obj) -> None:
        """Replace the spec of the lease that was read last, and remember the answer.

        Raises Conflict if the lease has changed since.
        """
        operations: list[Obj] = [
            {"op": "test", "path": "/metadata/resourceVersion", "value": self._version},
            {"op": "add", "path": "/spec", "value": spec},
        ]
        # An empty version makes the next call read the lease again: until the answer has come, it is not known whether
        # the write happened.
        self._version = ""
        self._remember(await self.client.patch_json(LEASES, self.name, self.namespace, operations))

    def _remember(self, lease: Obj) -> None:
        """Keep the version of the lease, and note the time if its spec has changed."""
        self._version = lease["metadata"]["resourceVersion"]
        spec = lease.get("spec") or {}
        if spec != self._spec:
            self._spec, self._spec_changed_at = spec, _now()

    def _build_spec(self, spec: Obj) -> Obj:
        """Return the spec by which we hold the lease from now on, as the successor of `spec`."""
        now = micro_time(datetime.now(UTC))
        is_ours = spec.get("holderIdentity") == self.identity
        transitions = spec.get("leaseTransitions", 0)
        return {
            "holderIdentity": self.identity,
            "leaseDurationSeconds": self.duration_seconds,
            "acquireTime": spec.get("acquireTime", now) if is_ours else now,
            "renewTime": now,
            "leaseTransitions": transitions if is_ours else transitions + 1,
        }


class HeldElsewhereError(Exception):
    """Another agent renews the lease; the message names it."""


@dataclass(eq=False)
class HostLease:
    """The Lease of one host, which one agent at a time may renew; `identity` is the same after its restart."""

    client: Client
    namespace: str
    name: str
    identity: str
    field_manager: str
    duration_seconds: int = 40
    _version: str | None = field(default=None, init=False)
    """resourceVersion of the Lease that we wrote last or may take; empty if there is none; None: read it again."""
    _rival_spec: Obj = field(default_factory=dict, init=False)
    """The spec that another holder wrote, as first seen."""
    _rival_since: float = field(default=0.0, init=False)

    async def keep_renewed(self, interval_seconds: float = 10.0, on_renewed: Callable[[], None] = lambda: None) -> None:
        """Renew the Lease for ever, once per interval: create it if absent, log every failure and try again earlier.

        `on_renewed` is called after each renewal that the server confirmed.

        Raises:
            HeldElsewhereError: another agent renews it.
        """
        while True:
            wait = interval_seconds / 5  # unless this renewal succeeds
            try:
                async with asyncio.timeout(interval_seconds):
                    renewed = await self._renew()
            except (ApiError, Unreachable, TimeoutError) as error:
                self._version = None  # so that the Lease is read again
                message = str(error) or f"no answer in {interval_seconds} s"
                log.warning("host_lease_renewal_failed", lease=self.name, error=message)
            else:
                if renewed:
                    wait = interval_seconds
                    on_renewed()

            await asyncio.sleep(wait)

    async def _renew(self) -> bool:
        """Renew the Lease, or take it over once its holder has not renewed it for its whole duration.

        Return False if another agent holds it, and it is too early to take it over. The version that we know is the
        precondition of the write, so that a Lease that another has taken meanwhile is not overwritten.

        Raises ApiError, Unreachable, and HeldElsewhereError when its holder still renews it.
        """
        # _version: that of the Lease which we may write; empty if there is none; None if that is not known
        if self._version is None and not await self._check_holder():
            return False

        spec = {
            "holderIdentity": self.identity,
            "leaseDurationSeconds": self.duration_seconds,
            "renewTime": micro_time(datetime.now(UTC)),
        }
        metadata = {"namespace": self.namespace, "name": self.name}
        if self._version:  # empty: there was no Lease, and this creates it
            metadata["resourceVersion"] = self._version
        lease = {"metadata": metadata, "spec": spec}
        written = await self.client.apply(LEASES, lease, field_manager=self.field_manager)
        self._version, self._rival_spec = written["metadata"]["resourceVersion"], {}  # no rival: it is ours
        return True

    async def _check_holder(self) -> bool:
        """Read the Lease; return True, with its version kept, if we may take it.

        We may if it does not exist, or if it is ours or released. Else another agent is its holder: the spec that it
        wrote is remembered at first sight, and the Lease is free once that spec has not changed for the Lease's
        duration. If it changes, the holder still renews it: raise HeldElsewhereError.
        """
        try:
            lease = await self.client.get(LEASES, self.name, self.namespace)
        except NotFound:
            self._version = ""  # there is none: the write creates it
            return True

        # _rival_spec: the spec that another holder wrote, as first seen; empty if there was none so far
        spec = lease.get("spec") or {}
        if not may_take(spec, self.identity, unchanged_seconds=0.0):  # neither ours nor released
            if self._rival_spec and spec != self._rival_spec:
                raise HeldElsewhereError(f"it is held by {spec['holderIdentity']}, which renews it")
            if not self._rival_spec:
                self._rival_spec, self._rival_since = spec, _now()
                log.warning("host_lease_held", lease=self.name, by=spec["holderIdentity"])
            if not may_take(spec, self.identity, _now() - self._rival_since):
                return False  # the holder is not silent for long enough yet

        self._version = lease["metadata"]["resourceVersion"]
        return True
