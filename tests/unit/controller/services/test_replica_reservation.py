"""A Job that fetches a copy asks for exactly what one replica asks for."""

from typing import Any

import pytest

from controller.models.job_pods import NO_PODS
from controller.models.jobs import Placement, Reservation, proceed
from controller.models.served import Served, runtime_of
from controller.models.volume import prepare_fetch, read_facts
from controller.pod_settings import PodSettings, TenantLimits
from controller.services.pods.replica_reservation import reserve_replica
from crds.meta import ObjectMeta
from crds.model import Model
from kube.client import Obj
from kube.kinds import PersistentVolumeClaim
from tests.support.api_objects import GIB, NOW, as_model, as_service, model, service

SETTINGS = PodSettings("pomona:test")
PROXY_BYTES = 96 << 20
"""Memory of the proxy beside each engine."""
NODE_CACHE = {"scope": "node", "storageClassName": "local"}


def reserve(settings: PodSettings = SETTINGS, *, of_model: Model | None = None, **spec: Any) -> Reservation | None:
    spec = {"hardware": {"accelerator": "nvidia"}, "resources": {"memory": "3Gi"}} | spec
    asked, chosen_model = as_service(service(**spec)), of_model or as_model(model(cache=NODE_CACHE))
    return reserve_replica(asked, Served(chosen_model, runtime_of(asked, chosen_model, settings.vendors)), settings)


def test_devices_memory_and_processors_of_one_replica_are_reserved() -> None:
    reservation = reserve(
        replicas=3, hardware={"accelerator": "nvidia", "count": 2}, resources={"memory": "3Gi", "cpu": "4"}
    )
    assert reservation is not None
    assert reservation.requests == {"nvidia.com/gpu": "2", "memory": str(3 * GIB + PROXY_BYTES), "cpu": "4.05"}


def test_chosen_processors_are_reserved() -> None:
    reservation = reserve(status={"serving": {"contextLength": 4096, "cpu": "1937m"}})
    assert reservation is not None
    assert reservation.requests["cpu"] == "1.987"


def test_memory_is_that_of_the_pod_if_nobody_states_it() -> None:
    reservation = reserve(resources={}, hardware={"accelerator": "cpu"})
    assert reservation is not None
    assert int(reservation.requests["memory"]) > GIB


def test_memory_that_is_not_known_yet_leaves_the_devices_reserved() -> None:
    unknown = as_model(model(cache=NODE_CACHE, status={"layout": None, "sizeBytes": None}))
    reservation = reserve(resources={}, of_model=unknown)
    assert reservation is not None
    assert reservation.requests == {"nvidia.com/gpu": "1", "memory": str(PROXY_BYTES), "cpu": "0.05"}


def test_nodes_are_those_of_hardware_and_affinity() -> None:
    stated = {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["x"]}]}
    terms = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [stated]}}
    reservation = reserve(
        hardware={"accelerator": "nvidia", "products": ["NVIDIA-L4"]},
        pod={"affinity": {"nodeAffinity": terms}, "runtimeClassName": "nvidia"},
    )
    assert reservation is not None
    (term,) = reservation.affinity["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
        "nodeSelectorTerms"
    ]
    assert {expression["key"] for expression in term["matchExpressions"]} == {"zone", "nvidia.com/gpu.product"}
    assert reservation.runtime_class_name == "nvidia"


@pytest.mark.parametrize(
    "spec",
    [
        {"runtime": "quantum"},
        {"runtime": "vllm"},
        {"hardware": {"accelerator": "nvidia", "count": 1}, "resources": {"gpu": 2}},
        {"image": "elsewhere.example/engine:1"},
    ],
    ids=["unknown engine", "another format", "contradiction", "image that is not allowed"],
)
def test_service_whose_spec_is_refused_gets_no_copy(spec: Obj) -> None:
    assert reserve(PodSettings("pomona:test", limits=TenantLimits(("registry.example/",))), **spec) is None


def test_job_requests_what_is_reserved_and_what_it_needs_itself() -> None:
    of_model = as_model(model(cache=NODE_CACHE))
    claim = PersistentVolumeClaim(metadata=ObjectMeta(name="tiny-cache-1", uid="claim"))
    requests = {"nvidia.com/gpu": "2", "memory": "3Gi", "cpu": "10m"}
    facts = read_facts(of_model)
    work = prepare_fetch(of_model, facts, claim, Placement(), SETTINGS, reservation=Reservation(requests))
    job = proceed(work, [], NO_PODS, NOW).create
    assert job is not None
    pod = job["spec"]["template"]["spec"]
    assert pod["containers"][0]["resources"] == {
        "requests": {"nvidia.com/gpu": "2", "memory": "3Gi", "cpu": "100m"},
        "limits": {"nvidia.com/gpu": "2", "memory": "3Gi"},
    }
    small = prepare_fetch(of_model, facts, claim, Placement(), SETTINGS, reservation=Reservation())
    assert work.digest() == small.digest(), "an attempt goes on although the service asks for something else"
    assert "affinity" not in pod
