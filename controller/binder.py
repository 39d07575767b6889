"""Gives each waiting MetalProcess a host: the scheduler of hosts.

One loop on the leader binds one process after the other, so that no two can be promised the same memory. What a host
has free is computed from the objects alone, each time anew: what its agent reports, less what is bound to it and not
in that report yet. So nothing is lost when the loop dies between any two lines.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final, NamedTuple

import structlog

from controller.plan import Key, Leading, readable
from controller.status import find
from crds.meta import DISRUPTION_TARGET, MEMORY_PRESSURE, Priority
from crds.metalhost import MetalHost
from crds.metalprocess import MetalProcess
from kube.client import Obj
from kube.errors import ApiError, Conflict, Forbidden, Invalid, NotFound, Unreachable
from kube.resources import METAL_HOSTS, METAL_PROCESSES, Resource
from kube.store import Store

RETRY_SECONDS: Final = 1.0
REFUSED_SECONDS: Final = 60.0
"""How long a binding that the API server refused is not tried again, so that the others are."""
_RANK: Final[dict[Priority, int]] = {"critical": 0, "high": 1, "normal": 2, "low": 3, "batch": 4}
_HOLDS_NO_MEMORY: Final = frozenset({"Stopped", "Rejected"})

log = structlog.get_logger()


class Room(NamedTuple):
    """What one host can still take."""

    host: str
    runtimes: frozenset[str]
    free_bytes: int
    short_of_memory: bool = False
    """It takes on nothing, whatever its budget says: others use its memory."""


class Waiting(NamedTuple):
    """A process that waits for a host."""

    key: Key
    uid: str
    resource_version: str
    priority: Priority
    created: str
    runtime: str
    memory_bytes: int
    avoid: frozenset[str]
    """Hosts that have rejected one like it, or are short of the memory that one like it uses."""

    @property
    def order(self) -> tuple[int, str, str]:
        """Sorts what is bound first to the front."""
        return _RANK[self.priority], self.created, self.uid


class Binding(NamedTuple):
    """One decision."""

    process: Waiting
    host: str


def rooms(hosts: Iterable[MetalHost], processes: Iterable[Obj]) -> list[Room]:
    """Return what each host can still take; a host whose free memory is not known can take nothing.

    `availableBytes` already subtracts what the host lists in `status.processes`. The rest that is bound to it counts
    here, also while it is being deleted or is not `readable`: until its host says Stopped, it may hold its memory.
    """
    bound: dict[str, list[Obj]] = {}
    for process in processes:
        if process.get("status", {}).get("phase") not in _HOLDS_NO_MEMORY:
            bound.setdefault(process["spec"].get("hostName"), []).append(process)
    found = []
    for host in hosts:
        listed = {process.uid for process in host.status.processes}
        promised = (each for each in bound.get(host.metadata.name, ()) if each["metadata"]["uid"] not in listed)
        free = (host.status.available_bytes or 0) - sum(each["spec"]["memoryBytes"] for each in promised)
        pressure = find(host.status.conditions, MEMORY_PRESSURE)
        short = pressure is not None and pressure.status == "True"
        found.append(Room(host.metadata.name, frozenset(host.status.runtimes), max(0, free), short))
    return found


def able(runtime: str, avoid: Collection[str | None], among: Iterable[Room]) -> list[Room]:
    """Return the hosts that can take this engine and are not to be avoided; most free memory first, ties by name."""
    found = [room for room in among if runtime in room.runtimes and not room.short_of_memory and room.host not in avoid]
    return sorted(found, key=lambda room: (-room.free_bytes, room.host))


def bind(waiting: Iterable[Waiting], among: Iterable[Room]) -> list[Binding]:
    """Give hosts to processes by priority, then age; the host with most free memory first.

    A process that fits nowhere does not hold back those behind it.
    """
    left = {room.host: room for room in among}
    bindings = []
    for process in sorted(waiting, key=lambda each: each.order):
        room = next(iter(able(process.runtime, process.avoid, left.values())), None)
        if room is not None and room.free_bytes >= process.memory_bytes:
            left[room.host] = room._replace(free_bytes=room.free_bytes - process.memory_bytes)
            bindings.append(Binding(process, room.host))
    return bindings


def waiting(processes: Sequence[MetalProcess]) -> list[Waiting]:
    """Return the processes that wait for a host, each with the hosts that do not want a sibling of the same spec."""
    unwanted: dict[tuple[str, str], set[str]] = {}
    for process in processes:
        if (process.status.phase == "Rejected" or is_displaced(process)) and process.spec.host_name is not None:
            unwanted.setdefault(_family(process), set()).add(process.spec.host_name)
    return [
        Waiting(
            key=Key(process.metadata.namespace, process.metadata.name),
            uid=process.metadata.uid,
            resource_version=process.metadata.resource_version,
            priority=process.spec.priority,
            created=process.metadata.creation_timestamp,
            runtime=process.spec.runtime,
            memory_bytes=process.spec.memory_bytes,
            avoid=frozenset(unwanted.get(_family(process), ())),
        )
        for process in processes
        if process.spec.host_name is None and process.metadata.deletion_timestamp is None
    ]


def is_displaced(process: MetalProcess) -> bool:
    """Whether its host asks for another place for it: it may answer still, and stays until its successor does."""
    condition = find(process.status.conditions, DISRUPTION_TARGET)
    return condition is not None and condition.status == "True"


def _family(process: MetalProcess) -> tuple[str, str]:
    """Processes of one owner with the same spec: their names differ in the last number only."""
    owner = next((each.uid for each in process.metadata.owner_references if each.controller), "")
    return owner, process.metadata.name.rpartition("-")[0]


class Refusal(NamedTuple):
    """A binding that the API server refused."""

    uid: str
    host: str


def decide(store: Store, bindable: Callable[[str], bool], refused: Collection[Refusal] = ()) -> list[Binding]:
    """Return all bindings that are possible now."""
    processes = store.list(METAL_PROCESSES)
    waits = [
        process._replace(avoid=process.avoid | {host for uid, host in refused if uid == process.uid})
        for process in waiting(readable(processes, MetalProcess))
    ]
    if not waits:
        return []
    hosts = readable(store.list(METAL_HOSTS), MetalHost)
    alive = [host for host in hosts if bindable(host.metadata.name) and host.metadata.deletion_timestamp is None]
    return bind(waits, rooms(alive, processes))


class Binder:
    """The loop that binds."""

    def __init__(self, bindable: Callable[[str], bool]) -> None:
        self._bindable = bindable
        self._changed = asyncio.Event()
        self._refused: set[Refusal] = set()
        self._listens = False

    def wake(self) -> None:
        """Look again: something that no object shows has changed, such as that a host is alive."""
        self._changed.set()

    async def run(self, leading: Leading) -> None:
        """Bind for ever, one process at a time."""
        if not self._listens:
            leading.store.subscribe(self._seen)
            self._listens = True
        self.wake()
        while True:
            await self._changed.wait()
            self._changed.clear()
            for binding in decide(leading.store, self._bindable, self._refused):
                try:
                    done = await _write(leading, binding)
                except (Forbidden, Invalid) as error:
                    log.warning("refused", process="/".join(binding.process.key), host=binding.host, error=str(error))
                    self._refuse(Refusal(binding.process.uid, binding.host))
                    done = False
                if not done:
                    self.wake()  # the rest was decided for a world that is not so
                    break

    def _refuse(self, refusal: Refusal) -> None:
        def forgive() -> None:
            self._refused.discard(refusal)
            self.wake()

        self._refused.add(refusal)
        asyncio.get_running_loop().call_later(REFUSED_SECONDS, forgive)

    def _seen(self, resource: Resource, _old: Obj | None, _new: Obj | None) -> None:
        if resource in {METAL_PROCESSES, METAL_HOSTS}:
            self.wake()


async def _write(leading: Leading, binding: Binding) -> bool:
    """Bind one process; returns whether it is as decided. Its outcome is known before the next is bound.

    Raises Forbidden and Invalid: asking the same again is of no use.
    """
    process, client, store = binding.process, leading.client, leading.store
    operations = [
        {"op": "test", "path": "/metadata/resourceVersion", "value": process.resource_version},
        {"op": "add", "path": "/spec/hostName", "value": binding.host},
    ]
    try:
        bound = await client.patch_json(METAL_PROCESSES, process.key.name, process.key.namespace, operations)
    except (Forbidden, Invalid):
        raise
    except (ApiError, Unreachable) as error:
        log.info("not bound", process="/".join(process.key), host=binding.host, error=str(error))
        if not isinstance(error, Conflict | NotFound):
            await asyncio.sleep(RETRY_SECONDS)
        await _refresh(leading, process.key)
        return False
    store.put(METAL_PROCESSES, bound)
    log.info("bound", process="/".join(process.key), host=binding.host, memory_bytes=process.memory_bytes)
    return True


async def _refresh(leading: Leading, key: Key) -> None:
    """Read what became of a process; until that is known, nothing else may be bound."""
    while True:
        try:
            found = await leading.client.get(METAL_PROCESSES, key.name, key.namespace)
        except NotFound:
            leading.store.remove(METAL_PROCESSES, key.namespace, key.name)
            return
        except (ApiError, Unreachable) as error:
            log.warning("cannot read a process that may be bound", process="/".join(key), error=str(error))
            await asyncio.sleep(RETRY_SECONDS)
        else:
            leading.store.put(METAL_PROCESSES, found)
            return
