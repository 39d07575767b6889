"""`pomona list`, `status`, `logs` and `chat` on real nodes: the kubelet and containerd pass on logs and ports."""

import pytest

from tests.cluster.main_job.cluster import Cluster
from tests.controlplane.members import MetalHost
from tests.controlplane.plane import ControlPlane
from tests.node.conftest import ENDLESS_TOKENS
from tests.node.test_node import CACHE, pods_of
from tests.support.eventually import eventually
from tests.support.pomona_command import ANSWER, PROMPT, Pomona, ask_on_terminal
from tests.support.terminal import CTRL_C, CTRL_D

INTERRUPTED = 130


@pytest.fixture
def command(plane: ControlPlane, namespace: str) -> Pomona:
    return Pomona(plane, namespace)


async def test_pod_is_asked_by_way_of_its_kubelet(cluster: Cluster, command: Pomona) -> None:
    await cluster.apply(cluster.model(**CACHE), cluster.service("chat", "cpu"))
    await cluster.ready("chat")
    assert (await command.succeed("list")).splitlines()[1].split()[:5] == ["chat", "Ready", "1/1", "tiny", "cpu"]
    assert "on node cpu-" in await command.succeed("status", "chat")
    assert len((await command.succeed("logs", "chat", "--tail", "2")).splitlines()) == 2
    assert (await command.succeed("chat", "chat", "Who are you?")).startswith(ANSWER)

    async with command.on_terminal("chat", "chat") as terminal:
        await ask_on_terminal(terminal, "Who are you?")
        await ask_on_terminal(terminal, "Really?")
        (pod,) = await pods_of(cluster, "chat")
        await cluster.kubectl("delete", "pod", pod["metadata"]["name"])

        async def is_replaced() -> bool:
            (replacement,) = await pods_of(cluster, "chat")
            return bool(replacement["metadata"]["uid"] != pod["metadata"]["uid"] and await cluster.urls("chat"))

        await eventually(is_replaced)
        await ask_on_terminal(terminal, "Still there?")
        await terminal.wait_for(PROMPT)
        terminal.type(CTRL_D)
        assert await terminal.end() == 0, terminal.output


async def test_ctrl_c_ends_the_question_and_its_work(cluster: Cluster, command: Pomona) -> None:
    model, length = cluster.model(file="loop.gguf", **CACHE), {"contextLength": ENDLESS_TOKENS}
    await cluster.apply(model, cluster.service("chat", "cpu", **length))
    await cluster.ready("chat")
    async with command.on_terminal("chat", "chat") as terminal:
        await terminal.wait_for(PROMPT)
        terminal.type("Who are you?\n")
        await terminal.wait_for(ANSWER)
        terminal.type(CTRL_C)
        assert await terminal.end() == INTERRUPTED, terminal.output
        assert "Error" not in terminal.output
        assert "Traceback" not in terminal.output

    async def is_cancelled() -> bool:
        return "cancel task" in await command.succeed("logs", "chat", "--tail", "20")

    await eventually(is_cancelled)
    async with command.on_terminal("logs", "chat", "--follow", "--tail", "1") as terminal:
        await terminal.wait_for("\n")
        terminal.type(CTRL_C)
        assert await terminal.end() == INTERRUPTED, terminal.output


async def test_log_of_a_pod_without_its_image_is_told_from_a_failure(cluster: Cluster, command: Pomona) -> None:
    await cluster.apply(cluster.model(**CACHE), cluster.service("chat", "cpu", image="registry.test/absent:1"))
    await cluster.wait_for_phase("chat", "Failed", "ImagePullBackOff")
    assert "ImagePullBackOff" in (await command.run("status", "chat")).output
    logs = await command.run("logs", "chat")
    assert logs.code == 0, logs
    assert "is waiting to start: trying and failing to pull image" in logs.errors


async def test_answer_whose_pod_dies_is_reported_in_one_line(cluster: Cluster, command: Pomona) -> None:
    model, length = cluster.model(file="loop.gguf", **CACHE), {"contextLength": ENDLESS_TOKENS}
    await cluster.apply(model, cluster.service("chat", "cpu", **length))
    await cluster.ready("chat")
    async with command.on_terminal("chat", "chat", "Who are you?") as terminal:
        await terminal.wait_for(ANSWER)
        (pod,) = await pods_of(cluster, "chat")
        await cluster.kubectl("delete", "pod", pod["metadata"]["name"], "--grace-period=1", "--wait=false")
        assert await terminal.end() == 1, terminal.output
    last = terminal.output.splitlines()[-1]
    assert last.startswith("Error: chat at "), terminal.output
    assert last.endswith("the answer ended before [DONE]: the engine or its connection died")


async def test_host_is_asked_at_its_address(cluster: Cluster, host: MetalHost, command: Pomona) -> None:
    await cluster.apply(cluster.model(), cluster.service("chat", "metal"))
    await cluster.ready("chat")
    assert (await command.succeed("list")).splitlines()[1].split()[:5] == ["chat", "Ready", "1/1", "tiny", "metal"]
    assert f"MetalHost {host.name}  Ready, " in await command.succeed("status", "chat")
    assert f"the whole log is on host {host.name}" in (await command.run("logs", "chat")).errors
    async with command.on_terminal("chat", "chat") as terminal:
        await ask_on_terminal(terminal, "Who are you?")
        await ask_on_terminal(terminal, "Really?")
        await terminal.wait_for(PROMPT)
        terminal.type(CTRL_C)
        assert await terminal.end() == INTERRUPTED, terminal.output
