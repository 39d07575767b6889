"""The chart renders what kubectl's kustomize does, and valid options, and refuses values that make no sense."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from cli.controller import command
from tests.controlplane.helm import CHART, HelmError, run_helm
from tests.controlplane.helm.manifests import render_manifests
from tests.controlplane.plane import ControlPlane
from tests.controlplane.process import CHECKOUT
from tests.support.documents import list_blocks

HELMS_OWN = {"app.kubernetes.io/managed-by", "helm.sh/chart"}
"""Labels that only Helm's objects have."""
NAMESPACE = ("Namespace", "", "pomona-system")
"""Object that `helm install --create-namespace` creates, and no template."""
EVERYTHING: dict[str, Any] = {
    "image": {"digest": f"sha256:{'0' * 64}", "pullSecrets": ["registry"]},
    "nodeSelector": {"pool": "system"},
    "tolerations": [{"key": "system", "operator": "Exists"}],
    "priorityClassName": "system-cluster-critical",
    "podAnnotations": {"sidecar.istio.io/inject": "false"},
    "verbose": True,
    "hosts": {"ca": {"configMap": "hosts-ca"}},
    "models": {
        "allowPrivateSources": ["10.1.0.0/16"],
        "nodeCacheSize": "500Gi",
        "huggingFaceEndpoint": "https://hub.example",
        "plainHTTPRegistries": ["a.example:5000", "b.example"],
    },
    "services": {
        "allowedImagePrefixes": ["registry.example/llm/"],
        "allowControlPlaneTolerations": True,
        "networkPolicies": True,
        "monitorLabels": {"release": "prometheus"},
    },
    "vendors": {"acme-npu": {"resource": "acme.example/npu", "memoryValues": {"32G": 32768, "2T": 2097152}}},
    "networkPolicy": {"enabled": True},
    "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
}
REFUSED = {
    "replicas=0": "'/replicas': minimum: got 0, want 1",
    "replica=3": "additional properties 'replica' not allowed",
    "image.pullPolicy=Sometimes": "'/image/pullPolicy': value must be one of 'IfNotPresent', 'Always', 'Never'",
    "hosts.ports.first=20000": "hosts.ports.first is 20000 and hosts.ports.last is 18999: a range starts",
    "hosts.ca.secret=a,hosts.ca.configMap=b": "hosts.ca.configMap is b and hosts.ca.secret is a: name one of them",
    "scope.namespaces=team-a": "'/scope/namespaces': got string, want array",
    "scope.namespaces={Team_A}": "'/scope/namespaces/0': 'Team_A' does not match pattern",
    "scope.namespaces={pomona-system}": "scope.namespaces has pomona-system, which is a namespace of Pomona itself",
    "models.nodeCacheSize=big": "'/models/nodeCacheSize': 'big' does not match pattern",
}
Identity = tuple[str, str, str]


async def render(*arguments: str) -> dict[Identity, Any]:
    return by_identity(await run_helm("template", "pomona", str(CHART), *arguments))


def by_identity(text: str) -> dict[Identity, Any]:
    """Return the objects of a YAML text by kind, namespace and name, without the labels of Helm."""
    found = {}
    for each in yaml.safe_load_all(text):
        if each is None:
            continue
        metadata = each["metadata"]
        for labels in (
            metadata.get("labels", {}),
            each.get("spec", {}).get("template", {}).get("metadata", {}).get("labels", {}),
        ):
            for name in HELMS_OWN:
                labels.pop(name, None)
        identity = (each["kind"], metadata.get("namespace", ""), metadata["name"])
        assert identity not in found
        found[identity] = each
    return found


async def test_manifests_are_what_the_chart_renders() -> None:
    stale = [path.name for path, text in (await render_manifests()).items() if path.read_text() != text]
    assert stale == [], "run `make manifests`"


async def test_helm_and_kustomize_install_the_same(plane: ControlPlane) -> None:
    kustomized = by_identity(await plane.kubectl("kustomize", str(CHECKOUT / "deploy")))
    del kustomized[NAMESPACE]
    assert await render() == kustomized


def write_documents_kustomization(folder: Path) -> None:
    """Write the example of docs/operations.md for a kustomization in `folder`."""
    document = (CHECKOUT / "docs" / "operations.md").read_text()
    (example,) = list_blocks(document.partition("## Install without Helm")[2].partition("\n## ")[0], "yaml")
    base = os.path.relpath(CHECKOUT / "deploy", folder.resolve())
    (folder / "kustomization.yaml").write_text(example.replace("../pomona/deploy", base))


async def test_image_and_options_of_the_documents_kustomization_reach_the_controller(
    plane: ControlPlane, tmp_path: Path
) -> None:
    write_documents_kustomization(tmp_path)
    found = by_identity(await plane.kubectl("kustomize", str(tmp_path)))
    (container,) = found["Deployment", "pomona-system", "pomona-controller"]["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "registry.example/pomona:0.1.0"
    assert container["args"] == [
        "controller", f"--image={container['image']}", "--monitoring-namespace=monitoring", "--node-cache-size=500Gi"
    ]  # fmt: skip


async def test_every_value_reaches_an_option_that_the_controller_has(tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text(json.dumps(EVERYTHING))
    rendered = await render(f"--values={values}")
    template = rendered["Deployment", "pomona-system", "pomona-controller"]["spec"]["template"]
    assert template["metadata"]["annotations"]["sidecar.istio.io/inject"] == "false"
    pod = template["spec"]
    (container,) = pod["containers"]
    assert container["image"] == f"ghcr.io/pomona-dev/pomona@sha256:{'0' * 64}"
    assert container["args"] == [
        "controller",
        f"--image={container['image']}",
        "--image-pull-secret=registry",
        "--allowed-image-prefix=registry.example/llm/",
        "--allow-control-plane-tolerations",
        "--vendors=/etc/pomona/vendors/vendors.yaml",
        "--network-policies",
        "--monitoring-namespace=monitoring",
        "--monitor-label=release=prometheus",
        "--node-cache-size=500Gi",
        "--allow-private-sources=10.1.0.0/16",
        "--hosts-ca=/etc/pomona/hosts-ca/ca.crt",
        "--verbose",
    ]
    options = {option for each in command.params for option in each.opts}
    assert {each.partition("=")[0] for each in container["args"][1:]} <= options
    assert container["env"] == [
        {"name": "HF_ENDPOINT", "value": "https://hub.example"},
        {"name": "POMONA_PLAIN_HTTP_REGISTRIES", "value": "a.example:5000 b.example"},
    ]
    assert [volume["configMap"]["name"] for volume in pod["volumes"]] == ["pomona-vendors", "hosts-ca"]
    vendors = rendered["ConfigMap", "pomona-system", "pomona-vendors"]["data"]["vendors.yaml"]
    assert yaml.safe_load(vendors) == EVERYTHING["vendors"]
    for kind in ("PodMonitor", "NetworkPolicy", "PodDisruptionBudget"):
        assert (kind, "pomona-system", "pomona-controller") in rendered


async def test_controller_of_some_namespaces_gets_roles_there_and_no_hosts() -> None:
    everything, scoped = await render(), await render("--set", "scope.namespaces={team-a,team-b}")
    bindings = {name for name in scoped if name[0] == "RoleBinding" and name[1] != "pomona-system"}
    assert bindings == {
        ("RoleBinding", namespace, name)
        for namespace in ("team-a", "team-b")
        for name in ("pomona-controller", "pomona-controller-workloads")
    }
    cluster_wide = {name[2] for name in scoped if name[0] == "ClusterRoleBinding"}
    assert cluster_wide == {"pomona-controller-nodes"}
    rules = scoped["ClusterRole", "", "pomona-controller-nodes"]["rules"]
    assert {verb for rule in rules for verb in rule["verbs"]} <= {"get", "list", "watch"}
    gone = {name[2] for name in everything.keys() - scoped.keys()}
    assert {"pomona-metal-hosts", "pomona-metal-agent", "pomona-host-slices", "pomona-host-ports"} <= gone
    (container,) = scoped["Deployment", "pomona-system", "pomona-controller"]["spec"]["template"]["spec"]["containers"]
    assert container["args"][2:4] == ["--namespace=team-a", "--namespace=team-b"]


async def test_hosts_can_be_left_out() -> None:
    gone = (await render()).keys() - (await render("--set", "hosts.enabled=false")).keys()
    assert {kind for kind, _, _ in gone} == {
        "ClusterRole", "ConfigMap", "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"
    }  # fmt: skip
    assert {name for kind, _, name in gone if kind == "ClusterRole"} == {"pomona-metal-agent"}


@pytest.mark.parametrize("value", REFUSED)
async def test_value_that_makes_no_sense_is_refused_by_its_name(value: str) -> None:
    with pytest.raises(HelmError, match=re.escape(REFUSED[value])):
        await render("--set", value)


async def test_another_namespace_is_refused() -> None:
    with pytest.raises(HelmError, match="namespace team-a: Pomona is installed once in a cluster, in pomona-system"):
        await run_helm("template", "pomona", str(CHART), namespace="team-a")
