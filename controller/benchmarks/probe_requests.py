"""The services that wait for measurements, with the device classes that they wait for.

Their pairs of model and class are measured before all others. A short time before a service stops to wait, its Jobs are
ended, and none is started for it until its replicas have their devices.
"""

from collections.abc import Collection, Mapping
from collections.abc import Set as AbstractSet
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Final, NamedTuple

from controller.benchmarks.benchmark_job import BenchmarkKey
from controller.services.probe_wait import ENDING_SECONDS
from kube.resources import ObjectKey

HELD_SECONDS: Final = 30.0
"""Time after a wait in which its devices are left to the replicas of the service."""


class _Request(NamedTuple):
    classes: frozenset[str]
    keys: Mapping[str, BenchmarkKey]
    """The pair of each class; none are known before the first look at all services."""
    until: datetime
    """The end of the wait."""
    look: int
    """Number of the last look before the request."""
    told: frozenset[str] | None
    """Device classes that are being measured, by the last answer; None: that is not known."""


class PlannedProbes(NamedTuple):
    """The pairs for which services wait."""

    wanted: frozenset[BenchmarkKey] = frozenset()
    """Pairs that are measured before others."""
    held: frozenset[BenchmarkKey] = frozenset()
    """Pairs of which no Job may run, because a wait is about to end, or has ended."""
    again_seconds: float | None = None
    """Time after which these change by themselves."""


NO_PROBES: Final = PlannedProbes()


class ProbeRequests:
    """The requests of all services."""

    def __init__(self) -> None:
        self._requests: dict[ObjectKey, _Request] = {}

    def __contains__(self, service: ObjectKey) -> bool:
        """Return whether there is a request of this service."""
        return service in self._requests

    def find(self, service: ObjectKey) -> frozenset[str] | None:
        """Return the last answer, the device classes that are being measured; None: there is none."""
        request = self._requests.get(service)
        return None if request is None else request.told

    def put(
        self,
        service: ObjectKey,
        classes: Collection[str],
        until: datetime,
        *,
        look: int,
        keys: Mapping[str, BenchmarkKey] = MappingProxyType({}),
        told: frozenset[str] | None = None,
    ) -> None:
        """Add a request with the answer to it.

        Args:
            service: the service.
            classes: the device classes that are worth a measurement to it.
            until: the end of its wait.
            look: number of the last look at all services.
            keys: the pair of each class.
            told: the classes that are being measured, or are about to be; None: it is not known.
        """
        self._requests[service] = _Request(frozenset(classes), keys, until, look, told)

    def forget(self, service: ObjectKey) -> None:
        """Remove a request."""
        self._requests.pop(service, None)

    def clear(self) -> None:
        """Remove all requests."""
        self._requests.clear()

    def find_keys(self, pairs: Mapping[ObjectKey, Mapping[str, BenchmarkKey]]) -> None:
        """Take the pairs of services, by device class, for requests that were made before these were known."""
        for service, request in self._requests.items():
            if request.told is None:
                own = pairs.get(service, {})
                keys = {name: own[name] for name in request.classes if name in own}
                self._requests[service] = request._replace(keys=keys)

    def plan(self, now: datetime) -> PlannedProbes:
        """Return the pairs of all requests, and remove requests that are over."""
        wanted, held, times = set[BenchmarkKey](), set[BenchmarkKey](), list[datetime]()
        for service, request in list(self._requests.items()):
            ending = request.until - timedelta(seconds=ENDING_SECONDS)
            over = request.until + timedelta(seconds=HELD_SECONDS)
            if now >= over:
                del self._requests[service]
                continue
            (wanted if now < ending else held).update(request.keys.values())
            times.append(ending if now < ending else over)
        again = min(((each - now).total_seconds() for each in times), default=None)
        return PlannedProbes(frozenset(wanted), frozenset(held - wanted), again)

    def answer(
        self, measured: Collection[BenchmarkKey], leaving: AbstractSet[BenchmarkKey], look: int, now: datetime
    ) -> list[ObjectKey]:
        """Return the services for which the answer has changed.

        Args:
            measured: the pairs that are being measured.
            leaving: the pairs whose Jobs of an earlier leader had not left their devices at the last look.
            look: number of the last look at all services, after which Jobs were started.
            now: the time.
        """
        changed = []
        for service, request in self._requests.items():
            if not leaving.isdisjoint(request.keys.values()):
                self._requests[service] = request._replace(look=look)
                continue
            told = frozenset(name for name, key in request.keys.items() if key in measured)
            # The Jobs of a request that came after the look are started after the next one.
            if request.look < look and told != request.told:
                # Once nothing is measured for it, it chooses, and its devices are left to its replicas.
                until = request.until if told else min(request.until, now)
                self._requests[service] = request._replace(told=told, until=until)
                changed.append(service)
        return changed
