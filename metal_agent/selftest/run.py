"""Runs all of the self test; whatever fails is a line of it, and stops nothing else."""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from metal_agent.selftest import engine, facts, native
from metal_agent.selftest.line import Line

_PARTS: Final[tuple[tuple[str, Callable[[Path], Awaitable[list[Line]]]], ...]] = (
    ("facts", lambda _: asyncio.to_thread(facts.lines)),
    ("a server", native.server),
    *((("Metal's memory", native.metal),) if sys.platform == "darwin" else ()),
    ("ends", native.ends),
    ("adoption", native.adoption),
    ("ownership", native.ownership),
    ("llama.cpp", engine.lines),
)
_PATIENCE_SECONDS: Final = 120.0


async def run(folder: Path) -> list[Line]:
    """Look at everything; takes some seconds, 256 MiB of memory, and leaves nothing behind but files in `folder`.

    Args:
        folder: an empty one, by its real path, and a short one: there will be a socket in it.
    """
    lines: list[Line] = []
    for name, look in _PARTS:
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                lines += await look(folder)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is what the test is for
            lines.append(Line(name, "FAILED", f"{type(error).__name__}: {error}", "no error"))
    return lines
