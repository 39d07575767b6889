"""A host whose agent is simulated: its name, its address, and a report of memory that always changes."""

import random
from collections.abc import Collection
from typing import Final

from kube.client import Obj
from tests.support.agent_objects import status_of_host

JITTER_BYTES: Final = 2**28
"""Memory that other programs of a host take and give back; no process fits into it."""


def host_name(number: int) -> str:
    """Return the name of a host."""
    return f"mac-{number:03}"


def host_address(number: int) -> str:
    """Return the address of a host, for up to 65,000 of them."""
    return f"10.78.{number // 250}.{number % 250 + 1}"


def report_status(address: str, budget_bytes: int, processes: Collection[Obj] = ()) -> Obj:
    """Return the status that a host with these processes reports now."""
    reserved_bytes = sum(process["spec"]["memoryBytes"] for process in processes)
    free_bytes = budget_bytes - reserved_bytes - random.randrange(JITTER_BYTES)  # noqa: S311 - no secret
    return status_of_host(address, budget_bytes, max(0, free_bytes), processes)
