"""Write the MetalHost of this host: its facts, memory budget and reservations."""

import dataclasses
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Final

import msgspec

from crds.meta import LABEL_MANAGED_BY, MANAGED_BY
from crds.metalhost import MOST_WEIGHTS, HostProcess, MetalHostStatus
from crds.size import size_text
from devices.facts import HostFacts
from devices.host import HostState
from gateway.proxy.build import BUILD
from kube.apply import apply_status, merge_conditions
from kube.client import Client, Obj
from kube.comparison import skip_small_changes
from kube.errors import Conflict, NotFound
from kube.resources import METAL_HOSTS
from kube.time import rfc3339
from metal_agent.assignments import Assignment
from metal_agent.cluster.endpoint_slices import FIELD_MANAGER
from metal_agent.memory.ledger import Ledger

_GIB: Final = 2**30
_VERSION: Final = BUILD.partition("+")[0]
"""The version that this agent runs: an update replaces the files under it, and is in force after a restart."""
_FACTS: Final = sorted(
    {field.name for field in dataclasses.fields(HostFacts)}.intersection(MetalHostStatus.__struct_fields__)
    - {"core_levels"}
)
"""Facts that the status has under the same names."""
_LEAST_CHANGES: Final = {"swapUsedBytes": _GIB, "gpuUsedBytes": _GIB, "batteryPercent": 10}
"""Fields of the status that change all the time, and the least change that is written."""


def build_status(
    facts: HostFacts,
    state: HostState,
    address: str,
    ledger: Ledger,
    assignments: Iterable[Assignment],
    *,
    runtimes: Iterable[str] = (),
    weights: Sequence[str] = (),
    reachability_port: int | None = None,
) -> MetalHostStatus:
    """Return the status of this host; `processes` lists exactly the reservations that reduce `available_bytes`.

    `runtimes` are the runtimes that can serve here; `weights` are the identities of what is on disk, the most recently
    used first; `reachability_port` is the port at which the controller may ask whether the cluster reaches this host.
    """
    booted_at = facts.booted_at_seconds
    # ledger.reserved: the memory that each process has on this host, by uid
    assigned = [assignment for assignment in assignments if assignment.uid in ledger.reserved]
    # Engines that `pomona up` left running are stopped if the cluster needs their memory.
    unclaimed_bytes = sum(ledger.reserved[assignment.uid] for assignment in assigned if assignment.is_standalone)
    available_bytes = ledger.available_without(unclaimed_bytes)

    return MetalHostStatus(
        address=address,
        reachability_port=reachability_port,
        # _FACTS: the names of facts that the status has as well.
        **{name: value for name in _FACTS if (value := getattr(facts, name)) is not None},
        core_levels=list(facts.core_levels),
        booted_at=None if booted_at is None else rfc3339(datetime.fromtimestamp(booted_at, UTC)),
        memory_pressure=state.pressure.level or "",
        swap_used_bytes=state.pressure.swap_used_bytes,
        gpu_used_bytes=state.gpu.used_bytes,
        thermal_level=state.thermal or "",
        power_source=state.power.source or "",
        battery_percent=state.power.battery_percent,
        budget_bytes=ledger.budget_bytes,
        available_bytes=available_bytes,
        available=size_text(available_bytes),
        agent_version=_VERSION,
        runtimes=list(runtimes),
        weights=sorted(weights[:MOST_WEIGHTS]),  # in an order that a use does not change
        processes=[
            HostProcess(
                uid=assignment.uid,
                namespace=assignment.namespace,
                name=assignment.name,
                memory_bytes=ledger.reserved[assignment.uid],
            )
            for assignment in assigned
            if not assignment.is_standalone
        ],
    )


async def report_host(client: Client, host: str, wanted: MetalHostStatus, conditions: Sequence[Obj] = ()) -> None:
    """Create the MetalHost if it is missing, and write its status if that differs.

    Fields that move all the time, such as the swap in use, keep their written value until they differ by a step.
    `conditions` are those of the agent, without lastTransitionTime; the conditions of others are kept.

    Raises ApiError and Unreachable.
    """
    observed = await _get_or_create(client, host)
    written = observed.get("status") or {}
    # _LEAST_CHANGES: the step of each such field.
    body = skip_small_changes(msgspec.to_builtins(wanted), written, _LEAST_CHANGES)
    body["conditions"] = merge_conditions(written.get("conditions", []), conditions, datetime.now(UTC))
    await apply_status(client, METAL_HOSTS, observed, body, FIELD_MANAGER)


async def _get_or_create(client: Client, host: str) -> Obj:
    """Return the MetalHost; create it if it is missing."""
    try:
        return await client.get(METAL_HOSTS, host)
    except NotFound:
        pass
    body = {"metadata": {"name": host, "labels": {LABEL_MANAGED_BY: MANAGED_BY}}, "spec": {}}
    try:
        return await client.create(METAL_HOSTS, body)
    except Conflict:
        return await client.get(METAL_HOSTS, host)
