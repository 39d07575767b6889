"""`pomona` as a process of its own, as a Job runs it."""

import asyncio
import os
import subprocess
import sys
from typing import NamedTuple


class Ran(NamedTuple):
    """A finished command."""

    code: int
    out: str
    err: str


async def run_pomona(*arguments: str, **environment: str) -> Ran:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "cli.main",
        *arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "COLUMNS": "200", **environment},
    )
    out, err = await process.communicate()
    assert process.returncode is not None
    return Ran(process.returncode, out.decode(), err.decode())
