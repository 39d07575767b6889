"""The room of the pods of benchmarks, as cells have it: whose Job is known, and no pod that looks alike."""

from kube.client import Obj
from kube.resources import NODES, PODS
from tests.unit.controller.placement.test_cell_registry import Registry, node, pod, registry


def of_job(job: str, *, is_controller: bool = True) -> Obj:
    """Return metadata of a pod that a Job has made, or that says so."""
    return {"ownerReferences": [{"kind": "Job", "name": "bench", "uid": job, "controller": is_controller}]}


def yielding_gpus(found: Registry, name: str) -> int:
    return found.find(f"node/{name}").yielding.get("nvidia.com/gpu", 0)


def test_room_of_a_benchmark_is_given_up_while_its_job_is_known() -> None:
    found = registry((NODES, node("n1")))
    found.cells.set_yielding({"team/job": "n1"})
    found.store.put(PODS, pod("bench", nodeName="n1", metadata=of_job("job")))
    assert (found.free_gpus("n1"), yielding_gpus(found, "n1")) == (7, 1)
    found.cells.set_yielding({})
    assert (found.free_gpus("n1"), yielding_gpus(found, "n1")) == (7, 0)
    found.cells.set_yielding({"team/job": "n1"})
    assert yielding_gpus(found, "n1") == 1
    found.store.put(PODS, pod("bench", version=2, phase="Succeeded", nodeName="n1", metadata=of_job("job")))
    assert (found.free_gpus("n1"), yielding_gpus(found, "n1")) == (8, 0)


def test_room_of_a_benchmark_ends_with_its_pod() -> None:
    found = registry((NODES, node("n1")))
    found.store.put(PODS, pod("bench", nodeName="n1", metadata=of_job("job")))
    found.cells.set_yielding({"team/job": "n1"})
    assert yielding_gpus(found, "n1") == 1
    found.store.remove(PODS, "team", "bench")
    assert (found.free_gpus("n1"), yielding_gpus(found, "n1")) == (8, 0)


def test_pod_that_looks_like_that_of_a_benchmark_gives_nothing_up() -> None:
    found = registry((NODES, node("n1")))
    found.cells.set_yielding({"team/job": "n1"})
    labels = {"labels": {"inference.pomona.dev/benchmark": "true"}}
    found.store.put(PODS, pod("labelled", nodeName="n1", metadata=labels))
    found.store.put(PODS, pod("child", nodeName="n1", metadata=of_job("job", is_controller=False)))
    found.store.put(PODS, pod("other", nodeName="n1", metadata=of_job("job-2")))
    found.store.put(PODS, pod("elsewhere", nodeName="n1", metadata=of_job("job") | {"namespace": "evil"}))
    found.store.put(PODS, pod("gated", metadata=of_job("job")))
    assert (found.free_gpus("n1"), yielding_gpus(found, "n1")) == (4, 0)


def test_pod_of_a_job_on_another_node_is_forged_and_gives_nothing_up() -> None:
    found = registry((NODES, node("n1")), (NODES, node("n2")))
    found.store.put(PODS, pod("forged", nodeName="n2", metadata=of_job("job")))
    found.cells.set_yielding({"team/job": "n1"})
    assert (found.free_gpus("n2"), yielding_gpus(found, "n2")) == (7, 0)
    found.store.put(PODS, pod("bench", nodeName="n1", metadata=of_job("job")))
    assert yielding_gpus(found, "n1") == 1


def test_benchmarks_that_stay_as_they_are_change_no_cell() -> None:
    found = registry((NODES, node("n1")))
    found.store.put(PODS, pod("bench", nodeName="n1", metadata=of_job("job")))
    found.cells.set_yielding({"team/job": "n1"})
    before = found.cells.revision
    found.cells.set_yielding({"team/job": "n1"})
    found.cells.set_yielding({"team/job": "n1", "team/without-pods": "n1"})
    assert found.cells.revision == before
