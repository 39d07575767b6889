"""The next steps of the MetalProcesses of service `chat`, as its reconciler plans them."""

from collections.abc import Collection, Iterable
from datetime import timedelta

from controller.models.served import Served
from controller.placement.capacity import list_capacities
from controller.placement.displacement import find_displacements, read_orders
from controller.services.metal_processes import build_process_spec
from controller.services.rollout import (
    MetalProcessSteps,
    is_host_lost,
    plan_steps,
    process_prefix,
    sort_processes,
)
from kube.client import Obj
from kube.resources import METAL_HOSTS, METAL_PROCESSES
from tests.support.api_objects import (
    GIB,
    NOW,
    as_host,
    as_model,
    as_process,
    as_service,
    host,
    model,
    service,
    store,
)

SPEC = build_process_spec(as_service(service()), Served(as_model(model()), "llama.cpp"), 2 * GIB)
NAME = process_prefix("chat", SPEC)
LEAVING: Obj = {"deletionTimestamp": "2026-11-21T12:00:00Z"}


def steps(
    wanted: int,
    *observed: Obj,
    hosts: Iterable[Obj] = (),
    known: bool = True,
    later: float = 0,
    unexposed: Collection[str] = (),
    edit: Obj | None = None,
) -> MetalProcessSteps:
    """Return the steps for the processes of service `chat`, with one large host unless others are given.

    `edit` has the fields of the service that a user has stated since.
    """
    edited = as_service(service(**(edit or {})))
    spec = build_process_spec(edited, Served(as_model(model()), "llama.cpp"), 2 * GIB)
    known_hosts = ((METAL_HOSTS, registered) for registered in hosts or [host("studio-1")])
    kept = store(*known_hosts, *((METAL_PROCESSES, process) for process in observed))
    structs = [as_process(process) for process in kept.list(METAL_PROCESSES)]
    by_name = {metal_host.metadata.name: metal_host for metal_host in map(as_host, kept.list(METAL_HOSTS))}
    exposed = {name for name in by_name if not is_host_lost(name, by_name)} - set(unexposed)
    name = process_prefix("chat", spec) if known else None
    displacements = find_displacements(structs, read_orders(kept), (), ())
    standing = sort_processes(name, wanted, structs, by_name, exposed=exposed, displacements=displacements)
    alive = [metal_host for name, metal_host in by_name.items() if not is_host_lost(name, by_name)]
    return plan_steps(
        edited,
        spec if known else None,
        wanted,
        standing,
        exposed=exposed,
        taken={struct.metadata.name for struct in structs},
        capacities=list_capacities(kept, alive),
        now=NOW + timedelta(seconds=later),
    )


def made(done: MetalProcessSteps) -> list[str]:
    """Return the names of the processes that are created."""
    return [obj["metadata"]["name"] for _, obj in done.create]


def deleted(done: MetalProcessSteps) -> set[str]:
    """Return the names of the processes that are deleted."""
    return {ref.name for ref in done.delete}
