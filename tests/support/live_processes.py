"""Processes of this machine that have not ended: a zombie, which its parent has not waited for yet, has ended."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil


def is_alive(process: psutil.Process) -> bool:
    """Return whether the process has not ended; it may end between any two questions about it."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def find_processes(*arguments: str) -> list[psutil.Process]:
    """Return the live processes that have these arguments, one after the other, in their command line."""
    return [
        process
        for process in psutil.process_iter(["cmdline", "status"])
        if process.info["status"] != psutil.STATUS_ZOMBIE
        and arguments in zip(*((process.info["cmdline"] or [])[skip:] for skip in range(len(arguments))), strict=False)
    ]


@contextlib.asynccontextmanager
async def run_beside(*argv: str | Path, **options: Any) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a program for the time of a block, which may wait for its end; one that runs still is killed then.

    Args:
        argv: program and arguments.
        options: further arguments of asyncio.create_subprocess_exec.
    """
    process = await asyncio.create_subprocess_exec(*argv, **options)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        # What it prints and nobody has read would keep it from being seen as ended.
        await process.communicate()
