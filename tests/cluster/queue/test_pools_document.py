"""The commands of docs/pools.md, word for word, and what they print."""

import re
from pathlib import Path

from tests.cluster.queue.queue_user import RUN_SECONDS, QueueUser
from tests.cluster.queue.test_pools import Administrator, admin
from tests.controlplane.plane import ControlPlane
from tests.controlplane.process import CHECKOUT
from tests.support.documents import list_blocks, split_commands
from tests.support.eventually import eventually
from tests.support.shell import Shell
from tests.support.simulated_nodes import SimulatedNodes

__all__ = ["admin"]

DOCUMENT = (CHECKOUT / "docs" / "pools.md").read_text()


def read_output(text: str) -> list[list[str]]:
    """Return the words of each line, without the age of objects."""
    return [re.sub(r" \d+s$", "", line.rstrip()).split() for line in text.splitlines()]


async def test_commands_of_the_document_print_what_it_says(
    plane: ControlPlane, simulated: SimulatedNodes, user: QueueUser, admin: Administrator, tmp_path: Path
) -> None:
    await simulated.add("gpu-1")
    await simulated.add("gpu-2", team="research")
    shell = Shell(plane, tmp_path)
    commands, outputs = list_blocks(DOCUMENT, "sh"), list_blocks(DOCUMENT)
    assert len(commands) == len(outputs) == 2
    for block, printed in zip(commands, outputs, strict=True):
        assert read_output(await shell.run(block)) == read_output(printed)
    paper_search, web = (manifest for manifest in list_blocks(DOCUMENT, "yaml") if "InferenceService" in manifest)
    path = tmp_path / "service.yaml"
    path.write_text(paper_search)
    await shell.run(f"kubectl apply --namespace {user.namespace} --filename {path}")
    await user.wait_until_on("paper-search", "gpu-2")
    await admin.wait_for_status("research", used="2/8", lent="0")
    path.write_text(web)
    await shell.run(f"kubectl apply --namespace {user.namespace} --filename {path}")

    async def check(command: str, expected: str) -> None:
        async def prints() -> bool:
            said = await shell.run(f"{command} --namespace {user.namespace}")
            assert read_output(said) == read_output(expected.replace("team-a", user.namespace)), said
            return True

        # What changes something is typed once; what is seen of it may come a moment later.
        await (eventually(prints, RUN_SECONDS) if " get " in command else prints())

    for block in list_blocks(DOCUMENT, "console"):
        for command, printed in split_commands(block):
            await check(command, printed)
    await user.delete("web")
    await user.serve("borrower", replicas=10, scheduling={"pools": ["research", "nvidia"]})
    # Six devices are left at home, and the quota of the namespace in the other pool is two.
    await user.wait_until_on("borrower", *["gpu-2"] * 6, *["gpu-1"] * 2, "", "")
    await user.wait_for_status("borrower", reason="Quota", pool="research")
    await admin.wait_for_status("research", used="8/8", borrowed="2", waiting=2)
    await admin.wait_for_status("nvidia", used="2/8", lent="2")
