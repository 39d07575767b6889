"""Pods of vLLM, which has an image for each processor and compiles, and of an engine with a remark for its users."""

from typing import Any

import pytest

from artifacts.compiled_code import FOLDER
from crds.meta import Accelerator
from kube.client import Obj
from kube.resources import DEPLOYMENTS, MODELS
from tests.support.api_objects import model, planned_condition
from tests.support.service_decisions import chat_service, decide_chat, list_applied

MEMORY = {"resources": {"memory": "4Gi"}}


def weights() -> Obj:
    """Return a Model of a folder of safetensors, whose weights are on its volume."""
    manifest = model(source="hf://acme/weights")
    manifest["status"]["format"] = "safetensors"
    return manifest


def pod_of(accelerator: Accelerator, **spec: Any) -> Obj:
    """Return the pod of `chat`, whose engine is vLLM."""
    chat = chat_service(hardware={"accelerator": accelerator}, runtime="vllm", **MEMORY, **spec)
    (made,) = list_applied(decide_chat(chat, (MODELS, weights())), DEPLOYMENTS)
    pod_spec: Obj = made["spec"]["template"]["spec"]
    return pod_spec


@pytest.mark.parametrize(
    ("spec", "selected"),
    [
        ({}, {"kubernetes.io/arch": "amd64"}),
        ({"nodeSelector": {"disk": "fast"}}, {"kubernetes.io/arch": "amd64", "disk": "fast"}),
        ({"nodeSelector": {"kubernetes.io/arch": "arm64"}}, {"kubernetes.io/arch": "arm64"}),
        ({"image": "vllm/vllm-openai-cpu:v0.33.0-arm64"}, None),
    ],
    ids=["default", "with labels of the service", "stated by the service", "image of the service"],
)
def test_pod_on_the_processor_runs_where_its_image_does(spec: Obj, selected: Obj | None) -> None:
    assert pod_of("cpu", **spec).get("nodeSelector") == selected


def test_pod_with_a_device_runs_on_any_processor() -> None:
    assert "nodeSelector" not in pod_of("nvidia")


@pytest.mark.parametrize(("accelerator", "size"), [("cpu", "4096Mi"), ("nvidia", "8192Mi")])
def test_processes_of_the_engine_share_more_memory_than_64_mib(accelerator: Accelerator, size: str) -> None:
    (volume,) = (each for each in pod_of(accelerator)["volumes"] if each["name"] == "shm")
    assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": size}


@pytest.mark.parametrize(
    ("image", "is_known"),
    [
        (None, True),
        ("registry.example:5000/mirror/vllm:v0.33.0", True),
        ("vllm/vllm-openai:v0.33.0-aarch64", True),
        ("registry.example:5000/mirror/vllm", False),
        ("vllm/vllm-openai:v0.9.0", False),
        (f"vllm/vllm-openai@sha256:{'0' * 64}", False),
    ],
)
def test_pod_gets_the_parsers_of_the_models_template_if_its_image_has_them(
    image: str | None, *, is_known: bool
) -> None:
    manifest = weights()
    manifest["status"]["gguf"]["chatFormat"] = "hermes-think"
    chat = chat_service(hardware={"accelerator": "nvidia"}, runtime="vllm", image=image, **MEMORY)
    (made,) = list_applied(decide_chat(chat, (MODELS, manifest)), DEPLOYMENTS)
    arguments = made["spec"]["template"]["spec"]["initContainers"][-1]["args"]
    chosen = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3"]
    assert arguments[-5:] == chosen if is_known else not set(chosen) & set(arguments)


def test_remark_about_an_engine_is_in_a_condition() -> None:
    for engine, is_remarked in (("tgi", True), ("vllm", False)):
        chat = chat_service(hardware={"accelerator": "nvidia"}, runtime=engine, **MEMORY)
        plan = decide_chat(chat, (MODELS, weights()))
        condition = planned_condition(plan, "ModelReady")
        assert (condition["status"], condition["reason"]) == ("True", "ModelUsable")
        assert ("TGI is maintained no more" in condition["message"]) == is_remarked


def kept_by(pod: Obj) -> str:
    """Return the archive in which the proxy of a pod keeps compiled code."""
    (proxy,) = pod["containers"]
    return str(proxy["args"][proxy["args"].index("--kept") + 1])


def test_compiled_code_is_kept_by_containers_of_pomona_alone() -> None:
    """The engine compiles in an empty folder of the pod, and has the weights alone of the volume, and read-only."""
    pod = pod_of("nvidia")
    (restore, engine), (proxy,) = pod["initContainers"], pod["containers"]
    assert (restore["image"], "restartPolicy" in restore, restore["args"][-1]) == (proxy["image"], False, "--restore")
    assert {mount["name"] for mount in restore["volumeMounts"]} == {"compiled", "models"}, "and no token"
    assert proxy["args"][-4:] == restore["args"][-5:-1], "the same home and archive"

    mounts = {mount["name"]: mount for mount in engine["volumeMounts"]}
    assert mounts["models"] == {"name": "models", "mountPath": "/models", "readOnly": True}
    home = next(variable["value"] for variable in engine["env"] if variable["name"] == "HOME")
    assert home.startswith(f"{mounts['compiled']['mountPath']}/")
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["models"]["persistentVolumeClaim"] == {"claimName": "tiny-cache"}
    assert volumes["compiled"] == {"name": "compiled", "emptyDir": {}}


def test_other_image_arguments_or_variables_have_an_archive_of_their_own() -> None:
    variable = {"env": [{"name": "VLLM_USE_DEEP_GEMM", "value": "0"}]}
    pods = [pod_of("nvidia", **spec) for spec in ({}, {"image": "vllm:2"}, {"parallel": 7}, {"pod": variable})]
    assert len({kept_by(pod) for pod in pods}) == 4
    assert kept_by(pods[0]) == kept_by(pod_of("nvidia", drainSeconds=7, replicas=3))
    assert kept_by(pods[0]).startswith(f"/kept/{FOLDER}/")


def test_time_to_drain_still_replaces_no_pod() -> None:
    """It stands among the proxy's arguments, from which those of the other container begin."""
    first, second = (pod_of("nvidia", drainSeconds=seconds)["initContainers"] for seconds in (7, 8))
    assert first == second


@pytest.mark.parametrize("source", ["pvc://weights/folder/", "oci://registry.example/weights:1"])
def test_nothing_is_kept_where_the_volume_is_not_pomonas(source: str) -> None:
    medium: Obj = {"cache": {"medium": "Image"}} if source.startswith("oci:") else {}
    manifest = model(source=source, **medium, status={"format": "safetensors"})
    chat = chat_service(hardware={"accelerator": "nvidia"}, runtime="vllm", **MEMORY)
    (made,) = list_applied(decide_chat(chat, (MODELS, manifest)), DEPLOYMENTS)
    pod = made["spec"]["template"]["spec"]
    assert [container["name"] for container in pod["initContainers"]] == ["vllm"]
    assert "--kept" not in pod["containers"][0]["args"]
    assert {"name": "HOME", "value": "/tmp"} in pod["initContainers"][0]["env"]
    assert pod["volumes"][0].get("persistentVolumeClaim", {"readOnly": True})["readOnly"]


def test_variable_of_the_home_cannot_be_stated() -> None:
    stated = {"env": [{"name": "HOME", "value": "/elsewhere"}]}
    plan = decide_chat(
        chat_service(hardware={"accelerator": "nvidia"}, runtime="vllm", **MEMORY, pod=stated), (MODELS, weights())
    )
    assert "pod.env HOME is set by Pomona" in planned_condition(plan, "Ready")["message"]
