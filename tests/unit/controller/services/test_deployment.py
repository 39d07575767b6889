"""The Deployment, Service and Secret of a service: arguments, security, devices and placement of its pods."""

import itertools
from typing import Any

import pytest

from controller.placement.nodes import NodeSize
from controller.services.pods.deployment import build_deployment, build_network_service
from controller.services.pods.pod_template import EngineChoice, MountedWeights
from controller.services.serving_choice import apply_choice, choose_cpu
from controller.services.tokens import token_secret
from crds.meta import DEFAULT_CONTAINER, LABEL_MANAGED_BY, LABEL_SERVICE, MANAGED_BY, Accelerator
from crds.serving import RuntimeName, ServingChoice
from devices.vendors import VENDORS
from kube.client import Obj
from runtimes.registry import RUNTIMES
from tests.controlplane.kubelet.environment import expand
from tests.support.api_objects import as_service, service


def built(accelerator: Accelerator = "cpu", **spec: Any) -> Obj:
    weights = MountedWeights("tiny-cache", "0123abcd/tiny.gguf")
    choice = EngineChoice("llama.cpp", accelerator, VENDORS[accelerator], 2**30)
    _, obj = build_deployment(as_service(service(**spec)), choice, weights)
    return obj


def pod(accelerator: Accelerator = "cpu", **spec: Any) -> Obj:
    template: Obj = built(accelerator, **spec)["spec"]["template"]["spec"]
    return template


def engine_container(accelerator: Accelerator = "cpu", **spec: Any) -> Obj:
    engine: Obj = pod(accelerator, **spec)["initContainers"][0]
    return engine


def test_the_engine_serves_verified_weights_with_the_services_token() -> None:
    obj = engine_container(contextLength=2048, parallel=2, extraArgs=["--flash-attn", "on"])
    arguments = obj["args"]
    assert arguments[arguments.index("-m") + 1] == "/models/0123abcd/tiny.gguf"
    assert arguments[arguments.index("--host") + 1] == "127.0.0.1", "the proxy alone asks it"
    assert arguments[arguments.index("-c") + 1] == "4096"
    assert arguments[-2:] == ["--flash-attn", "on"]
    mounts = {mount["name"]: mount for mount in obj["volumeMounts"]}
    assert mounts["models"] == {"name": "models", "mountPath": "/models", "readOnly": True}
    volumes = {volume["name"]: volume for volume in pod()["volumes"]}
    assert volumes["models"]["persistentVolumeClaim"] == {"claimName": "tiny-cache", "readOnly": True}
    assert volumes["token"]["secret"]["secretName"] == "chat-token"


def test_node_mounts_an_image_of_weights() -> None:
    image = f"ghcr.io/acme/tiny@sha256:{'ab' * 32}"
    choice = EngineChoice("llama.cpp", "cpu", VENDORS["cpu"], 2**30)
    _, obj = build_deployment(as_service(service()), choice, MountedWeights("", "tiny.gguf", image=image))
    spec = obj["spec"]["template"]["spec"]
    assert spec["volumes"][0] == {"name": "models", "image": {"reference": image, "pullPolicy": "IfNotPresent"}}
    assert "/models/tiny.gguf" in spec["initContainers"][0]["args"]


def test_pods_have_the_labels_that_the_service_selects() -> None:
    obj = built(replicas=3)
    assert obj["spec"]["replicas"] == 3
    assert obj["spec"]["selector"]["matchLabels"] == {LABEL_SERVICE: "chat"}
    labels = obj["spec"]["template"]["metadata"]["labels"]
    assert labels == {LABEL_SERVICE: "chat", LABEL_MANAGED_BY: MANAGED_BY}
    assert obj["spec"]["template"]["metadata"]["annotations"] == {DEFAULT_CONTAINER: "llama-server"}
    _, network = build_network_service(as_service(service()))
    assert network["spec"]["selector"] == {LABEL_SERVICE: "chat"}
    assert network["spec"]["ports"] == [{"name": "http", "port": 8080, "targetPort": "http", "protocol": "TCP"}]


@pytest.mark.parametrize("accelerator", ["cpu", "nvidia"])
def test_pods_meet_the_restricted_standard(accelerator: Accelerator) -> None:
    spec = pod(accelerator)
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["automountServiceAccountToken"] is False
    for container in (*spec["initContainers"], *spec["containers"]):
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_nvidia_pod_requests_devices() -> None:
    spec = pod("nvidia", resources={"gpu": 2})
    assert spec["initContainers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "2"}
    assert spec["initContainers"][0]["image"].endswith(":server-cuda")
    assert spec["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    assert engine_container("nvidia")["resources"]["limits"] == {"nvidia.com/gpu": "1"}


def test_cpu_pod_requests_memory_and_no_device() -> None:
    assert engine_container()["resources"] == {"requests": {"memory": str(2**30)}}
    assert engine_container(resources={"cpu": 2})["resources"]["requests"]["cpu"] == "2"
    assert "-ngl" not in engine_container()["args"]
    assert built()["spec"]["strategy"]["type"] == "RollingUpdate"


@pytest.mark.parametrize(
    ("runtime", "devices", "largest", "expected"),
    [
        # What the engine wants, if a node has it.
        ("vllm", 8, 12_000, "10"),
        ("vllm", 1, 3920, "3"),
        ("vllm", 1, 2000, "1750m"),
        ("vllm", 8, 500, "3750m"),
        ("vllm", 1, None, "3"),
        ("sglang", 2, 96_000, "4"),
        ("llama.cpp", 1, 96_000, "2"),
        # A quarter of the largest node without devices, at least for two threads and at most 8.
        ("llama.cpp", 0, 2000, "1500m"),
        ("llama.cpp", 0, 1500, "1250m"),
        ("vllm", 0, 8000, "1937m"),
        ("ollama", 0, 16_250, "4"),
        ("ollama", 0, 64_000, "8"),
        ("llama.cpp", 0, None, "1500m"),
        ("llama.cpp", 0, 200, "100m"),
        ("generic", 1, 96_000, ""),
    ],
)
def test_pod_requests_the_cpu_that_its_engine_wants_or_a_node_has(
    runtime: RuntimeName, devices: int, largest: int | None, expected: str
) -> None:
    nodes = [] if largest is None else [NodeSize(None, 0, largest), NodeSize(None, 0, largest - 1)]
    assert choose_cpu(RUNTIMES[runtime].pod, devices, nodes) == expected


@pytest.mark.parametrize(
    ("stated", "default", "threads"),
    [(None, None, None), (None, "1500m", "2"), ("500m", "8", "1"), ("7650m", None, "8"), (3, "8", "3")],
)
def test_engine_has_as_many_threads_as_the_pod_requests_cpu(
    stated: Any, default: str | None, threads: str | None
) -> None:
    choice = EngineChoice("llama.cpp", "cpu", VENDORS["cpu"], 2**30)
    chat = as_service(service(resources={} if stated is None else {"cpu": stated}))
    chat = apply_choice(chat, ServingChoice(context_length=4096, cpu=default or ""))
    _, made = build_deployment(chat, choice, MountedWeights("tiny-cache", "0123abcd/tiny.gguf"))
    engine = made["spec"]["template"]["spec"]["initContainers"][0]
    expected = default if stated is None else str(stated)
    assert engine["resources"]["requests"].get("cpu") == expected
    assert "cpu" not in engine["resources"].get("limits", {}), "a limit would slow down the loading of weights"
    arguments = dict(itertools.pairwise(engine["args"]))
    assert arguments.get("-t") == threads


def test_placement_and_image_of_the_user_are_used() -> None:
    spec = pod(
        "nvidia",
        image="registry.example/llama:1",
        nodeSelector={"zone": "a"},
        tolerations=[{"key": "team", "operator": "Exists"}],
    )
    assert spec["initContainers"][0]["image"] == "registry.example/llama:1"
    assert spec["nodeSelector"] == {"zone": "a"}
    assert [toleration["key"] for toleration in spec["tolerations"]] == ["nvidia.com/gpu", "team"]


def test_token_secret_is_owned_by_the_service() -> None:
    _, secret = token_secret(as_service(service()), "s3cret")
    assert secret["metadata"]["name"] == "chat-token"
    assert secret["metadata"]["ownerReferences"][0]["uid"] == "uid-chat"
    assert secret["data"] == {"token": "czNjcmV0"}


def test_kubernetes_replaces_no_variable_in_arguments() -> None:
    template, argument = "$$ {{ messages }} $(KEY)", "$(KEY)"
    choice = EngineChoice("llama.cpp", "cpu", VENDORS["cpu"], 2**30)
    stated = as_service(service(chatTemplate=template, extraArgs=[argument]))
    _, obj = build_deployment(stated, choice, MountedWeights("tiny-cache", "0123abcd/$(KEY).gguf"))
    arguments = obj["spec"]["template"]["spec"]["initContainers"][0]["args"]
    seen = [expand(part, {"KEY": "stolen"}) for part in arguments]
    assert {template, argument, "/models/0123abcd/$(KEY).gguf"} <= set(seen)
