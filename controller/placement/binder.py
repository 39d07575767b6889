"""The binder: gives each waiting MetalProcess a host.

One loop on the leader binds one process after the other, so that no two can be promised the same memory. All that it
decides by is in the objects, so nothing is lost when it dies between any two lines.
"""

import asyncio
import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

import structlog

from controller.placement.capacity import (
    HostCapacity,
    MemoryPool,
    eligible_hosts,
    fits_largest,
    largest_for,
    largest_free,
    memory_pool,
    stored_capacities,
)
from controller.reconcile.conditions import find
from controller.reconcile.indexes import HOST_INDEX, OWNER_INDEX, UNBOUND, controller_of, namespaced
from controller.reconcile.plan import Leading, decode_stored
from crds.meta import DISRUPTION_TARGET, ENQUEUED_AT, PRIORITY_RANK, Priority
from crds.metalhost import MetalHost
from crds.metalprocess import MetalProcess
from kube.backoff import backoff_seconds
from kube.client import Obj
from kube.errors import ApiError, Conflict, NotFound, Unreachable
from kube.resources import INFERENCE_SERVICES, METAL_HOSTS, METAL_PROCESSES, ObjectKey, Resource, object_key
from kube.store import Store

FIRST_RETRY_SECONDS: Final = 0.1
LAST_RETRY_SECONDS: Final = 60.0
"""Longest pause before a binding that failed is tried again; other processes are bound meanwhile."""
READ_AGAIN_SECONDS: Final = 1.0
REPORTED_TRIES: Final = 3
"""Tries after which the owner of a service is told of a binding that fails: a server that restarts fails a few."""

log = structlog.get_logger()


class WaitingProcess(NamedTuple):
    """A process that waits for a host."""

    key: ObjectKey
    uid: str
    resource_version: str
    priority: Priority
    enqueued: str
    """As `enqueued_at` returns it."""
    runtime: str
    memory_bytes: int
    avoid: frozenset[str]
    """Hosts that have rejected or displaced a process of the same spec."""
    refused_by: frozenset[str] = frozenset()
    """Hosts to which the API server refused to bind it: they are tried last."""
    features: frozenset[str] = frozenset()
    """Features that the host's agent must know."""

    @property
    def order(self) -> tuple[int, str, str]:
        """Sort key: the process to bind first comes first."""
        return PRIORITY_RANK[self.priority], self.enqueued, self.uid


_Group = tuple[str, str, frozenset[str], frozenset[str]]
"""Runtime, namespace, hosts to avoid and features of a process, which decide about the hosts that it may use."""


class Binding(NamedTuple):
    """One decision."""

    process: WaitingProcess
    host: str


def bind(waiting: Iterable[WaitingProcess], among: Iterable[HostCapacity]) -> list[Binding]:
    """Give hosts to processes by priority, then age; the host with most free memory first.

    A process that fits nowhere does not hold back those behind it.
    """
    capacities = list(among)
    free_bytes = {capacity.host: capacity.free_bytes for capacity in capacities}
    # Processes that may use the same hosts share the list of these, and the least memory that none of them has left.
    eligible: dict[_Group, list[str]] = {}
    too_large_bytes: dict[_Group, int] = {}
    bindings = []
    for process in sorted(waiting, key=lambda each: each.order):
        group = process.runtime, process.key.namespace, process.avoid, process.features
        needed_bytes = process.memory_bytes
        if group in too_large_bytes and needed_bytes >= too_large_bytes[group]:
            continue
        if group not in eligible:
            eligible[group] = [capacity.host for capacity in _eligible_hosts(process, capacities)]
        fitting = [host for host in eligible[group] if free_bytes[host] >= needed_bytes]
        if not fitting:
            too_large_bytes[group] = needed_bytes
            continue
        # The one with most free memory, unless it refused and another did not.
        refused_by = process.refused_by
        host = min(fitting, key=lambda each: (each in refused_by, -free_bytes[each], each))
        free_bytes[host] -= needed_bytes
        bindings.append(Binding(process, host))
    return bindings


def _eligible_hosts(process: WaitingProcess, among: Iterable[HostCapacity]) -> list[HostCapacity]:
    return eligible_hosts(process.runtime, process.key.namespace, process.avoid, among, process.features)


def list_waiting(processes: Sequence[MetalProcess]) -> list[WaitingProcess]:
    """Return the processes that wait for a host, each with the hosts to avoid."""
    unwanted: dict[tuple[str, str], set[str]] = {}
    for process in processes:
        if (process.status.phase == "Rejected" or is_displaced(process)) and process.spec.host_name is not None:
            unwanted.setdefault(_spec_key(process), set()).add(process.spec.host_name)
    return [
        WaitingProcess(
            key=ObjectKey(process.metadata.namespace, process.metadata.name),
            uid=process.metadata.uid,
            resource_version=process.metadata.resource_version,
            priority=process.spec.priority,
            enqueued=enqueued_at(process),
            runtime=process.spec.runtime,
            memory_bytes=process.spec.memory_bytes,
            avoid=frozenset(unwanted.get(_spec_key(process), ())),
            features=frozenset(process.spec.features),
        )
        for process in processes
        if process.spec.host_name is None and process.metadata.deletion_timestamp is None
    ]


def enqueued_at(process: MetalProcess) -> str:
    """Return the time by which processes of one priority are ordered: that of the first one of this replica."""
    return process.metadata.annotations.get(ENQUEUED_AT) or process.metadata.creation_timestamp


def is_displaced(process: MetalProcess) -> bool:
    """Return whether the host displaces this process: it may still answer, and stays until its replacement answers."""
    condition = find(process.status.conditions, DISRUPTION_TARGET)
    return condition is not None and condition.status == "True"


def _spec_key(process: MetalProcess) -> tuple[str, str]:
    """Return a key of the processes of one owner with the same spec: their names differ in the last number only."""
    owner = next((each.uid for each in process.metadata.owner_references if each.controller), "")
    return owner, process.metadata.name.rpartition("-")[0]


BindOutcome = Literal["bound", "stale", "failed"]
"""Outcome of a decision. stale: before the write, the host was lost or had no memory left."""


class BindFailures(NamedTuple):
    """The failures in a row to bind one process."""

    tries: int
    retry_at: float
    """When to try again, on the clock of the event loop."""
    refused_by: frozenset[str]
    """Hosts that the API server refused since all of them had refused."""


_NO_FAILURE: Final = BindFailures(0, 0.0, frozenset())
_NONE: Final[Mapping[str, BindFailures]] = MappingProxyType({})


def decide_bindings(
    store: Store, bindable: Callable[[str], bool], failures: Mapping[str, BindFailures] = _NONE, now: float = 0.0
) -> list[Binding]:
    """Return all bindings that are possible now; `failures` are those of processes, by uid."""
    unbound = store.by_index(METAL_PROCESSES, HOST_INDEX, UNBOUND)
    if not unbound:
        return []
    hosts = decode_stored(store, METAL_HOSTS, store.list(METAL_HOSTS), MetalHost)
    capacities = stored_capacities(store, filter_live(hosts, bindable))
    largest = largest_free(capacities)
    # Few of those that wait fit anywhere; only these, with the others of their services, are looked at closely.
    fitting = [obj for obj in unbound if fits_largest(largest, obj)]
    waits = []
    for process in list_waiting(_with_siblings(store, fitting)):
        failed = failures.get(process.uid)
        if failed is None:
            waits.append(process)
        elif failed.retry_at <= now:
            waits.append(process._replace(refused_by=failed.refused_by))
    return bind(waits, capacities)


def _with_siblings(store: Store, unbound: Iterable[Obj]) -> list[MetalProcess]:
    """Return these processes and all others of their owners: hosts that rejected one of them are avoided."""
    found = {object_key(obj): obj for obj in unbound}
    owners = {
        namespaced(obj["metadata"]["namespace"], owner["uid"])
        for obj in found.values()
        if (owner := controller_of(obj)) is not None
    }
    for each in owners:
        for obj in store.by_index(METAL_PROCESSES, OWNER_INDEX, each):
            if obj["spec"].get("hostName"):
                found[object_key(obj)] = obj
    return decode_stored(store, METAL_PROCESSES, found.values(), MetalProcess)


def filter_live(hosts: Iterable[MetalHost], bindable: Callable[[str], bool]) -> list[MetalHost]:
    """Return the hosts that take processes."""
    return [host for host in hosts if bindable(host.metadata.name) and host.metadata.deletion_timestamp is None]


def still_fits(store: Store, bindable: Callable[[str], bool], binding: Binding) -> bool:
    """Return whether the host of a binding that was decided before still lives and has the memory."""
    found = store.get(METAL_HOSTS, binding.host)
    hosts = filter_live(decode_stored(store, METAL_HOSTS, [found] if found else [], MetalHost), bindable)
    process = binding.process
    left = _eligible_hosts(process, stored_capacities(store, hosts))
    return any(capacity.free_bytes >= process.memory_bytes for capacity in left)


class Binder:
    """The loop that binds."""

    def __init__(
        self, bindable: Callable[[str], bool], on_decision: Callable[[BindOutcome], None] = lambda _outcome: None
    ) -> None:
        self._bindable = bindable
        self._on_decision = on_decision
        self._changed = asyncio.Event()
        self._failures: dict[str, BindFailures] = {}
        self._listens = False
        self._least_bytes: tuple[Sequence[Obj], dict[MemoryPool, int]] | None = None
        """The waiting processes, and the least memory that one of them needs, by the hosts that may run it."""

    def wake(self) -> None:
        """Decide again: something outside the store has changed, such as the liveness of a host."""
        self._changed.set()

    async def run(self, leading: Leading) -> None:
        """Bind for ever, one process at a time."""
        if not self._listens:
            leading.store.subscribe(functools.partial(self._wake_on_change, leading.store))
            self._listens = True
        self._failures = {}
        self.wake()
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self._bind_waiting(leading)

    async def _bind_waiting(self, leading: Leading) -> None:
        """Decide once and write the bindings; a binding that fails leaves its memory to those after it."""
        store = leading.store
        now = asyncio.get_running_loop().time()
        for binding in decide_bindings(store, self._bindable, self._failures, now):
            # The writes before this one took time.
            if not still_fits(store, self._bindable, binding):
                self._on_decision("stale")
                self.wake()
                continue
            try:
                await _write_binding(leading, binding)
            except (ApiError, Unreachable) as error:
                self._on_decision("failed")
                if self._back_off(binding, error) == REPORTED_TRIES:
                    await _report_failure(leading, binding, error)
                await _refresh(leading, binding.process.key, binding.process.uid)
            else:
                self._on_decision("bound")
        if self._failures:
            waiting = {each["metadata"]["uid"] for each in store.by_index(METAL_PROCESSES, HOST_INDEX, UNBOUND)}
            self._failures = {uid: failed for uid, failed in self._failures.items() if uid in waiting}

    def _back_off(self, binding: Binding, error: ApiError | Unreachable) -> int:
        """Note a failure, and decide again after a pause; return the number of failures."""
        process, host = binding
        last = self._failures.get(process.uid, _NO_FAILURE)
        pause = backoff_seconds(last.tries + 1, first=FIRST_RETRY_SECONDS, most=LAST_RETRY_SECONDS)
        # If every host that fits has refused, a new round of all of them begins.
        refused = frozenset({host}) if host in last.refused_by else last.refused_by | {host}
        loop = asyncio.get_running_loop()
        self._failures[process.uid] = BindFailures(last.tries + 1, loop.time() + pause, refused)
        loop.call_later(pause, self.wake)
        log.log(
            logging.INFO if isinstance(error, Conflict | NotFound) else logging.WARNING,
            "binding_failed",
            process=str(process.key),
            host=host,
            error=str(error),
            retry_seconds=round(pause, 1),
        )
        return last.tries + 1

    def _wake_on_change(self, store: Store, resource: Resource, _old: Obj | None, new: Obj | None) -> None:
        if resource == METAL_PROCESSES or (resource == METAL_HOSTS and new is not None and self._may_take(store, new)):
            self.wake()

    def _may_take(self, store: Store, host: Obj) -> bool:
        """Return whether any waiting process may fit on a host: its agent reports again and again that none does."""
        unbound = store.by_index(METAL_PROCESSES, HOST_INDEX, UNBOUND)
        if self._least_bytes is None or self._least_bytes[0] is not unbound:
            least: dict[MemoryPool, int] = {}
            for obj in unbound:
                pool, needed_bytes = memory_pool(obj), obj["spec"]["memoryBytes"]
                least[pool] = min(needed_bytes, least.get(pool, needed_bytes))
            self._least_bytes = unbound, least
        _, least = self._least_bytes
        largest = largest_free(stored_capacities(store, decode_stored(store, METAL_HOSTS, [host], MetalHost)))
        return any(needed_bytes <= largest_for(largest, pool) for pool, needed_bytes in least.items())


async def _write_binding(leading: Leading, binding: Binding) -> None:
    """Bind one process. Raises ApiError and Unreachable; after either the process may be bound."""
    process, client, store = binding.process, leading.client, leading.store
    operations = [
        {"op": "test", "path": "/metadata/resourceVersion", "value": process.resource_version},
        {"op": "add", "path": "/spec/hostName", "value": binding.host},
    ]
    store.put(
        METAL_PROCESSES, await client.patch_json(METAL_PROCESSES, process.key.name, process.key.namespace, operations)
    )
    log.info("process_bound", process=str(process.key), host=binding.host, memory_bytes=process.memory_bytes)


async def _report_failure(leading: Leading, binding: Binding, error: ApiError | Unreachable) -> None:
    """Send an Event about the service: its condition only says that the process waits to be bound."""
    process = leading.store.get(METAL_PROCESSES, binding.process.key.name, binding.process.key.namespace)
    owner = controller_of(process) if process is not None else None
    service = owner and leading.store.get(INFERENCE_SERVICES, owner["name"], binding.process.key.namespace)
    if service:
        note = f"MetalProcess {binding.process.key} is not bound to host {binding.host}, and tried again: {error}"
        await leading.recorder.event(service, "Warning", "BindingFailed", note, "Bind")


async def _refresh(leading: Leading, key: ObjectKey, uid: str) -> None:
    """Read a process whose binding has an unknown outcome; until that is known, nothing else may be bound."""
    while True:
        try:
            found = await leading.client.get(METAL_PROCESSES, key.name, key.namespace)
        except NotFound:
            leading.store.remove(METAL_PROCESSES, key.namespace, key.name, uid=uid)
            return
        except (ApiError, Unreachable) as error:
            log.warning("process_not_read", process=str(key), error=str(error))
            await asyncio.sleep(READ_AGAIN_SECONDS)
        else:
            leading.store.put(METAL_PROCESSES, found)
            return
