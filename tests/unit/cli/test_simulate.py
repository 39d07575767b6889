"""`pomona simulate`: the service that is planned, and what the queue would do with it."""

import asyncio
from pathlib import Path
from typing import Any, cast

import click
import pytest

from artifacts.repositories.address_policy import NETWORKS_VARIABLE
from cli.density.queue_simulation import (
    SimulatedQueue,
    WantedService,
    build_manifests,
    build_queue_facts,
    print_queue,
)
from cli.queue.model_headers import build_header, read_headers
from cli.queue.plan_output import QueuePlan
from cli.queue.planning import plan_manifests
from console.density_models import KnownModel, change_quantization
from controller.placement.cluster_copy import ClusterCopy, QueueSettings
from crds.meta import API_VERSION
from kube.client import Client, Obj
from kube.errors import NotFound
from kube.resources import DEPLOYMENTS, INFERENCE_SERVICES, MODELS, NODES, PODS, ObjectKey, Resource
from kube.store import Store
from tests.support.api_objects import model
from tests.support.density_worlds import GIB, build_source
from tests.support.file_server import FileServer
from tests.support.queue_objects import deployment_of, queue_pod, queued_service
from tests.support.service_decisions import SETTINGS

H100 = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3", "nvidia.com/gpu.memory": "81559"}
NVIDIA = WantedService(accelerator="nvidia", devices=1)


class NoVolumes:
    """An API server that has no volume yet."""

    async def get(self, _resource: Resource, name: str, _namespace: str | None = None) -> Obj:
        raise NotFound(f"get {name}", status=404)


def find_known(store: Store, name: str) -> KnownModel:
    feed = build_source([(MODELS, model) for model in store.list(MODELS)])
    return next(model for model in feed.take_snapshot().models if model.full_name == name)


def make_node(name: str = "a", devices: int = 2) -> Obj:
    allocatable = {"cpu": "64", "memory": "512Gi", "pods": "110", "nvidia.com/gpu": str(devices)}
    status = {"allocatable": allocatable, "conditions": [{"type": "Ready", "status": "True"}]}
    return {
        "metadata": {"name": name, "uid": name, "resourceVersion": "1", "labels": H100},
        "spec": {},
        "status": status,
    }


def make_copy(*objects: tuple[Any, Obj]) -> ClusterCopy:
    made = ClusterCopy(QueueSettings(SETTINGS, 0.0))
    tiny = model()
    tiny["status"]["totalParameters"] = 500_000_000
    for resource, obj in ((NODES, make_node()), (MODELS, tiny), *objects):
        made.store.put(resource, obj)
    return made


def simulate(copied: ClusterCopy, wanted: WantedService, name: str = "team/tiny") -> QueuePlan:
    model = find_known(copied.store, name)
    if wanted.quantization is not None:
        changed = change_quantization(model, wanted.quantization)
        assert changed is not None
        model = changed
    manifests = build_manifests(model, copied.store, wanted, model.namespace or "default")
    header = build_header(model, wanted.accelerator)
    key = ObjectKey(manifests[0]["metadata"]["namespace"], manifests[0]["metadata"]["name"])
    headers = {key: header} if len(manifests) > 1 and header is not None else {}
    return asyncio.run(plan_manifests(cast("Client", NoVolumes()), copied, manifests, headers))


def test_replicas_start_where_there_is_room_and_the_others_say_why_they_wait() -> None:
    facts = build_queue_facts(SimulatedQueue(simulate(make_copy(), NVIDIA._replace(replicas=3))))
    assert [replica["outcome"] for replica in facts["replicas"]] == ["starts", "starts", "waits"]
    first, *_, last = facts["replicas"]
    assert (first["namespace"], first["service"], first["to"]) == ("team", "what-if", ["node/a"])
    assert first["tokensPerSecondLow"] < first["tokensPerSecond"] < first["tokensPerSecondHigh"]
    assert first["speedSource"] == "Estimated"
    assert last["reason"] == "InsufficientDevices"
    (left,) = facts["remaining"]
    assert (left["cell"], left["free"]["nvidia.com/gpu"]) == ("node/a", 0)
    assert 0 < left["free"]["memory"] < 512 * GIB
    assert facts["isComplete"]


def test_service_of_higher_priority_shows_what_it_would_evict(capsys: pytest.CaptureFixture[str]) -> None:
    low = queued_service("low", priority="low", hardware={"accelerator": "nvidia", "count": 2})
    running = queue_pod("low-aaa-1", service="low", gated=False, node="a", devices=2)
    copied = make_copy((INFERENCE_SERVICES, low), (DEPLOYMENTS, deployment_of("low")), (PODS, running))
    queue = SimulatedQueue(simulate(copied, NVIDIA._replace(priority="critical")))
    assert queue.has_starts
    print_queue(queue)
    printed = capsys.readouterr().out
    assert "evicts" in printed
    assert "evicted, waits" in printed
    assert "left on node/a: " in printed


def test_model_of_the_catalog_and_what_if_models_are_planned() -> None:
    copied = make_copy()
    assert simulate(copied, NVIDIA, "qwen3-8b").services[0].notes[0] == "Model what-if-model is as its header says"
    copied = make_copy()
    quantized = simulate(copied, NVIDIA._replace(quantization="Q8_0"))
    assert quantized.services[0].problem is None
    (starts,) = build_queue_facts(SimulatedQueue(quantized))["replicas"]
    (plain,) = build_queue_facts(SimulatedQueue(simulate(make_copy(), NVIDIA)))["replicas"]
    assert starts["tokensPerSecond"] != plain["tokensPerSecond"]


def test_stated_memory_decides_whether_it_fits() -> None:
    facts = build_queue_facts(SimulatedQueue(simulate(make_copy(), NVIDIA._replace(memory_bytes=200 * GIB))))
    assert facts["replicas"] == []
    assert facts["problem"]


def test_other_quantization_is_not_held_to_the_memory_that_is_stated_for_this_one() -> None:
    copied = make_copy()
    stored = copied.store.get(MODELS, "tiny", "team")
    assert stored is not None
    copied.store.put(MODELS, {**stored, "spec": {**stored["spec"], "memoryBytes": 900 * GIB}})
    model = find_known(copied.store, "team/tiny")
    made, _ = build_manifests(model, copied.store, NVIDIA._replace(quantization="Q8_0"), "team")
    assert "memoryBytes" not in made["spec"]


def test_accelerator_that_does_not_exist_is_a_problem_with_the_way_out() -> None:
    facts = build_queue_facts(SimulatedQueue(simulate(make_copy(), NVIDIA._replace(accelerator="nosuch"))))
    assert "nosuch" in facts["problem"]


def test_names_that_exist_are_not_taken() -> None:
    copied = make_copy((INFERENCE_SERVICES, queued_service("what-if")))
    (made,) = build_manifests(find_known(copied.store, "team/tiny"), copied.store, NVIDIA, "team")
    assert made["metadata"] == {"name": "what-if-again", "namespace": "team"}


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (NVIDIA._replace(devices=10**9), "spec.hardware.count: Invalid value: 1000000000"),
        (NVIDIA._replace(accelerator="../x"), 'spec.hardware.accelerator: Invalid value: "../x"'),
        (NVIDIA._replace(priority="urgent"), "spec.priority"),
        (NVIDIA._replace(replicas=101), "spec.replicas: Invalid value: 101"),
    ],
)
def test_service_that_the_api_server_would_refuse_is_refused(wanted: WantedService, said: str) -> None:
    copied = make_copy()
    with pytest.raises(click.UsageError) as caught:
        build_manifests(find_known(copied.store, "team/tiny"), copied.store, wanted, "team")
    assert said in caught.value.message


def test_user_without_the_rights_sees_the_fit_alone(capsys: pytest.CaptureFixture[str]) -> None:
    queue = SimulatedQueue(problem="a plan needs the whole cluster: u may not list pods")
    print_queue(queue)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "the queue is not simulated: a plan needs the whole cluster: u may not list pods\n"
    assert build_queue_facts(queue) == {"isKnown": False, "problem": queue.problem}
    assert not queue.has_starts


async def test_header_in_a_private_network_is_read_only_if_it_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NETWORKS_VARIABLE, raising=False)
    spec = {"source": "http://169.254.169.254/latest/tiny.gguf"}
    metadata = {"name": "mine", "namespace": "team"}
    manifest = {"apiVersion": API_VERSION, "kind": "Model", "metadata": metadata, "spec": spec}
    headers, problems = await read_headers(make_copy(), [manifest], ())
    assert headers == {}
    (line,) = problems
    assert line.startswith("Model team/mine: cannot read its header: ")
    assert "169.254.169.254" in line


async def test_header_that_cannot_be_read_is_that_of_the_catalog_if_it_has_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = "hf://Qwen/Qwen3-8B-GGUF/Qwen3-8B-Q4_K_M.gguf"
    metadata = {"name": "listed", "namespace": "team"}
    manifest = {"apiVersion": API_VERSION, "kind": "Model", "metadata": metadata, "spec": {"source": source}}
    async with FileServer(tmp_path) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        headers, problems = await read_headers(make_copy(), [manifest], ())
    assert headers[ObjectKey("team", "listed")].layout is not None
    (line,) = problems
    assert line.endswith("; using the figures of the catalog")
