"""The command `ollama` as a client of some server, as a person runs it."""

import asyncio
import re
from pathlib import Path

from tests.support.ollama.program import ensure_ollama

_ESCAPES = re.compile(r"\x1b\[[?0-9;]*[a-zA-Z]")
"""Sequences by which the command moves on the terminal."""


async def run_command(url: str, home: Path, *words: str) -> tuple[int | None, str]:
    """Run it against the server at `url`; return its exit code, and what it has printed."""
    process = await asyncio.create_subprocess_exec(
        str(ensure_ollama()),
        *words,
        env={"HOME": str(home), "OLLAMA_HOST": url},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    return process.returncode, _ESCAPES.sub("", output.decode())
