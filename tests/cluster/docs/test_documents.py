"""The API server accepts the manifests of the documents, and the instructions for a cluster work."""

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from crds.meta import HOSTS_NAMESPACE
from kube import credentials
from kube.client import Client, connect
from kube.resources import LEASES, METAL_HOSTS, MODELS
from metal_agent.cluster.host_identity import FILE_NAME
from tests.cluster.install.conftest import installable, uninstalled
from tests.controlplane import binaries
from tests.controlplane.members import CONTROLLER_ACCOUNT, CONTROLLER_NAMESPACE
from tests.controlplane.plane import ControlPlane
from tests.controlplane.process import CHECKOUT, Process
from tests.support.documents import DOCUMENTS, list_blocks, list_manifests
from tests.support.eventually import eventually
from tests.support.shell import Shell

__all__ = ["installable", "uninstalled"]

CLUSTER_PAGE = (CHECKOUT / "docs" / "cluster.md").read_text()
KUEUE = "kueue.x-k8s.io/"
"""Group of the kinds of Kueue, which this control plane has not: `make test-kueue` applies such objects."""
MANIFESTS = {
    str(path.relative_to(CHECKOUT)): [each for each in list_manifests(path) if f"apiVersion: {KUEUE}" not in each]
    for path in DOCUMENTS
}


@pytest.mark.parametrize("document", [name for name, manifests in MANIFESTS.items() if manifests])
async def test_manifests_of_a_document_are_accepted(plane: ControlPlane, tmp_path: Path, document: str) -> None:
    for number, manifest in enumerate(MANIFESTS[document]):
        (tmp_path / f"{number}.yaml").write_text(manifest)
    said = await plane.kubectl("apply", "--dry-run=server", f"--filename={tmp_path}")
    assert len(re.findall(r"\(server dry run\)", said)) >= len(MANIFESTS[document])


async def test_examples_of_the_demo_are_accepted(plane: ControlPlane) -> None:
    said = await plane.kubectl("apply", "--dry-run=server", f"--filename={CHECKOUT / 'examples'}")
    assert len(said.splitlines()) == 4


async def test_examples_of_the_gateway_are_accepted(plane: ControlPlane) -> None:
    said = await plane.kubectl("apply", "--dry-run=server", f"--filename={CHECKOUT / 'examples' / 'gateway'}")
    assert len(said.splitlines()) == 2


async def test_examples_of_vendors_are_accepted(plane: ControlPlane) -> None:
    said = await plane.kubectl("apply", "--dry-run=server", f"--filename={CHECKOUT / 'examples' / 'vendors'}")
    paths = list((CHECKOUT / "examples" / "vendors").iterdir())
    assert len(said.splitlines()) == 2 * len(paths)


async def test_examples_of_volumes_are_accepted(plane: ControlPlane) -> None:
    said = await plane.kubectl("apply", "--dry-run=server", f"--filename={CHECKOUT / 'examples' / 'volumes'}")
    assert len(said.splitlines()) == 3


@pytest.mark.usefixtures("node", "uninstalled")
async def test_instructions_for_a_cluster_work_word_for_word(
    plane: ControlPlane, client: Client, tmp_path: Path
) -> None:
    install, output, invite, on_the_host, printed, listed = list_blocks(CLUSTER_PAGE)
    shell = Shell(plane, tmp_path)
    assert {*output.splitlines()} - {"..."} <= {*(await shell.run(install)).splitlines()}
    (tmp_path / ".local").mkdir()
    (tmp_path / ".local" / "bin").symlink_to(Path(sys.executable).parent)
    code = await shell.run(invite.replace("NAME", "office-7"))
    install_tool, join, serve = on_the_host.splitlines()
    assert "uv tool install" in install_tool  # here it is the virtual environment that runs the tests
    said = await shell.run(join.replace("CODE", code.strip()))
    heads = [line.partition("/root")[0].replace("studio-2", "office-7") for line in printed.splitlines()[:3]]
    assert [head for head in heads if head not in said] == []
    # tests/hosts and `make test-systemd` install the service: here its command runs.
    assert serve == "sudo ~/.local/bin/pomona agent install"
    argv = [str(tmp_path / ".local" / "bin" / "pomona"), "agent"]
    agent = Process("agent", argv, tmp_path / "agent.log", shell.environment)
    agent.start()
    try:

        async def is_ready() -> bool:
            host = await client.get(METAL_HOSTS, "office-7")
            return any(
                condition["type"] == "Ready" and condition["status"] == "True"
                for condition in host["status"]["conditions"]
            )

        await eventually(is_ready)
        command, columns, *_ = listed.splitlines()
        assert columns.split() == (await shell.run(command.removeprefix("$ "))).splitlines()[0].split()
        kept = tmp_path / ".local" / "state" / "pomona" / FILE_NAME
        assert not any(secret in kept.read_text() for secret in plane.secrets)
        assert kept.stat().st_mode & 0o777 == 0o600
    finally:
        await agent.stop()
        for kind, place in ((METAL_HOSTS, None), (LEASES, HOSTS_NAMESPACE)):
            await plane.request("DELETE", kind.path(place, "office-7"), accept={404})


async def test_kubeconfig_keeps_the_token_out_of_arguments_and_of_others_reach(
    plane: ControlPlane, tmp_path: Path
) -> None:
    recorder = tmp_path / "bin" / "kubectl"
    recorder.parent.mkdir()
    kubectl = binaries.ensure_binaries().kubectl
    recorder.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/arguments\nexec {kubectl} "$@"\n')
    recorder.chmod(0o755)
    written = tmp_path / "controller.kubeconfig"
    written.write_text("of before")
    written.chmod(0o644)
    environment = os.environ | plane.environment | {"PATH": f"{recorder.parent}:{os.environ['PATH']}"}
    argv = [str(CHECKOUT / "deploy" / "kubeconfig"), CONTROLLER_NAMESPACE, CONTROLLER_ACCOUNT, str(written)]
    await asyncio.to_thread(subprocess.run, argv, env=environment, check=True)

    config = yaml.safe_load(written.read_text())
    (user,) = config["users"]
    assert user["user"]["token"] not in (tmp_path / "arguments").read_text()
    assert written.stat().st_mode & 0o777 == 0o600
    (context,) = config["contexts"]
    assert (context["context"]["user"], context["context"]["namespace"]) == (user["name"], CONTROLLER_NAMESPACE)
    async with connect(credentials.load(written)) as client:
        assert (await client.list(MODELS)).items == []


@pytest.mark.parametrize("field", ["isvc.spec.contextLength", "mdl.spec.source", "mh.status.availableBytes", "mp.spec"])
async def test_kubectl_explain_describes_each_field(plane: ControlPlane, field: str) -> None:
    said = await plane.kubectl("explain", field)
    assert "DESCRIPTION" in said
    assert "<empty>" not in said
