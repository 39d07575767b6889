"""Units and cells of the queue, as the planner has them."""

from typing import Any

import msgspec

from controller.placement.units import Amounts, Cell, HostRequirement, NodeRequirement, Unit, UnitKey
from crds.size import GIB
from kube.resources import ObjectKey

GPU = "nvidia.com/gpu"


def waiting_unit(name: str, need: Amounts | int = 1, *, service: str = "", **fields: Any) -> Unit:
    """Return a waiting pod with a number of devices, or another need."""
    parts = ({GPU: need} if isinstance(need, int) else need,)
    given: dict[str, Any] = {
        "key": UnitKey("pod", "team", name),
        "uid": f"uid-{name}",
        "service": ObjectKey("team", service or name),
        "enqueued_at": 1_000.0,
        "parts": parts,
        "pools": ("nvidia",),
        "requirement": NodeRequirement("any", {}),
    }
    return Unit(**(given | fields))


def waiting_process(name: str, gib: int, **fields: Any) -> Unit:
    """Return a MetalProcess that waits for a host."""
    given: dict[str, Any] = {
        "key": UnitKey("process", "team", name),
        "pools": ("metal",),
        "requirement": HostRequirement("llama.cpp", "team"),
    }
    return waiting_unit(name, {"memory": gib * GIB}, **(given | fields))


def running_unit(unit: Unit, *cells: str, since: float = 0.0) -> Unit:
    """Return a unit that runs on cells."""
    return msgspec.structs.replace(unit, state="running", cells=cells, evictable_since=since)


def gpu_cell(name: str, total: Amounts | int = 8, free: Amounts | int | None = None, **fields: Any) -> Cell:
    """Return a node with devices, or other amounts."""
    amounts = {GPU: total} if isinstance(total, int) else total
    given: dict[str, Any] = {
        "name": name,
        "kind": "node",
        "pool": "nvidia",
        "total": amounts,
        "free": amounts if free is None else {GPU: free} if isinstance(free, int) else free,
        "node": {"metadata": {"name": name, "labels": {}}, "spec": {}},
    }
    return Cell(**(given | fields))


def host_cell(name: str, gib: int = 64, free_gib: int | None = None, **fields: Any) -> Cell:
    """Return a host."""
    given: dict[str, Any] = {
        "name": name,
        "kind": "host",
        "pool": "metal",
        "total": {"memory": gib * GIB},
        "free": {"memory": (gib if free_gib is None else free_gib) * GIB},
        "runtimes": frozenset({"llama.cpp"}),
    }
    return Cell(**(given | fields))
