"""A question is asked at a terminal only, and Ctrl-C answers it."""

import sys

import pytest

from tests.controlplane.process import CHECKOUT
from tests.support.terminal import CTRL_C, open_terminal

SCRIPT = """
import asyncio, click
from cli.confirmation import confirm

async def ask():
    confirm("chat serves now", "Delete it?")
    print("deleted")

click.command(lambda: asyncio.run(ask()))()
"""


@pytest.mark.parametrize(
    ("typed", "code", "said"), [(CTRL_C, 1, "Aborted!"), ("n\n", 1, "Aborted!"), ("y\n", 0, "deleted")]
)
async def test_question_ends_with_the_first_key(typed: str, code: int, said: str) -> None:
    async with open_terminal([sys.executable, "-c", SCRIPT], CHECKOUT) as terminal:
        await terminal.wait_for("chat serves now. Delete it? [y/N]: ")
        await terminal.type_until(typed, said)
        assert await terminal.end() == code
