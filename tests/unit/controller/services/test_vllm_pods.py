"""Pods of vLLM, which has an image for each processor, and of an engine with a remark for its users."""

from typing import Any

import pytest

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
    arguments = made["spec"]["template"]["spec"]["initContainers"][0]["args"]
    chosen = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3"]
    assert arguments[-5:] == chosen if is_known else not set(chosen) & set(arguments)


def test_remark_about_an_engine_is_in_a_condition() -> None:
    for engine, is_remarked in (("tgi", True), ("vllm", False)):
        chat = chat_service(hardware={"accelerator": "nvidia"}, runtime=engine, **MEMORY)
        plan = decide_chat(chat, (MODELS, weights()))
        condition = planned_condition(plan, "ModelReady")
        assert (condition["status"], condition["reason"]) == ("True", "ModelUsable")
        assert ("TGI is maintained no more" in condition["message"]) == is_remarked
