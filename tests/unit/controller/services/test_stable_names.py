"""Names of processes and digests of inputs are recorded: an update must restart nothing.

A changed value restarts every replica of every cluster, so it may change only if a release does that on purpose.
"""

import hashlib
import json
from typing import Any

import msgspec
import pytest

from controller.placement.process_units import _find_template
from controller.reconcile.stamp import ANNOTATION_INPUTS
from controller.services.rollout import is_current
from crds.metalprocess import MetalProcess
from kube.client import Obj
from kube.resources import DEPLOYMENTS, METAL_HOSTS, METAL_PROCESSES, MODELS, Resource
from tests.support.api_objects import GIB, host, model
from tests.support.service_decisions import (
    METAL,
    chat_deployment,
    chat_service,
    decide_chat,
    list_applied,
)

OPTIONS: Obj = {
    "contextLength": 8192,
    "parallel": 4,
    "cacheTypeK": "q8_0",
    "cacheTypeV": "q4_0",
    "chatTemplate": "{{ messages }}",
    "extraArgs": ["-fa", "on", "--temp", "0.5"],
}
COMPANIONS: Obj = {
    "speculative": {"draftModelRef": "draft", "maxTokens": 8},
    "projectorModelRef": "projector",
    "adapters": [{"modelRef": "adapter", "scale": "0.5"}, {"modelRef": "adapter-2"}],
}
SERVICES: dict[str, Obj] = {
    "defaults": {},
    "defaults stated": {"mode": "chat", "cacheTypeK": "f16", "extraArgs": []},
    "context": {"contextLength": 32768},
    "embeddings": {"mode": "embeddings", "contextLength": 512, "parallel": 2},
    "rerank": {"mode": "rerank", "priority": "high"},
    "options": OPTIONS,
    "companions": COMPANIONS,
    "all": {**OPTIONS, **COMPANIONS, "replicas": 3, "priority": "batch"},
}
CHOICES = {
    "defaults": "3c34b024a321363f",
    "defaults stated": "3c34b024a321363f",
    "context": "dafa8df5f18a071d",
    "embeddings": "f6b1a8084d4a13e0",
    "rerank": "7fc2fb8fa0b36c72",
    "options": "81dd60c31ab48b29",
    "companions": "f172a8269b25be0f",
    "all": "e7d147704e3e7bdc",
}
"""The `inputs` of the choice of serving options of each service on metal: if they change, an update chooses anew."""
PROCESSES: dict[str, list[tuple[str, str]]] = {
    "defaults": [("chat-49229d24-0", "dc3411cc7129a62b")],
    "defaults stated": [("chat-49229d24-0", "dc3411cc7129a62b")],
    "context": [("chat-60679fa2-0", "88a80d4d8322f5b0")],
    "embeddings": [("chat-fe8e4d71-0", "df8fba86f1a4a524")],
    "rerank": [("chat-67ee6d35-0", "e976f93c1445af01")],
    "options": [("chat-ad6dc7ae-0", "8475c58b7278b012")],
    "companions": [("chat-c332bcf7-0", "740fbb35389673c1")],
    "all": [
        ("chat-aff7cd8b-0", "1bd89693db7987ee"),
        ("chat-aff7cd8b-1", "1bd89693db7987ee"),
        ("chat-aff7cd8b-2", "1bd89693db7987ee"),
    ],
}


def models() -> list[tuple[Resource, Obj]]:
    """Return the Models that the services name."""
    made = []
    for name in ("tiny", "draft", "projector", "adapter", "adapter-2"):
        status = {"gguf": {"architecture": "clip" if name == "projector" else "llama"}, "file": f"{name}.gguf"}
        obj = model(source=f"https://models.example/{name}.gguf", status=status)
        obj["metadata"] |= {"name": name, "uid": f"uid-{name}"}
        made.append((MODELS, obj))
    return made


def keep_choice(case: str, **spec: Any) -> tuple[Resource, Obj]:
    """Return a service with its choice of serving options, as an earlier version may have made it."""
    serving = {"contextLength": 16_384, "parallel": 2, "promptCache": "64Mi", "inputs": CHOICES[case]}
    return chat_service(**SERVICES[case], **spec, status={"serving": serving})


def digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


@pytest.mark.parametrize("case", SERVICES)
def test_process_names_and_specs_stay_the_same(case: str) -> None:
    plan = decide_chat(keep_choice(case, **METAL), *models(), (METAL_HOSTS, host(free_bytes=64 * GIB)))
    made = [obj for kind, obj in plan.create if kind == METAL_PROCESSES]
    assert [(obj["metadata"]["name"], digest(obj["spec"])) for obj in made] == PROCESSES[case]


def test_mirrors_reach_processes_but_not_their_names() -> None:
    """An edit of them may restart no replica."""
    objects = models()
    for _kind, obj in objects:
        obj["spec"] |= {"mirrors": ["https://mirror.example/tiny.gguf"]}
    metal_host = (METAL_HOSTS, host(free_bytes=64 * GIB))
    plan = decide_chat(keep_choice("companions", **METAL), *objects, metal_host)
    (process,) = [obj for kind, obj in plan.create if kind == METAL_PROCESSES]
    assert process["metadata"]["name"] == PROCESSES["companions"][0][0]
    further = [extra["artifact"] for extra in process["spec"]["furtherArtifacts"]]
    assert all(
        artifact["mirrors"] == ["https://mirror.example/tiny.gguf"]
        for artifact in [process["spec"]["artifact"], *further]
    )


def test_extent_of_benchmarks_reaches_processes_but_not_their_names() -> None:
    """An edit of it restarts no replica."""
    benchmark = {"warmupIterations": 1, "minDuration": "30s"}
    metal_host = (METAL_HOSTS, host(free_bytes=64 * GIB))
    plan = decide_chat(keep_choice("companions", **METAL, benchmark=benchmark), *models(), metal_host)
    (process,) = [obj for kind, obj in plan.create if kind == METAL_PROCESSES]
    assert process["metadata"]["name"] == PROCESSES["companions"][0][0]
    assert process["spec"]["benchmark"] == benchmark
    assert "features" not in process["spec"]
    plain, stated = (
        msgspec.convert({**process, "spec": {**process["spec"], "benchmark": option}}, MetalProcess)
        for option in (None, benchmark)
    )
    assert _find_template(plain) == _find_template(stated)
    wanted = msgspec.structs.replace(plain.spec, memory_bytes=7)
    bound = msgspec.structs.replace(stated, spec=msgspec.structs.replace(stated.spec, host_name="studio-1"))
    assert is_current(bound, "another", wanted)


@pytest.mark.parametrize("runtime", ["llama.cpp", "ollama"])
def test_edit_of_the_drain_restarts_no_pod(runtime: str) -> None:
    """Pods have it once something else replaces them."""
    spec: Obj = {"runtime": runtime, "hardware": {"accelerator": "cpu"}, "resources": {"memory": "2Gi"}}
    there = (DEPLOYMENTS, chat_deployment(chat_service(**spec), *models()))
    (same,) = list_applied(decide_chat(chat_service(**spec, drainSeconds=30), *models(), there), DEPLOYMENTS)
    assert same["spec"]["template"] == there[1]["spec"]["template"]
    edited = chat_service(**spec, drainSeconds=30, contextLength=2048)
    (other,) = list_applied(decide_chat(edited, *models(), there), DEPLOYMENTS)
    assert other["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 35


@pytest.mark.parametrize(
    ("name", "digest"),
    [("defaults", "d869d0ab1cb20cf2"), ("defaults stated", "d869d0ab1cb20cf2"), ("all", "6430b7a4da472f1f")],
)
def test_digest_of_inputs_stays_the_same(name: str, digest: str) -> None:
    """If it changes, an update counts as an edit of each service, and all pods are replaced at once."""
    there = chat_deployment(chat_service(**SERVICES[name]), *models())
    assert there["metadata"]["annotations"][ANNOTATION_INPUTS] == digest
