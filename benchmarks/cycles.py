"""What a thousand starts and stops leave behind in the agent's process, and on the host: nothing.

Supervisor, records, weights, ledger and probe are the real ones. The engine is a stand-in that starts in a fraction of
a second, as llama.cpp's server would take an hour for as many.
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

from benchmarks.parts.report import Figure, show
from crds.metalprocess import Artifact, MetalProcessSpec
from metal_agent.assignments import Assignment
from metal_agent.logs import KEPT_LOGS
from tests import tiny_gguf
from tests.eventually import eventually
from tests.machine import Machine
from tests.serving import GIB

CYCLES: Final = 1000
WARM_UP: Final = 100
AT_ONCE: Final = 10
MIB: Final = 2**20
ENGINE: Final = Path(__file__).parent / "parts" / "quick_engine.py"


class Holdings(NamedTuple):
    """What a process has."""

    descriptors: int
    tasks: int
    processes: int
    reservations: int
    """With runners that are left."""
    records: int
    logs: int
    resident_mib: float


def holdings(machine: Machine) -> Holdings:
    """Count what this process holds now."""
    gc.collect()
    ours = psutil.Process()
    return Holdings(
        ours.num_fds(),
        len(asyncio.all_tasks()),
        len(ours.children(recursive=True)),
        len(machine.ledger.reserved) + len(machine.runners),
        len(list((machine.folder / "processes").glob("*"))),
        len(list((machine.folder / "logs").glob("*"))),
        ours.memory_info().rss / MIB,
    )


def assignment(number: int, model: Path) -> Assignment:
    """The process of one cycle; each is another object, as in a cluster."""
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


async def cycles(machine: Machine, model: Path, first: int, count: int) -> None:
    """Start and stop so many."""
    for begin in range(first, first + count, AT_ONCE):
        batch = [assignment(number, model) for number in range(begin, begin + AT_ONCE)]
        machine.supervisor.assign(batch)
        await eventually(lambda: {each.state.phase for each in machine.runners.values()} == {"Ready"})
        machine.supervisor.assign([])
        await eventually(lambda: {each.state.phase for each in machine.runners.values()} == {"Stopped"})
        machine.supervisor.assign([])
        machine.changes.clear()
        machine.exposure.calls.clear()


async def run(folder: Path) -> None:
    """Measure and print."""
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
        await cycles(machine, model, 0, WARM_UP)
        before = holdings(machine)
        await cycles(machine, model, WARM_UP, CYCLES)
        # They are looked at now and then.
        await eventually(lambda: holdings(machine).logs <= KEPT_LOGS)
        after = holdings(machine)
        await machine.stop()
    more = [late - early for late, early in zip(after, before, strict=True)]
    named = dict(zip(Holdings._fields, more, strict=True))
    counted = ("descriptors", "tasks", "processes", "reservations", "records")
    show(
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
