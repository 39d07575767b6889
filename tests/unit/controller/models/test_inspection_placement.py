"""The nodes on which an inspection may run: those of the services that will serve the Model."""

import pytest

from controller.models.observation import observe_model
from controller.reconcile.plan import Snapshot
from crds.meta import Toleration
from crds.model import Model, ModelHardware
from crds.pods import ServiceHardware
from kube.client import Obj
from kube.resources import INFERENCE_SERVICES, MODELS, ObjectKey
from tests.support.api_objects import NOW, model, service, store
from tests.support.simulated_model import INSPECTED, SimulatedModel

OWN: Obj = {"key": "example.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
OWN_TOLERATION = Toleration(key="example.com/gpu", operator="Exists", effect="NoSchedule")
CLAIM = "pvc://weights/model.gguf"


def spec_of(job: Obj) -> Obj:
    """Return the spec of the pod of a Job."""
    pod_spec: Obj = job["spec"]["template"]["spec"]
    return pod_spec


def keys_of(job: Obj) -> list[str]:
    """Return the keys of the taints that the pod of a Job tolerates."""
    return [toleration["key"] for toleration in spec_of(job)["tolerations"]]


def refuse(simulated: SimulatedModel) -> None:
    """Report that the scheduler finds no node for the pod of the inspection."""
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "untolerated taint"}
    simulated.pods[simulated.job("inspect")["metadata"]["uid"]] = [
        {"metadata": {"creationTimestamp": "2026-11-21T12:00:00Z"}, "status": {"conditions": [condition]}}
    ]
    simulated.settle()


@pytest.mark.parametrize(
    ("source", "selector"), [("http://models.example/tiny.gguf", {}), (CLAIM, {"disk": "orchard"})]
)
def test_inspection_tolerates_what_the_service_does(source: str, selector: Obj) -> None:
    simulated = SimulatedModel(source=source)
    simulated.add_consumer(
        hardware=ServiceHardware(accelerator="nvidia"),
        tolerations=[OWN_TOLERATION],
        node_selector={"disk": "orchard"},
    )
    simulated.settle()
    job = simulated.job("inspect")
    assert keys_of(job) == ["nvidia.com/gpu", "example.com/gpu"]
    pod_selector = spec_of(job)["nodeSelector"]
    assert {name: value for name, value in pod_selector.items() if name == "disk"} == selector


def test_inspection_of_a_model_without_services_tolerates_the_taint_of_its_accelerator() -> None:
    simulated = SimulatedModel(hardware=ModelHardware(accelerator="amd"))
    simulated.settle()
    assert keys_of(simulated.job("inspect")) == ["amd.com/gpu"]


def test_inspection_that_no_node_takes_is_replaced_when_a_service_tolerates_the_taint() -> None:
    simulated = SimulatedModel()
    simulated.settle()
    refuse(simulated)
    assert simulated.condition("Ready").reason == "Unschedulable"
    first = simulated.job("inspect")
    simulated.add_consumer(tolerations=[OWN_TOLERATION])
    simulated.settle()
    second = simulated.job("inspect")
    assert (keys_of(first), keys_of(second)) == ([], ["example.com/gpu"])
    assert first["metadata"]["name"] not in simulated.jobs
    refuse(simulated)
    assert simulated.job("inspect") == second, "the scheduler tries it again by itself"


def test_inspection_that_a_node_takes_goes_on_when_a_service_comes() -> None:
    simulated = SimulatedModel()
    simulated.settle()
    simulated.add_consumer(tolerations=[OWN_TOLERATION])
    simulated.settle()
    assert len(simulated.made) == 1
    simulated.end("inspect", 0, INSPECTED)
    simulated.settle()
    assert simulated.condition("Ready").status == "True"


@pytest.mark.parametrize(
    "spec",
    [{"hardware": {"accelerator": "auto"}}, {"scheduling": {"pools": ["a", "b"]}}],
    ids=["auto", "pools"],
)
def test_inspection_tolerates_the_taints_of_all_accelerators_that_may_be_chosen(spec: Obj) -> None:
    chat = service(**spec, tolerations=[OWN])
    cluster = store((INFERENCE_SERVICES, chat), (MODELS, model()))
    snapshot, key = Snapshot(cluster, NOW), ObjectKey("team", "tiny")
    read = snapshot.read(MODELS, key, Model)
    assert read is not None
    observed = observe_model(snapshot, key, read)
    assert observed.consumer is None
    simulated = SimulatedModel()
    simulated.undecided = observed.undecided()
    simulated.settle()
    keys = keys_of(simulated.job("inspect"))
    assert {"nvidia.com/gpu", "amd.com/gpu", "habana.ai/gaudi", "example.com/gpu"} <= {*keys}


def test_control_plane_is_not_tolerated_unless_it_is_allowed() -> None:
    simulated = SimulatedModel()
    simulated.limits = simulated.limits._replace(control_plane=False)
    simulated.add_consumer(tolerations=[Toleration(key="", operator="Exists"), OWN_TOLERATION])
    simulated.settle()
    assert keys_of(simulated.job("inspect")) == ["example.com/gpu"]
