"""The commands and values of docs/gateway.md work word for word, with the gateway that the chart installs."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from kube.client import Obj
from kube.resources import GATEWAY_KEYS
from tests.cluster.install.test_chart import render
from tests.cluster.main_job.cluster import Cluster
from tests.controlplane.plane import ControlPlane
from tests.controlplane.process import CHECKOUT
from tests.support.documents import list_blocks
from tests.support.eventually import eventually
from tests.support.file_server import ALLOWED_NETWORKS
from tests.support.shell import Shell

PAGE = (CHECKOUT / "docs" / "gateway.md").read_text()
HELLO = "Hello from a tiny model"


def test_page_has_the_commands_that_are_run_below() -> None:
    assert [block.split()[:3] for block in list_blocks(PAGE)] == [
        ["pomona", "key", "create"],
        ["kubectl", "port-forward", "--namespace"],
        ["printf", "'Authorization:", "Bearer"],
        ["pomona", "endpoint", "--key"],
        ["pomona", "key", "rotate"],
    ]


async def test_values_make_an_ingress(tmp_path: Path) -> None:
    (values,) = list_blocks(PAGE, "yml")
    (tmp_path / "values.yaml").write_text(values)
    ingress = (await render(f"--values={tmp_path / 'values.yaml'}"))["Ingress", "pomona-system", "pomona-gateway"]
    stated = yaml.safe_load(values)["gateway"]["ingress"]
    assert ingress["metadata"]["annotations"] == stated["annotations"]
    assert ingress["spec"]["rules"][0]["host"] == stated["host"]


@pytest.fixture
def shell(plane: ControlPlane, namespace: str, tmp_path: Path) -> Iterator[Shell]:
    """A shell in the namespace of the test; what it has started in the background ends with the test."""
    shell = Shell(plane, tmp_path / "shell")
    kubeconfig = shell.folder / "kubeconfig"
    kubeconfig.write_text(plane.kubeconfig().read_text())
    shell.environment |= {
        "KUBECONFIG": str(kubeconfig),
        "PATH": f"{Path(sys.executable).parent}:{shell.environment['PATH']}",
    }
    choose = ["kubectl", "config", "set-context", "--current", f"--namespace={namespace}"]
    subprocess.run(choose, env=shell.environment, check=True, capture_output=True)
    yield shell
    if (pid := shell.folder / "forward.pid").exists():
        os.kill(int(pid.read_text()), signal.SIGTERM)


@pytest.mark.long
@pytest.mark.usefixtures("node", "uninstalled")
async def test_commands_of_the_page_work_one_after_the_other(
    plane: ControlPlane, cluster: Cluster, shell: Shell
) -> None:
    create, ask, list_models, endpoint, replace = list_blocks(PAGE)
    (install,) = list_blocks(
        (CHECKOUT / "docs" / "operations.md").read_text().partition("\n## Install with Helm\n")[2].partition("\n## ")[0]
    )
    # A private network is where the tests serve their weights.
    sources = f"models.allowPrivateSources={{{','.join(map(str, ALLOWED_NETWORKS))}}}"
    await shell.run(install.replace("--values values.yaml", f"--set gateway.replicas=1 --set '{sources}'"))
    await cluster.apply(cluster.model(), cluster.service("chat", "cpu"), cluster.service("spare", "cpu", replicas=0))
    await cluster.ready("chat")
    await plane.kubectl("rollout", "status", "deployment", "pomona-gateway", "--namespace=pomona-system")

    # 1. The first key and the first request. The port is forwarded as long as the shell of the page is open.
    said = await shell.run(create)
    assert said.splitlines()[1].split()[:2] == ["app", "True"]
    forward, export, *_ = ask.splitlines()
    assert forward.endswith(" &")
    kept = ">forward.log 2>&1 & echo $! >forward.pid"
    await shell.run(forward.replace("&", kept))
    question = ask.removeprefix(f"{forward}\n")
    answered = await eventually(lambda: ask_question(shell, question))
    assert HELLO in answered["choices"][0]["message"]["content"]

    async def is_counted() -> bool:
        # The controller reads that of the pods which the chart has made.
        return " ago " in await shell.run("pomona key list")

    await eventually(is_counted)

    # 2. The list of models, and the configuration of a client.
    models = json.loads(await shell.run(f"{export}\n{list_models}"))["data"]
    assert {model["id"]: model["status"]["value"] for model in models} == {"chat": "loaded", "spare": "unloaded"}
    overview, configuration = endpoint.splitlines()
    assert "kubectl port-forward service/pomona-gateway 8080:80" in await shell.run(overview)
    assert HELLO in await shell.run(configuration)

    # 3. Another key, which the former one outlives for a day; then none.
    rotate, suspend, resume, delete = replace.splitlines()
    former = (shell.folder / "app.key").read_text()
    await shell.run(rotate)
    assert (shell.folder / "app.key").read_text() != former
    assert HELLO in json.dumps(await ask_question(shell, question))
    (shell.folder / "app.key").write_text(former)
    assert HELLO in json.dumps(await ask_question(shell, question))
    await shell.run(suspend)
    refused = await eventually(lambda: ask_until(shell, question, "error"))
    assert refused["error"]["code"] == "invalid_api_key"
    await shell.run(resume)
    await eventually(lambda: ask_until(shell, question, "choices"))
    await shell.run(delete)
    assert await cluster.names(GATEWAY_KEYS) == []
    await eventually(lambda: ask_until(shell, question, "error"))

    # 4. A tenant, who may read nothing in pomona-system but where the gateway is.
    await cluster.kubectl(
        "create", "rolebinding", "e", "--clusterrole=edit", f"--serviceaccount={cluster.namespace}:default"
    )
    (shell.folder / "kubeconfig").write_text(
        (await plane.service_account_kubeconfig(cluster.namespace, "default")).read_text()
    )

    async def is_told() -> bool:
        # The API server learns of a new binding from a watch, a bit later.
        return "in pods          http://pomona-gateway.pomona-system.svc" in await shell.run(
            f"pomona endpoint --namespace {cluster.namespace}"
        )

    await eventually(is_told)
    with pytest.raises(AssertionError, match="Forbidden"):
        await shell.run("kubectl get services --namespace pomona-system")


async def ask_question(shell: Shell, question: str) -> Obj:
    """Return the answer to the request of the page."""
    answer: Obj = json.loads(await shell.run(question))
    return answer


async def ask_until(shell: Shell, question: str, field: str) -> Obj:
    """Return the answer once it has a field. Raises AssertionError before."""
    answer = await ask_question(shell, question)
    assert field in answer
    return answer
