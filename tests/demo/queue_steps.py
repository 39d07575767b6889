"""The queue, as a user sees it: a critical service takes the GPU of a less important one, which comes back later."""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import partial
from typing import Final, NamedTuple

from kube.resources import INFERENCE_SERVICES
from kube.store import Store
from tests.controlplane.plane import ControlPlane
from tests.controlplane.process import CHECKOUT

COLUMNS: Final = ("NAME", "PHASE", "REASON", "QUEUE")
"""Columns of `kubectl get isvc -o wide` that are printed: all of them fit on no terminal."""


class QueueStep(NamedTuple):
    """One command, and what it leads to."""

    title: str
    command: str
    """Arguments of kubectl."""
    wanted: Mapping[str, str]
    """Place in the queue by service, or the phase of one that does not wait."""
    events: str = ""
    """Reason of the Events to print afterwards."""


STEPS: Final = (
    QueueStep(
        "A service of low priority gets the only GPU.",
        "apply -f examples/queue/nightly.yaml",
        {"nightly": "Ready"},
    ),
    QueueStep(
        "Another one waits behind it.",
        "apply -f examples/queue/weekly.yaml",
        {"nightly": "Ready", "weekly": "1/1"},
    ),
    QueueStep(
        "A critical one comes: nightly finishes its requests, ends, and waits at its old place, before weekly.",
        "apply -f examples/queue/incident.yaml",
        {"incident": "Ready", "nightly": "1/2", "weekly": "2/2"},
        events="Preempted",
    ),
    QueueStep(
        "The incident is over: nightly, the first in the queue, gets the GPU back, and weekly waits on.",
        # Not deleted: Kubernetes' garbage collector knows new kinds of objects half a minute late.
        "scale isvc incident --replicas=0",
        {"incident": "Suspended", "nightly": "Ready", "weekly": "1/1"},
    ),
)
WaitUntil = Callable[[Callable[[], bool]], Awaitable[object]]
"""Waits until a condition on the store is true."""


async def show_queue(plane: ControlPlane, store: Store, wait_until: WaitUntil, namespace: str = "default") -> None:
    """Run all steps, and print commands and what they lead to."""
    for step in STEPS:
        # Times of creation are in whole seconds: of two services of one second, chance decides who is first.
        await asyncio.sleep(1.0 - time.time() % 1.0)
        print(f"\n{step.title}\n$ kubectl {step.command}")
        command = step.command.replace("examples/", f"{CHECKOUT}/examples/").split()
        print((await plane.kubectl(*command, f"--namespace={namespace}")).strip())
        await wait_until(partial(_is_reached, store, namespace, step))
        table = await plane.kubectl("get", "isvc", *step.wanted, "--output=wide", f"--namespace={namespace}")
        print(f"$ kubectl get isvc -o wide  # {', '.join(COLUMNS)}\n{pick_columns(table, COLUMNS)}")
        if step.events:
            await _print_events(plane, step.events, namespace)


def _is_reached(store: Store, namespace: str, step: QueueStep) -> bool:
    return list_states(store, namespace, step.wanted) == step.wanted


def list_states(store: Store, namespace: str, services: Collection[str]) -> Mapping[str, str]:
    """Return the place in the queue of each service, or the phase of one that does not wait."""
    states = {}
    for name in services:
        status = (store.get(INFERENCE_SERVICES, name, namespace) or {}).get("status", {})
        states[name] = status.get("queue", {}).get("place") or status.get("phase", "")
    return states


def pick_columns(table: str, names: Collection[str]) -> str:
    """Return some columns of a table of kubectl."""
    heading, *rows = table.rstrip().splitlines()
    columns = [(match[0], match.start()) for match in re.finditer(r"\S+(?: \S+)*", heading)]
    ends = [start for _, start in columns[1:]] + [None]
    kept = [(start, end) for (name, start), end in zip(columns, ends, strict=True) if name in names]
    return "\n".join("".join(row[start:end] for start, end in kept).rstrip() for row in (heading, *rows))


async def _print_events(plane: ControlPlane, reason: str, namespace: str) -> None:
    message = 'jsonpath={range .items[*]}{.message}{"\\n"}{end}'
    print(f"$ kubectl get events --field-selector reason={reason}  # MESSAGE")
    selector = f"--field-selector=reason={reason}"
    print((await plane.kubectl("get", "events", selector, f"--output={message}", f"--namespace={namespace}")).strip())
