"""Run all checks of the self test; a check that fails is a line of the result, and stops no other check."""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from metal_agent.selftest import engine, facts, native
from metal_agent.selftest.line import Line

_CHECKS: Final[tuple[tuple[str, Callable[[Path], Awaitable[list[Line]]]], ...]] = (
    ("facts", lambda _: asyncio.to_thread(facts.check_facts)),
    ("a server", native.check_server),
    *((("Metal's memory", native.check_metal_memory),) if sys.platform == "darwin" else ()),
    ("ends", native.check_exits),
    ("adoption", native.check_adoption),
    ("ownership", native.check_ownership),
    ("llama.cpp", engine.check_engine),
)
_PATIENCE_SECONDS: Final = 120.0


async def run_selftest(folder: Path) -> list[Line]:
    """Run all checks; takes some seconds and 256 MiB of memory, and leaves only files in `folder`.

    Args:
        folder: an empty folder, as a real and short path, since a socket is made in it.
    """
    lines: list[Line] = []
    for name, look in _CHECKS:
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                lines += await look(folder)
        except Exception as error:  # noqa: BLE001 - any error is a result of the test
            lines.append(Line(name, "FAILED", f"{type(error).__name__}: {error}", "no error"))
    return lines
