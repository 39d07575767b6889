"""The chart renders what kubectl's kustomize does, and valid options, and refuses values that make no sense."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from cli.controller import command
from cli.node_agent import command as node_agent
from tests.cluster.install.chart_values import EVERYTHING, REFUSED
from tests.controlplane.helm import CHART, HelmError, run_helm
from tests.controlplane.helm.manifests import render_manifests
from tests.controlplane.plane import ControlPlane
from tests.controlplane.process import CHECKOUT
from tests.support.documents import list_blocks

HELMS_OWN = {"app.kubernetes.io/managed-by", "helm.sh/chart"}
"""Labels that only Helm's objects have."""
NAMESPACE = ("Namespace", "", "pomona-system")
"""Object that `helm install --create-namespace` creates, and no template."""
MONITORED = ("--set=metrics.rules.enabled=true", "--set=metrics.dashboards.enabled=true")
Identity = tuple[str, str, str]


CONTROLLER: Identity = ("Deployment", "pomona-system", "pomona-controller")


async def render_everything(folder: Path) -> dict[Identity, Any]:
    values = folder / "values.yaml"
    values.write_text(json.dumps(EVERYTHING))
    return await render(f"--values={values}")


async def render(*arguments: str) -> dict[Identity, Any]:
    return by_identity(await run_helm("template", "pomona", str(CHART), *arguments))


def by_identity(text: str) -> dict[Identity, Any]:
    """Return the objects of a YAML text by kind, namespace and name, without the labels of Helm."""
    objects = {}
    for document in yaml.safe_load_all(text):
        if document is None:
            continue
        metadata = document["metadata"]
        for labels in (
            metadata.get("labels", {}),
            document.get("spec", {}).get("template", {}).get("metadata", {}).get("labels", {}),
        ):
            for name in HELMS_OWN:
                labels.pop(name, None)
        identity = (document["kind"], metadata.get("namespace", ""), metadata["name"])
        assert identity not in objects
        objects[identity] = document
    return objects


async def test_linter_of_helm_warns_of_nothing() -> None:
    assert "1 chart(s) linted, 0 chart(s) failed" in await run_helm("lint", "--strict", str(CHART))


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
    objects = by_identity(await plane.kubectl("kustomize", str(tmp_path)))
    (container,) = objects[CONTROLLER]["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "registry.example/pomona:0.1.0"
    assert container["args"] == [
        "controller", f"--image={container['image']}", "--monitoring-namespace=monitoring", "--degrade-threshold=0.3",
        "--degrade-check-interval=30s",
        "--degrade-cool-down=30m",
        "--gateway",
        "--node-cache-size=500Gi"
    ]  # fmt: skip


async def test_every_value_reaches_an_option_that_the_controller_has(tmp_path: Path) -> None:
    template = (await render_everything(tmp_path))[CONTROLLER]["spec"]["template"]
    (container,) = template["spec"]["containers"]
    assert container["image"] == f"ghcr.io/pomona-dev/pomona@sha256:{'0' * 64}"
    assert container["args"] == [
        "controller",
        f"--image={container['image']}",
        "--image-pull-secret=registry",
        "--allowed-image-prefix=registry.example/llm/",
        "--allow-control-plane-tolerations",
        "--system-taint=node-role.kubernetes.io/infra",
        "--vendors=/etc/pomona/vendors/vendors.yaml",
        "--network-policies",
        "--monitoring-namespace=prometheus",
        "--monitor-label=release=prometheus",
        "--scheduling-mode=Native",
        "--min-run=10m",
        "--metric-prefix=flexinfer",
        "--replace-degraded",
        "--degrade-threshold=0.4",
        "--degrade-check-interval=1m",
        "--degrade-cool-down=2h",
        "--gateway",
        "--preflight-bind-address=:9443",
        "--node-cache-size=500Gi",
        "--allow-private-sources=10.1.0.0/16",
        "--hosts-ca=/etc/pomona/hosts-ca/all.pem",
        "--verbose",
    ]
    options = {option for param in command.params for option in param.opts}
    assert {argument.partition("=")[0] for argument in container["args"][1:]} <= options
    assert container["env"] == [
        {"name": "HF_ENDPOINT", "value": "https://hub.example"},
        {"name": "POMONA_PLAIN_HTTP_REGISTRIES", "value": "a.example:5000 b.example"},
    ]


async def test_every_value_reaches_the_pods_of_the_controller(tmp_path: Path) -> None:
    deployment = (await render_everything(tmp_path))[CONTROLLER]["spec"]
    pod = deployment["template"]["spec"]
    (container,) = pod["containers"]
    assert deployment["replicas"] == EVERYTHING["replicas"]
    assert deployment["template"]["metadata"]["annotations"]["sidecar.istio.io/inject"] == "false"
    assert pod["imagePullSecrets"] == [{"name": "registry"}]
    as_they_are = ("nodeSelector", "tolerations", "affinity", "priorityClassName")
    assert [pod[name] for name in as_they_are] == [EVERYTHING[name] for name in as_they_are]
    assert (container["imagePullPolicy"], container["resources"]) == ("Always", EVERYTHING["resources"])
    preflight, *volumes = pod["volumes"]
    assert preflight["name"] == "preflight"
    assert [volume["configMap"]["name"] for volume in volumes] == ["pomona-vendors", "hosts-ca"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts == {name: f"/etc/pomona/{name}" for name in ("preflight", "vendors", "hosts-ca")}


async def test_every_value_reaches_the_objects_beside_the_controller(tmp_path: Path) -> None:
    rendered = await render_everything(tmp_path)
    vendors = rendered["ConfigMap", "pomona-system", "pomona-vendors"]["data"]["vendors.yaml"]
    assert yaml.safe_load(vendors) == EVERYTHING["vendors"]
    limit = rendered["ValidatingAdmissionPolicy", "", "pomona-priorities"]["spec"]["variables"][-1]["expression"]
    assert limit.endswith("max-priority'].orValue('normal')")
    (protection,) = rendered["ValidatingAdmissionPolicy", "", "pomona-eviction-protection"]["spec"]["validations"]
    assert "allow-eviction-protection'].orValue('false')" in protection["expression"]
    ports = rendered["ConfigMap", "pomona-system", "pomona-host-ports"]["data"]
    assert ports == {"firstPort": "19000", "lastPort": "19099"}
    policy = rendered["NetworkPolicy", "pomona-system", "pomona-controller"]["spec"]
    rule, preflight = policy["ingress"]
    assert preflight == {"ports": [{"protocol": "TCP", "port": "preflight"}]}
    monitoring = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "prometheus"}}}
    assert rule == {"from": [monitoring], "ports": [{"protocol": "TCP", "port": "metrics"}]}
    monitor = rendered["PodMonitor", "pomona-system", "pomona-controller"]
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    assert monitor["spec"]["podMetricsEndpoints"] == [{"port": "metrics", "path": "/metrics", "honorLabels": True}]
    selected = rendered[CONTROLLER]["spec"]["selector"]
    budget = rendered["PodDisruptionBudget", "pomona-system", "pomona-controller"]["spec"]
    assert (monitor["spec"]["selector"], budget["selector"], policy["podSelector"]) == (selected,) * 3


@pytest.mark.parametrize("name", ["console", "gateway", "scheduler"])
async def test_drain_takes_one_replica_of_what_stands_beside_the_controller(tmp_path: Path, name: str) -> None:
    rendered = await render_everything(tmp_path)
    deployment = rendered["Deployment", "pomona-system", f"pomona-{name}"]["spec"]
    budget = rendered["PodDisruptionBudget", "pomona-system", f"pomona-{name}"]["spec"]
    assert (budget["selector"], budget["maxUnavailable"]) == (deployment["selector"], 1)
    (first, *_) = deployment["template"]["spec"]["affinity"]["podAntiAffinity"][
        "preferredDuringSchedulingIgnoredDuringExecution"
    ]
    term = first["podAffinityTerm"]
    assert (term["topologyKey"], term["labelSelector"]) == ("kubernetes.io/hostname", deployment["selector"])


async def test_only_the_monitoring_reads_metrics_without_a_value_being_set(tmp_path: Path) -> None:
    everything = await render_everything(tmp_path)
    policies = {name: policy for (kind, _, name), policy in everything.items() if kind == "NetworkPolicy"}
    names = {"controller", "gateway", "node-agent", "scheduler", "console"}
    assert policies.keys() == {f"pomona-{name}" for name in names}
    monitoring = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "prometheus"}}}
    for name, policy in policies.items():
        rules = {rule["ports"][0]["port"]: rule.get("from") for rule in policy["spec"]["ingress"]}
        # The controller reads what each key has used.
        controller = [{"podSelector": everything[CONTROLLER]["spec"]["selector"]}] if name == "pomona-gateway" else []
        assert rules.pop("metrics") == [monitoring, *controller]
        assert not any(rules.values()), "what asks for a token, a key or a secret path is open to all"
    assert ("NetworkPolicy", "pomona-system", "pomona-controller") in await render()
    assert "NetworkPolicy" not in {kind for kind, _, _ in await render("--set=networkPolicy.enabled=false")}


async def test_rules_and_dashboards_have_the_names_of_the_prefix(tmp_path: Path) -> None:
    files = CHART / "files"
    rendered, plain = await render_everything(tmp_path), await render(*MONITORED)
    rules, own = (objects["PrometheusRule", "pomona-system", "pomona"] for objects in (rendered, plain))
    assert own["spec"] == yaml.safe_load((files / "rules.yaml").read_text())
    assert rules["metadata"]["labels"]["release"] == "prometheus"
    assert rules["spec"]["groups"][0]["rules"][0]["record"] == "flexinfer_latency_p95_seconds"
    alerts = [rule for group in rules["spec"]["groups"] for rule in group["rules"] if "alert" in rule]
    assert {alert["annotations"]["runbook_url"].partition("#")[0] for alert in alerts} == {
        "http://wiki.internal/pomona"
    }
    others = set[str]()
    for path in (files / "dashboards").iterdir():
        name = f"pomona-dashboard-{path.stem}"
        prefixed, same = (objects["ConfigMap", "pomona-system", name] for objects in (rendered, plain))
        assert prefixed["metadata"]["labels"]["grafana_dashboard"] == "yes"
        assert same["metadata"]["labels"]["grafana_dashboard"] == "1"
        text, changed = (config_map["data"][f"pomona-{path.stem}.json"] for config_map in (same, prefixed))
        assert json.loads(text) == json.loads(path.read_text())
        assert changed.replace("flexinfer_", "pomona_") == text
        others |= set(re.findall(r"flexinfer_(\w+)", changed))
        assert not re.search(r"pomona_(gpu|node_agent|latency_p95|model_load|tokens_per)", changed)
    assert {"tokens_per_second", "model_load_seconds", "latency_p95_seconds", "gpu_temperature_celsius"} <= others
    assert "proxy_queued" not in others


async def test_every_value_reaches_the_node_agents(tmp_path: Path) -> None:
    rendered = await render_everything(tmp_path)
    stated = EVERYTHING["nodeAgent"]
    options = {option for param in node_agent.params for option in param.opts}
    for name in ("pomona-node-agent", "pomona-node-agent-nvidia"):
        pod = rendered["DaemonSet", "pomona-system", name]["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        assert container["args"] == [
            "node-agent",
            "--interval=10s",
            "--label-prefix=flexinfer.ai",
            "--metric-prefix=flexinfer",
            "--disk-root=/var/lib/pomona",
            "--api-key-file=/etc/pomona/node-agent/key",
            "--verbose",
        ]
        assert {argument.partition("=")[0] for argument in container["args"][1:]} <= options
        assert (pod["tolerations"], pod["priorityClassName"]) == (stated["tolerations"], stated["priorityClassName"])
        assert container["resources"] == stated["resources"]
        assert [volume.get("secret") for volume in pod["volumes"]] == [None, {"secretName": "node-api-key"}]
    (rule,) = [
        validation["expression"]
        for validation in rendered["ValidatingAdmissionPolicy", "", "pomona-node-agents"]["spec"]["validations"]
        if "flexinfer.ai/gpu.vendor" in validation["expression"]
    ]
    assert "inference.pomona.dev" not in rule


async def test_node_has_one_agent_with_or_without_the_runtime_of_its_devices(tmp_path: Path) -> None:
    rendered = await render_everything(tmp_path)
    plain, nvidia = [
        rendered["DaemonSet", "pomona-system", name]["spec"]["template"]["spec"]
        for name in ("pomona-node-agent", "pomona-node-agent-nvidia")
    ]
    assert nvidia["runtimeClassName"] == "nvidia"
    assert nvidia["nodeSelector"] == {"pool": "models", "nvidia.com/gpu.present": "true"}
    environment = {variable["name"]: variable.get("value") for variable in nvidia["containers"][0]["env"]}
    assert environment["NVIDIA_VISIBLE_DEVICES"] == "all"
    assert "runtimeClassName" not in plain
    assert plain["nodeSelector"] == {"pool": "models"}
    (term,) = plain["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    (rule,) = term["matchExpressions"]
    assert rule == {"key": "nvidia.com/gpu.present", "operator": "NotIn", "values": ["true"]}


@pytest.mark.parametrize("value", ["nodeAgent.enabled=false", "scope.namespaces={team-a}"])
async def test_cluster_without_node_agents_has_nothing_of_them(value: str) -> None:
    assert [identity for identity in await render("--set", value) if "node-agent" in identity[2]] == []


async def test_change_of_vendors_starts_new_pods() -> None:
    first, second = [await render("--set", f"vendors.amd.resource=amd.com/{name}") for name in ("gpu", "npu")]
    annotations = [objects[CONTROLLER]["spec"]["template"]["metadata"]["annotations"] for objects in (first, second)]
    assert annotations[0] != annotations[1]


async def test_secret_with_the_authorities_of_hosts_is_mounted() -> None:
    pod = (await render("--set=hosts.ca.secret=authorities"))[CONTROLLER]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["volumes"] == [{"name": "hosts-ca", "secret": {"secretName": "authorities"}}]
    assert [mount["mountPath"] for mount in container["volumeMounts"]] == ["/etc/pomona/hosts-ca"]
    assert "--hosts-ca=/etc/pomona/hosts-ca/ca.crt" in container["args"]


@pytest.mark.usefixtures("pod_monitors")
async def test_api_server_takes_what_every_value_renders(plane: ControlPlane, tmp_path: Path) -> None:
    values, manifest = tmp_path / "values.yaml", tmp_path / "manifest.yaml"
    values.write_text(json.dumps(EVERYTHING))
    rendered = await run_helm("template", "pomona", str(CHART), f"--values={values}")
    manifest.write_text(rendered)
    said = await plane.kubectl(
        "apply", "--server-side", "--force-conflicts", "--dry-run=server", f"--filename={manifest}"
    )
    assert said.count("(server dry run)") == len(by_identity(rendered))


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
    (container,) = scoped[CONTROLLER]["spec"]["template"]["spec"]["containers"]
    assert container["args"][2:4] == ["--namespace=team-a", "--namespace=team-b"]


async def test_controller_of_some_namespaces_has_no_right_of_the_queue() -> None:
    everything, scoped = await render(), await render("--set", "scope.namespaces={team-a}")
    assert {"pods patch", "pods delete", "pods/eviction create", "configmaps create"} <= list_rights(everything)
    assert {
        right for right in list_rights(scoped) if right.startswith(("pods", "configmaps", "persistentvolumes "))
    } == {
        "pods list",
        "pods watch",
    }
    gone = {name[2] for name in everything.keys() - scoped.keys()}
    assert {"pomona-controller-queue", "pomona-controller-evicted-pods", "pomona-queued-pods"} <= gone
    assert not {"pomona-priorities", "pomona-eviction-protection"} & {*gone}


def list_rights(objects: dict[Identity, Any]) -> set[str]:
    """Return resource and verb of each right that a role of the controller grants."""
    rules = [
        rule
        for (_, _, name), manifest in objects.items()
        if name.startswith("pomona-controller")
        for rule in manifest.get("rules", ())
    ]
    return {f"{resource} {verb}" for rule in rules for resource in rule["resources"] for verb in rule["verbs"]}


async def test_hosts_can_be_left_out() -> None:
    gone = (await render()).keys() - (await render("--set", "hosts.enabled=false")).keys()
    assert {kind for kind, _, _ in gone} == {
        "ClusterRole", "ConfigMap", "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"
    }  # fmt: skip
    assert {name for kind, _, name in gone if kind == "ClusterRole"} == {"pomona-metal-agent"}


@pytest.mark.parametrize(
    ("value", "kind"),
    [("crds.install", "CustomResourceDefinition"), ("podDisruptionBudget.enabled", "PodDisruptionBudget")],
)
async def test_kind_can_be_left_out(value: str, kind: str) -> None:
    everything = await render()
    left = await render("--set", f"{value}=false")
    assert left == {identity: manifest for identity, manifest in everything.items() if identity[0] != kind}
    assert left != everything


async def test_tag_of_the_image_is_that_of_the_chart_unless_stated() -> None:
    images = [await render(*arguments) for arguments in ((), ("--set=image.repository=a.example:5000/b,image.tag=v2",))]
    containers = [image[CONTROLLER]["spec"]["template"]["spec"]["containers"][0] for image in images]
    assert [container["image"] for container in containers] == [
        "ghcr.io/pomona-dev/pomona:0.1.0",
        "a.example:5000/b:v2",
    ]
    assert [container["args"][1] for container in containers] == [
        f"--image={container['image']}" for container in containers
    ]


@pytest.mark.parametrize("value", REFUSED)
async def test_value_that_makes_no_sense_is_refused_by_its_name(value: str) -> None:
    with pytest.raises(HelmError, match=re.escape(REFUSED[value])):
        await render("--set", value)


async def test_another_namespace_is_refused() -> None:
    with pytest.raises(HelmError, match="namespace team-a: Pomona is installed once in a cluster, in pomona-system"):
        await run_helm("template", "pomona", str(CHART), namespace="team-a")
