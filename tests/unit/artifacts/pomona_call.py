"""`pomona` as a Job runs it, without a process of its own for each call."""

import asyncio
from collections.abc import Coroutine
from typing import Any, NamedTuple, TypeVar

import pytest
from click.testing import CliRunner

from cli import outcome
from cli.main import main

T = TypeVar("T")


class Ran(NamedTuple):
    """A finished command."""

    code: int
    out: str
    err: str


async def run_pomona(*arguments: str, **environment: str) -> Ran:
    """Run a command in another thread, which gets no signals."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outcome, "run_until_signal", _run_without_signals)
        ran = await asyncio.to_thread(CliRunner().invoke, main, arguments, env={"COLUMNS": "200", **environment})
    return Ran(ran.exit_code, ran.stdout, ran.stderr)


async def _run_without_signals(work: Coroutine[Any, Any, T], *_numbers: int) -> T:
    return await work
