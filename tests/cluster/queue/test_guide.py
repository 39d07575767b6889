"""The guide to the queue, docs/queue.md: its commands print what it says, on the cluster that it describes."""

import re
from pathlib import Path

import pytest_asyncio

from tests.cluster.queue.queue_user import RUN_SECONDS, QueueUser
from tests.controlplane.process import CHECKOUT
from tests.support.documents import list_steps, split_commands
from tests.support.eventually import eventually
from tests.support.shell import Shell
from tests.support.simulated_nodes import SimulatedNodes

GUIDE = CHECKOUT / "docs" / "queue.md"


@pytest_asyncio.fixture
async def shell(user: QueueUser, tmp_path: Path) -> Shell:
    """A shell in the namespace of the user, which the guide knows as `default`."""
    shell = Shell(user.plane, tmp_path / "home")
    await shell.run(f"cp $KUBECONFIG {tmp_path}/kubeconfig")
    shell.environment["KUBECONFIG"] = f"{tmp_path}/kubeconfig"
    await shell.run(f"kubectl config set-context --current --namespace={user.namespace}")
    return shell


def is_printed(expected: str, printed: str) -> bool:
    """Return whether a command has printed what a document says, whose `...` stands for anything."""
    lines, output = ([line.split() for line in text.strip().splitlines()] for text in (expected, printed))
    patterns = [re.escape(" ".join(line)).replace(re.escape("..."), ".*") for line in lines]
    return len(patterns) == len(output) and all(map(re.fullmatch, patterns, map(" ".join, output)))


def test_what_is_printed_is_compared_line_by_line() -> None:
    assert is_printed("NAME  PLACE\nchat  1/2 of ...\n", "NAME    PLACE\nchat    1/2 of pool\n")
    assert not is_printed("chat  1/2\n", "chat  2/2\n")
    assert not is_printed("chat  1/2\n", "chat  1/2\nlate  2/2\n")
    assert split_commands("$ one\na\nb\n$ two\n") == [("one", "a\nb\n"), ("two", "")]


async def test_guide_prints_what_happens(simulated: SimulatedNodes, user: QueueUser, shell: Shell) -> None:
    await simulated.add("gpu-1", devices=2)

    async def check(command: str, expected: str) -> None:
        async def prints() -> bool:
            said = await shell.run(command)
            assert is_printed(expected.replace("default/", f"{user.namespace}/"), said), said
            return True

        # What changes something is typed once; what is seen of it may come a moment later.
        await (eventually(prints, RUN_SECONDS) if " get " in command else prints())

    for language, block in list_steps(GUIDE.read_text()):
        if language == "yaml" and "kind:" in block:
            if "name: archive" in block:
                # It comes in a later second, so that chance does not decide who was first.
                await user.wait_until_evictable("chat", "reports")
            if "name: late" in block:
                await user.wait_for_a_later_second()
            if "name: incident" in block:
                simulated.hold_ends()
            (shell.folder / "file.yaml").write_text(block)
            await shell.run("kubectl apply --filename file.yaml")
        if language == "console":
            for command, expected in split_commands(block):
                await check(command, expected)
            if "Draining" in block:
                simulated.let_end()
