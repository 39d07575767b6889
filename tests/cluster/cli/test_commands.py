"""The commands of people against a real control plane: what they print, and their exit codes."""

import asyncio
import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest
import yaml

from cli.cluster_errors import is_unknown_kind
from kube.client import Client
from kube.errors import NotFound
from kube.resources import INFERENCE_SERVICES, METAL_HOSTS, MODELS, Resource
from tests.cluster.main_job.cluster import READY_SECONDS, Cluster
from tests.controlplane.members import MetalHost
from tests.controlplane.plane import ControlPlane
from tests.controlplane.process import CHECKOUT
from tests.support.documents import list_blocks
from tests.support.eventually import eventually
from tests.support.pomona_command import ANSWER, PROMPT, Pomona, ask_on_terminal
from tests.support.terminal import CTRL_D


@pytest.fixture
def pomona(plane: ControlPlane, namespace: str) -> Pomona:
    return Pomona(plane, namespace)


async def test_service_in_a_pod_is_deployed_asked_and_deleted(
    pomona: Pomona, cluster: Cluster, plane: ControlPlane
) -> None:
    deploy = ("deploy", "chat", f"--model={cluster.files.url}/tiny.gguf", "--context-length=256")
    output = await pomona.succeed(*deploy)
    assert f"applied Model tiny in namespace {cluster.namespace}" in output
    assert f"chat serves: ask it with `pomona chat chat{pomona.options}`" in output

    async def is_labelled() -> bool:
        service = await cluster.client.get(INFERENCE_SERVICES, "chat", cluster.namespace)
        return "inference.pomona.dev/engine" in service["metadata"].get("labels", {})

    await eventually(is_labelled)  # the last write of the controller, after that of the status
    versions = await cluster.versions(MODELS, INFERENCE_SERVICES)
    assert "chat serves" in await pomona.succeed(*deploy)
    assert await cluster.versions(MODELS, INFERENCE_SERVICES) == versions, "the same order changes nothing"

    listed = (await pomona.succeed("list")).splitlines()
    assert listed[0].split() == ["NAME", "PHASE", "READY", "MODEL", "ON", "AGE", "REASON"]
    assert listed[1].split()[:5] == ["chat", "Ready", "1/1", "tiny", "cpu"]
    assert json.loads(await pomona.succeed("list", "-o", "json"))["items"][0]["spec"]["contextLength"] == 256
    assert await pomona.succeed("list", "-o", "name") == "inferenceservice.inference.pomona.dev/chat\n"

    status = (await pomona.succeed("status", "chat")).splitlines()
    assert status[0].startswith("chat serves: ")
    assert f"next: ask it: pomona chat chat{pomona.options}" in " ".join(status)
    assert any("Pod chat-" in line and "Ready" in line for line in status)
    assert "on node cpu-1" in "\n".join(status)

    assert "init: initializing" in await pomona.succeed("logs", "chat")
    assert "init: initializing" in await cluster.kubectl("logs", "deployment/chat"), "without an option, too"
    assert len((await pomona.succeed("logs", "chat", "--replica", "0", "--tail", "2")).splitlines()) == 2

    answered = await pomona.run("chat", "chat", "Who are you?")
    assert answered.code == 0, answered
    assert answered.output.startswith(ANSWER)
    assert re.fullmatch(r"cluster \S+\n\d+ tokens in \d+\.\d\d s: the first after .* s.*\n", answered.errors), answered

    async with pomona.on_terminal("chat", "chat") as terminal:
        # The engine closes the connection of each answer, and the client does not see that at once.
        for question in ("Who are you?", "Really?"):
            await ask_on_terminal(terminal, question)
        await terminal.wait_for(PROMPT)
        terminal.type(CTRL_D)
        assert await terminal.end() == 0, terminal.output

    await cluster.apply(cluster.service("absent", "cpu", image="registry.test/absent:1"))
    await cluster.wait_for_phase("absent", "Failed", "ImagePullBackOff")
    waiting = await pomona.run("logs", "absent")
    assert waiting.code == 0, waiting
    assert "is waiting to start: " in waiting.errors
    await pomona.succeed("delete", "absent")

    editor = await make_editor(plane, cluster)
    assert (await editor.succeed("chat", "chat", "Who are you?")).startswith(ANSWER)
    seen = " ".join((await editor.succeed("status", "chat")).split())
    assert "Pod chat-" in seen
    assert "not shown" not in seen, "a service in pods has no process on a host that a tenant could miss"

    refused = await pomona.run("delete", "chat")
    assert refused.code == 1
    assert "serves now, with 1 replica: add --yes" in refused.errors
    deleted = await pomona.succeed("delete", "chat", "--yes", "--model")
    assert deleted.splitlines() == [
        f"deleted InferenceService chat in namespace {cluster.namespace}",
        f"deleted Model tiny in namespace {cluster.namespace}",
    ]


async def make_editor(plane: ControlPlane, cluster: Cluster) -> Pomona:
    """Return the command as one runs it who may edit the namespace."""
    editor = Pomona(plane, cluster.namespace)
    editor.kubeconfig = await plane.service_account_kubeconfig(cluster.namespace, "default")
    await cluster.kubectl(
        "create", "rolebinding", "e", "--clusterrole=edit", f"--serviceaccount={cluster.namespace}:default"
    )

    async def is_granted() -> bool:
        # The API server learns of a new binding from a watch, a bit later.
        return (await editor.run("status", "chat")).code == 0

    await eventually(is_granted)
    return editor


async def test_service_on_a_host_is_deployed_asked_and_drained(
    pomona: Pomona, cluster: Cluster, host: MetalHost
) -> None:
    await pomona.succeed("deploy", "chat", f"--model={cluster.files.url}/tiny.gguf", "--accelerator=metal")
    answered = await pomona.run("chat", "chat", "Who are you?")
    assert answered.output.startswith(ANSWER), answered
    logs = await pomona.run("logs", "chat")
    assert f"the whole log is on host {host.name}: pomona agent logs --engine chat-" in logs.errors
    status = await pomona.succeed("status", "chat")
    assert f"MetalHost {host.name}  Ready, " in status
    assert (await pomona.succeed("hosts")).splitlines()[1].split()[:2] == [host.name, "Ready"]

    await pomona.succeed("host", "cordon", host.name)
    assert f"{host.name}  Ready,Cordoned" in await pomona.succeed("host", "list")
    draining = await pomona.start("host", "drain", host.name)
    assert draining.stdout is not None
    assert b"draining studio-1" in await draining.stdout.readline()
    assert b"on this host" in await draining.stdout.readline()
    assert (await cluster.client.get(METAL_HOSTS, host.name))["spec"] == {"unschedulable": True, "drain": True}
    await pomona.succeed("delete", "chat", "--yes")
    async with asyncio.timeout(READY_SECONDS):
        rest, _ = await draining.communicate()
    assert rest.decode().endswith(f"drained {host.name}: no process is left on it\n")
    await pomona.succeed("host", "uncordon", host.name)
    assert (await cluster.client.get(METAL_HOSTS, host.name))["spec"] == {"unschedulable": False, "drain": False}
    shown = await pomona.succeed("host", "taint", host.name, "dedicated=research:NoSchedule", "spare:NoExecute")
    assert shown == f"taints of {host.name}: dedicated=research:NoSchedule, spare:NoExecute\n"
    assert "taints of" in await pomona.succeed("host", "taint", host.name, "dedicated-")
    taints = (await cluster.client.get(METAL_HOSTS, host.name))["spec"]["taints"]
    assert taints == [{"key": "spare", "effect": "NoExecute"}]


@pytest.mark.usefixtures("host")
async def test_commands_of_the_document_print_what_it_shows(pomona: Pomona, cluster: Cluster) -> None:
    (cluster.files.root / "model.gguf").hardlink_to(cluster.files.root / "tiny.gguf")
    document = (CHECKOUT / "docs" / "command-line.md").read_text()
    for shown in list_blocks(document)[0].split("$ ")[1:]:
        command, _, expected = shown.partition("\n")
        program, *words = shlex.split(command.replace("http://10.77.0.1", cluster.files.url))
        assert program == "pomona"
        done = await pomona.run(*words)
        assert done.code == 0, done
        printed = f"{done.output}{done.errors}".replace(cluster.namespace, "default")
        options = pomona.options.replace(cluster.namespace, "default")
        assert _drop_variable_parts(printed, options) == _drop_variable_parts(expected, options), command


def _drop_variable_parts(text: str, options: str) -> list[str]:
    """Return the words without progress, speed, figures, hashes, the cluster, and the options that hints repeat.

    The host of the demo has the weights already, of another service; that of the test has not, and breaks the line
    elsewhere.
    """
    steady = re.sub(r"^\[.*\n|^cluster .*\n|, then .* tokens/s|\bweights there,", "", text, flags=re.MULTILINE)
    words = " ".join(steady.replace("│", "").split()).replace(options, "")
    return re.sub(r"-[0-9a-f]{8}-|[0-9][0-9.,:/]*", "#", words).split()


async def test_service_that_cannot_serve_ends_with_its_condition_and_exit_code_1(
    pomona: Pomona, cluster: Cluster
) -> None:
    source = f"--model={cluster.files.url}/tiny.gguf"
    refused = await pomona.run("deploy", "chat", source, "--runtime", "no-engine")
    assert refused.code == 1
    assert "chat cannot serve: runtime no-engine does not exist: use one of" in refused.errors
    status = await pomona.run("status", "chat")
    assert status.code == 1
    assert status.output.startswith("chat cannot serve: runtime no-engine does not exist")

    missing = await pomona.run("deploy", "other", "--model", "tine")
    assert missing.code == 1
    assert f"Model tine does not exist in namespace {cluster.namespace}: did you mean tiny?" in missing.errors
    assert await cluster.services() == ["chat"]

    other = cluster.files.url + "/other.gguf"
    taken = await pomona.run("deploy", "new", f"--model={other}", "--model-name=tiny")
    assert f"Model tiny has source {cluster.files.url}/tiny.gguf and is used by chat: choose another" in taken.errors
    assert await cluster.services() == ["chat"]

    await cluster.kubectl("delete", "isvc", "chat")
    await cluster.apply(cluster.model("other"), cluster.service("theirs", "cpu", modelRef="other", replicas=0))
    conflict = await pomona.run("deploy", "theirs", "--model", "tiny", "--no-wait")
    assert conflict.code == 1
    assert f"inferenceservices {cluster.namespace}/theirs belongs to kubectl-client-side-apply" in conflict.errors
    assert "spec.modelRef" in conflict.errors
    assert (await cluster.get("theirs")).spec.model_ref == "other"


async def test_files_are_checked_before_anything_is_applied(pomona: Pomona, cluster: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "both.yaml"
    model, service = cluster.model(), cluster.service("chat", "cpu", replicas=0)
    path.write_text(yaml.safe_dump_all([model, {**service, "spec": {**service["spec"], "replica": 2}}]))
    refused = await pomona.run("deploy", "-f", str(path))
    assert refused.code == 2
    assert (
        f"{path}:19: document 2, InferenceService chat: spec.replica: unknown field; did you mean replicas?"
        in refused.errors
    )
    assert await cluster.services() == []
    path.write_text(yaml.safe_dump_all([service, model]))
    assert "chat is suspended: spec.replicas is 0" in await pomona.succeed("deploy", "-f", str(path))


async def test_ctrl_c_ends_the_wait_and_not_the_service(pomona: Pomona, cluster: Cluster) -> None:
    # There is no host, so that the service waits.
    process = await pomona.start("deploy", "chat", f"--model={cluster.files.url}/tiny.gguf", "--accelerator=metal")
    assert process.stdout is not None
    while b"NoHost" not in (line := await process.stdout.readline()) and b"no live host" not in line:
        assert line, "the command ended"
    process.send_signal(2)
    output, _ = await process.communicate()
    assert process.returncode == 130
    assert f"chat goes on deploying: `pomona status chat{pomona.options}`" in output.decode()
    assert await cluster.services() == ["chat"]


async def test_missing_right_is_named_with_who_can_grant_it(
    pomona: Pomona, plane: ControlPlane, namespace: str
) -> None:
    pomona.kubeconfig = await plane.service_account_kubeconfig(namespace, "default")
    for command in (
        ["list"],
        ["status", "chat"],
        ["logs", "chat"],
        ["chat", "chat", "Hello"],
        ["delete", "chat"],
        ["deploy", "chat", "--model", "tiny"],
        ["hosts"],
        ["host", "drain", "studio-1"],
    ):
        refused = await pomona.run(*command)
        assert refused.code == 1
        assert f"Error: system:serviceaccount:{namespace}:default may not " in refused.errors
        ways_out = ("administrator of the cluster can grant it", "administrators of the cluster may, and can bind")
        assert any(way in refused.errors for way in ways_out)
        assert len(refused.errors.splitlines()) == 1


async def test_unknown_object_and_refused_token_are_told_in_one_line(
    pomona: Pomona, cluster: Cluster, tmp_path: Path
) -> None:
    await cluster.apply(cluster.model(), cluster.service("chat", "cpu", replicas=0))
    for command in ("status", "logs", "chat", "delete"):
        unknown = await pomona.run(command, "chta")
        assert unknown.errors == (
            f"Error: InferenceService chta does not exist in namespace {cluster.namespace}: did you mean chat?\n"
        )
    config = json.loads(pomona.kubeconfig.read_text())
    config["users"][0]["user"]["token"] = "wrong"
    pomona.kubeconfig = tmp_path / "config"
    pomona.kubeconfig.write_text(json.dumps(config))
    refused = await pomona.run("list")
    assert refused.code == 1
    assert "refuses these credentials: log in again" in refused.errors
    assert len(refused.errors.splitlines()) == 1


async def test_kind_that_is_not_installed_is_told_from_an_object_that_is_missing(
    client: Client, namespace: str
) -> None:
    with pytest.raises(NotFound) as caught:
        await client.list(Resource("absent.pomona.dev", "v1", "things", "Thing"), namespace)
    assert is_unknown_kind(caught.value)
    with pytest.raises(NotFound) as caught:
        await client.get(INFERENCE_SERVICES, "absent", namespace)
    assert not is_unknown_kind(caught.value)


async def test_kubectl_runs_and_completes_the_commands_as_its_own(
    plane: ControlPlane, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kubectl finds both programs on PATH, where the installation has put them beside Python."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    await cluster.apply(cluster.model(), cluster.service("chat-one", "cpu", replicas=0))
    assert "chat-one" in await plane.kubectl("pomona", "list", "-n", cluster.namespace)
    assert "  kubectl pomona status chat\n" in await plane.kubectl("pomona", "status", "--help")

    async def is_completed() -> bool:
        words = ("__complete", "pomona", "status", "-n", cluster.namespace, "ch")
        return (await plane.kubectl(*words)).splitlines()[0] == "chat-one"

    # An answer that takes longer than two seconds is none.
    assert await eventually(is_completed)
