"""The chart's scheduler: every value reaches it, its programs do not share a token, and its extender only reads."""

from pathlib import Path
from typing import Any

import yaml

from cli.extender import command
from tests.cluster.install.chart_values import EVERYTHING
from tests.cluster.install.test_chart import Identity, render, render_everything

VALUES = EVERYTHING["scheduler"]
SCHEDULER: Identity = ("Deployment", "pomona-system", "pomona-scheduler")


def find_containers(objects: dict[Identity, Any]) -> tuple[Any, Any]:
    """Return the containers of the scheduler and of the extender."""
    scheduler, extender = objects[SCHEDULER]["spec"]["template"]["spec"]["containers"]
    return scheduler, extender


async def test_every_value_reaches_scheduler_and_extender(tmp_path: Path) -> None:
    objects = await render_everything(tmp_path)
    deployment = objects[SCHEDULER]["spec"]
    pod = deployment["template"]["spec"]
    scheduler, extender = find_containers(objects)
    assert deployment["replicas"] == VALUES["replicas"]
    assert pod["priorityClassName"] == VALUES["priorityClassName"]
    assert (pod["nodeSelector"], pod["tolerations"]) == (EVERYTHING["nodeSelector"], EVERYTHING["tolerations"])
    assert (scheduler["image"], scheduler["resources"]) == (VALUES["image"], VALUES["resources"])
    assert extender["image"] == f"ghcr.io/pomona-dev/pomona@sha256:{'0' * 64}"
    assert extender["resources"] == VALUES["extenderResources"]
    assert extender["args"] == [
        "extender",
        "--metrics-address=0.0.0.0:8080",
        "--annotation-prefix=flexinfer.ai",
        "--vendors=/etc/pomona/vendors/vendors.yaml",
        "--verbose",
    ]
    options = {option for param in command.params for option in param.opts}
    assert {argument.partition("=")[0] for argument in extender["args"][1:]} <= options
    weights = {variable["name"]: float(variable["value"]) for variable in extender["env"]}
    assert weights == {"SCHED_TPS_WEIGHT": 1, "SCHED_UTIL_WEIGHT": 0, "SCHED_COST_WEIGHT": 0.5}
    assert set(weights) == {param.envvar for param in command.params if param.envvar}
    text = objects["ConfigMap", "pomona-system", "pomona-scheduler"]["data"]["scheduler.yaml"]
    configuration = yaml.safe_load(text)
    assert configuration["profiles"] == [{"schedulerName": VALUES["name"]}]
    assert configuration["extenders"][0]["managedResources"] == [{"name": "acme.example/npu"}]
    monitor = objects["PodMonitor", "pomona-system", "pomona-extender"]["spec"]
    assert monitor["selector"]["matchLabels"].items() <= deployment["template"]["metadata"]["labels"].items()


async def test_scheduler_is_that_of_the_version_of_the_cluster() -> None:
    objects = await render("--set=scheduler.enabled=true", "--kube-version=v1.34.2-eks-0123")
    assert find_containers(objects)[0]["image"] == "registry.k8s.io/kube-scheduler:v1.34.2"


async def test_change_of_the_configuration_starts_new_pods() -> None:
    annotations = [
        (await render("--set=scheduler.enabled=true", f"--set=scheduler.name={name}"))[SCHEDULER]["spec"]["template"][
            "metadata"
        ]["annotations"]
        for name in ("one", "other")
    ]
    assert annotations[0] != annotations[1]


async def test_each_program_has_its_own_token_and_that_of_the_extender_only_reads() -> None:
    objects = await render("--set=scheduler.enabled=true")
    pod = objects[SCHEDULER]["spec"]["template"]["spec"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounted = [{mount["name"] for mount in container["volumeMounts"]} for container in pod["containers"]]
    assert pod["automountServiceAccountToken"] is False
    assert pod["serviceAccountName"] == "pomona-scheduler"
    assert "serviceAccountToken" in volumes["scheduler-token"]["projected"]["sources"][0]
    (secret, *_) = volumes["extender-token"]["projected"]["sources"]
    # A key that is named is waited for: without its token, the extender would end again and again.
    assert secret == {"secret": {"name": "pomona-extender-token", "items": [{"key": "token", "path": "token"}]}}
    assert mounted == [{"configuration", "scheduler-token", "certificates"}, {"extender-token"}]
    token = objects["Secret", "pomona-system", "pomona-extender-token"]["metadata"]["annotations"]
    assert token == {"kubernetes.io/service-account.name": "pomona-extender"}
    bound = [
        objects[binding["roleRef"]["kind"], namespace, binding["roleRef"]["name"]]
        for (kind, namespace, _), binding in objects.items()
        if kind.endswith("Binding") and any(one["name"] == "pomona-extender" for one in binding.get("subjects", ()))
    ]
    assert len(bound) == 2
    assert {verb for role in bound for rule in role["rules"] for verb in rule["verbs"]} == {"list", "watch"}


async def test_scheduler_is_left_out_by_default() -> None:
    assert SCHEDULER not in await render()
