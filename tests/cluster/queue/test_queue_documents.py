"""The examples of docs/queue-commands.md print what the document says, on the cluster that it describes."""

import re
import shlex
from pathlib import Path

from kube.client import Client
from kube.resources import NODES
from tests.cluster.queue.queue_user import QueueUser
from tests.controlplane.plane import ControlPlane
from tests.controlplane.process import CHECKOUT
from tests.support.documents import list_blocks
from tests.support.pomona_command import Pomona
from tests.support.simulated_nodes import SimulatedNodes

DOCUMENT = (CHECKOUT / "docs" / "queue-commands.md").read_text()
EXAMPLES = [block for block in list_blocks(DOCUMENT) if block.startswith("$ pomona ")]
OPTIONS = ("--min-run=1s", "--scheduling-mode=Queue")


def normalize(text: str, namespace: str) -> list[str]:
    """Return the words of each line, with the namespace of the document; times differ, and with them the blanks."""
    return [
        " ".join(re.sub(r"\b\d+[smh]\b", "TIME", line.replace(namespace, "team")).split())
        for line in text.splitlines()
        if line.strip()
    ]


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
        output = await pomona.succeed(*words, *(() if words == ["queue"] else OPTIONS))
        if normalize(output, user.namespace) != normalize(said, user.namespace):
            printed[command] = output.replace(user.namespace, "team")
    assert printed == {}, "\n".join(f"{command}\n{output}" for command, output in printed.items())
