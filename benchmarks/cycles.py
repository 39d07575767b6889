"""Leaks after a thousand starts and stops of engines, in the agent's process and on the host; the floor is zero.

Supervisor, records, weights, ledger and probe are the real ones. The engine is a stand-in that starts in a fraction of
a second, because llama.cpp's server would take an hour.
"""

import asyncio
import contextlib
import gc
import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import Final, NamedTuple

import aiohttp
import psutil
import structlog

from benchmarks.report import Figure, print_figures
from crds.metalprocess import Artifact, MetalProcessSpec
from metal_agent.assignments import Assignment
from metal_agent.native.log_files import KEPT_LOGS
from tests.support.api_objects import GIB
from tests.support.eventually import eventually
from tests.support.local_host import Machine
from tests.support.tiny_models import tiny_gguf

CYCLES: Final = 1000
WARM_UP: Final = 100
AT_ONCE: Final = 10
MIB: Final = 2**20
ENGINE: Final = Path(__file__).parent / "servers" / "quick_engine.py"


class HeldResources(NamedTuple):
    """The resources that the agent's process and its state folder hold."""

    descriptors: int
    tasks: int
    processes: int
    reservations: int
    """Reservations in the ledger and runners."""
    records: int
    logs: int
    resident_mib: float


def count_resources(machine: Machine) -> HeldResources:
    """Count the resources that are held now."""
    gc.collect()
    ours = psutil.Process()
    return HeldResources(
        ours.num_fds(),
        len(asyncio.all_tasks()),
        len(ours.children(recursive=True)),
        len(machine.ledger.reserved) + len(machine.runners),
        len(list((machine.folder / "processes").glob("*"))),
        len(list((machine.folder / "logs").glob("*"))),
        ours.memory_info().rss / MIB,
    )


def assignment(number: int, model: Path) -> Assignment:
    """Return the assignment of one cycle; each is another object, as in a cluster."""
    spec = MetalProcessSpec(
        service_name="chat",
        model_name="tiny",
        runtime="llama.cpp",
        artifact=Artifact(source=f"file://{model}"),
        memory_bytes=GIB,
        token_secret="token",  # noqa: S106 - a name
        context_length=512,
    )
    return Assignment(f"u{number}", "team", f"chat-{number}", spec)


async def run_cycles(machine: Machine, model: Path, first: int, count: int) -> None:
    """Start and stop `count` engines, some at once."""
    for begin in range(first, first + count, AT_ONCE):
        batch = [assignment(number, model) for number in range(begin, begin + AT_ONCE)]
        machine.supervisor.assign(batch)
        await eventually(lambda: {runner.state.phase for runner in machine.runners.values()} == {"Ready"})
        machine.supervisor.assign([])
        await eventually(lambda: {runner.state.phase for runner in machine.runners.values()} == {"Stopped"})
        machine.supervisor.assign([])
        machine.changes.clear()
        machine.exposure.calls.clear()


async def run(folder: Path) -> None:
    """Measure and print all figures."""
    launcher = folder / "llama-server"
    launcher.write_text(f'#!/bin/sh\nexec {sys.executable} -SE {ENGINE} "$@"\n')
    launcher.chmod(0o700)
    os.environ["LLAMA_SERVER_BIN"] = str(launcher)
    model = folder / "files" / "tiny.gguf"
    model.parent.mkdir()
    tiny_gguf.write(model)
    async with aiohttp.ClientSession() as session:
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
        machine = Machine(folder / "state", model.parent, session)
        await machine.start()
        await run_cycles(machine, model, 0, WARM_UP)
        before = count_resources(machine)
        await run_cycles(machine, model, WARM_UP, CYCLES)
        # Old logs are removed now and then.
        await eventually(lambda: count_resources(machine).logs <= KEPT_LOGS)
        after = count_resources(machine)
        await machine.stop()
    more = [late - early for late, early in zip(after, before, strict=True)]
    named = dict(zip(HeldResources._fields, more, strict=True))
    counted = ("descriptors", "tasks", "processes", "reservations", "records")
    print_figures(
        f"{CYCLES} starts and stops",
        [
            *(Figure(f"more {name}", named[name], None, 0, "") for name in counted),
            Figure("logs on disk", after.logs, None, KEPT_LOGS, ""),
            Figure("more resident memory", named["resident_mib"], None, 4, "MiB"),
        ],
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="cycles-") as name, contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run(Path(name)))
