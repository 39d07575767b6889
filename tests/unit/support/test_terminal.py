"""A terminal of tests shows all that a program writes, whatever chunks it is read in."""

import asyncio
from pathlib import Path

from tests.support.terminal import CTRL_C, open_terminal


async def test_character_that_comes_in_two_chunks_is_shown(tmp_path: Path) -> None:
    halves = r"printf 'begun\342\200'; while [ ! -e go ]; do sleep 0.1; done; printf '\246 end'"
    async with open_terminal(("sh", "-c", halves), tmp_path) as terminal:
        await terminal.wait_for("begun")
        (tmp_path / "go").touch()
        await terminal.wait_for("end")
        assert "begun\N{HORIZONTAL ELLIPSIS} end" in terminal.output


async def test_end_waits_for_all_that_the_program_has_shown(tmp_path: Path) -> None:
    async with open_terminal(("sh", "-c", 'echo "$TEXT"; exit 3'), tmp_path, {"TEXT": "last words"}) as terminal:
        assert await terminal.end() == 3
        assert "last words" in terminal.output


async def test_ctrl_c_ends_a_program(tmp_path: Path) -> None:
    async with open_terminal(("sh", "-c", "echo begun; exec sleep 1000"), tmp_path) as terminal:
        await terminal.wait_for("begun")
        terminal.type(CTRL_C)
        assert await asyncio.wait_for(terminal.end(), 60) != 0
