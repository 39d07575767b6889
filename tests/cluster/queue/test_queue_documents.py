"""The examples of docs/queue-commands.md print what the document says, on the cluster that it describes.

So does that of `pomona simulate` in docs/density-api.md.
"""

import re
import shlex
from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from kube.client import Client
from kube.resources import NODES
from tests.cluster.queue.queue_user import QueueUser
from tests.controlplane.plane import ControlPlane
from tests.controlplane.process import CHECKOUT
from tests.support.documents import list_blocks
from tests.support.pomona_command import Pomona
from tests.support.simulated_nodes import SimulatedNodes

DOCUMENT = (CHECKOUT / "docs" / "queue-commands.md").read_text()
PAGE = (CHECKOUT / "docs" / "density-api.md").read_text()
EXAMPLES = [block for block in list_blocks(DOCUMENT) if block.startswith("$ pomona ")]
OPTIONS = ("--min-run=1s", "--scheduling-mode=Queue")


@pytest_asyncio.fixture
async def namespace(plane: ControlPlane) -> AsyncIterator[str]:
    """The namespace of the document."""
    await plane.kubectl("create", "namespace", "team")
    yield "team"
    await plane.kubectl("delete", "namespace", "team")


def normalize(text: str) -> list[str]:
    """Return the words of each line without names of pods, times, and why there is no estimate, which differ."""
    timeless = re.sub(r"\b(\d+[smh]|TooFewSeen|Overtaken)\b", "TIME", text)
    nameless = re.sub(r"\b([a-z]+)-[0-9a-z]{6,10}-[0-9a-z]{5}\b", r"\1-POD", timeless)
    return [" ".join(line.split()) for line in nameless.splitlines() if line.strip()]


def is_shown(output: str, said: str) -> bool:
    """Return whether a document shows an output as a terminal of 80 columns does, which cuts lines off."""
    lines, shown = normalize(output), normalize(said)
    return len(lines) == len(shown) and all(
        line.startswith(cut.removesuffix("…")) if cut.endswith("…") else line == cut
        for line, cut in zip(lines, shown, strict=True)
    )


async def test_examples_print_what_the_document_says(
    simulated: SimulatedNodes,
    user: QueueUser,
    plane: ControlPlane,
    client: Client,
    tmp_path: Path,
) -> None:
    pomona = Pomona(plane, user.namespace)
    await simulated.add("gpu-1", devices=4)
    await user.serve("nightly", 4, "batch", evictionProtection=True)
    await user.wait_until_on("nightly", "gpu-1")
    await simulated.add("gpu-2", devices=2)
    await user.serve("chat", 2)
    await user.wait_until_on("chat", "gpu-2")
    await simulated.add("gpu-3", devices=2)
    await client.patch_merge(NODES, "gpu-3", None, {"spec": {"unschedulable": True}}, field_manager="admin")
    for name, gpus, priority in (("translate", 2, "normal"), ("summarize", 1, "low"), ("giant", 16, "high")):
        await user.wait_for_a_later_second()
        await user.serve(name, gpus, priority)
        await user.wait_until_queued(name)
    await user.wait_until_evictable("chat")
    await user.wait_for_status("translate", place="1/2")
    await user.wait_for_status("summarize", place="2/2")
    await user.wait_for_status("giant", reason="NoSuchHardware")
    (manifest,) = list_blocks(DOCUMENT, "yaml")
    (tmp_path / "critical.yaml").write_text(manifest)
    assert len(EXAMPLES) == 5
    printed = {}
    for example in EXAMPLES:
        command, _, said = example.partition("\n")
        words = shlex.split(command.replace("critical.yaml", str(tmp_path / "critical.yaml")))[2:]
        output = await pomona.succeed(*words, *(OPTIONS if words[0] == "plan" or "explain" in words else ()))
        if not is_shown(output, said):
            printed[command] = output
    (command,) = (block for block in list_blocks(PAGE) if block.startswith("$ pomona simulate"))
    (said,) = (block for block in list_blocks(PAGE, "text") if "what-if" in block)
    output = (await pomona.run(*shlex.split(command)[2:], *OPTIONS)).output
    if not is_shown("\n".join(output.splitlines()[-len(said.splitlines()) :]), said):
        printed[command] = output
    assert printed == {}, "\n".join(f"{command}\n{output}" for command, output in printed.items())
