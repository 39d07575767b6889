"""This host as the cluster sees it: its MetalHost object, with facts, budget and what is reserved."""

from collections.abc import Iterable
from importlib import metadata
from typing import Any

import msgspec

from crds.meta import LABEL_MANAGED_BY, MANAGED_BY
from crds.metalhost import HostProcess, MetalHostStatus
from crds.size import size_text
from devices.facts import HostFacts
from kube.apply import apply_status
from kube.client import Client, Obj
from kube.errors import Conflict, NotFound
from kube.resources import METAL_HOSTS
from metal_agent import engine
from metal_agent.assignments import Assignment
from metal_agent.endpoints import FIELD_MANAGER
from metal_agent.ledger import Ledger


def status(facts: HostFacts, address: str, ledger: Ledger, assignments: Iterable[Assignment]) -> MetalHostStatus:
    """Say what this host is and has; `processes` lists exactly what `available_bytes` does not count any more."""
    return MetalHostStatus(
        address=address,
        chip=facts.chip or "",
        cpu_cores=facts.cpu_cores,
        os=facts.os or "",
        architecture=facts.architecture or "",
        memory_bytes=facts.memory_bytes,
        budget_bytes=ledger.budget_bytes,
        available_bytes=ledger.available_bytes,
        available=size_text(ledger.available_bytes),
        agent_version=metadata.version("pomona"),
        runtimes=engine.installed(),
        processes=[
            HostProcess(uid=each.uid, namespace=each.namespace, name=each.name, memory_bytes=ledger.reserved[each.uid])
            for each in assignments
            if each.uid in ledger.reserved
        ],
    )


async def report(client: Client, host: str, wanted: MetalHostStatus) -> None:
    """Create the MetalHost where it is missing, and write its status where that differs.

    Raises ApiError and Unreachable.
    """
    observed = await _get_or_create(client, host)
    body: dict[str, Any] = msgspec.to_builtins(wanted)
    await apply_status(client, METAL_HOSTS, observed, body, FIELD_MANAGER)


async def _get_or_create(client: Client, host: str) -> Obj:
    try:
        return await client.get(METAL_HOSTS, host)
    except NotFound:
        pass
    body = {"metadata": {"name": host, "labels": {LABEL_MANAGED_BY: MANAGED_BY}}, "spec": {}}
    try:
        return await client.create(METAL_HOSTS, body)
    except Conflict:
        return await client.get(METAL_HOSTS, host)
