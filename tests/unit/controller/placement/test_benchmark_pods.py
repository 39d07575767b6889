"""The pods of benchmarks hold no room: those whose Job is known, and no pod that looks alike."""

from kube.client import Obj
from kube.resources import NODES, PODS
from tests.unit.controller.placement.test_cell_registry import node, pod, registry


def of_job(job: str, *, is_controller: bool = True) -> Obj:
    """Return metadata of a pod that a Job has made, or that says so."""
    return {"ownerReferences": [{"kind": "Job", "name": "bench", "uid": job, "controller": is_controller}]}


def test_pod_of_a_benchmark_holds_no_room_while_its_job_is_known() -> None:
    found = registry((NODES, node("n1")))
    found.cells.set_benchmarks({"team/job": "n1"})
    found.store.put(PODS, pod("bench", nodeName="n1", metadata=of_job("job")))
    assert found.free_gpus("n1") == 8
    found.cells.set_benchmarks({})
    assert found.free_gpus("n1") == 7
    found.cells.set_benchmarks({"team/job": "n1"})
    assert found.free_gpus("n1") == 8
    found.store.put(PODS, pod("bench", version=2, phase="Succeeded", nodeName="n1", metadata=of_job("job")))
    found.cells.set_benchmarks({})
    assert found.free_gpus("n1") == 8
    found.store.remove(PODS, "team", "bench")
    assert found.free_gpus("n1") == 8


def test_pod_that_looks_like_that_of_a_benchmark_holds_its_room() -> None:
    found = registry((NODES, node("n1")), (NODES, node("n2")))
    found.cells.set_benchmarks({"team/job": "n1"})
    labels = {"labels": {"inference.pomona.dev/benchmark": "true"}}
    found.store.put(PODS, pod("labelled", nodeName="n1", metadata=labels))
    found.store.put(PODS, pod("child", nodeName="n1", metadata=of_job("job", is_controller=False)))
    found.store.put(PODS, pod("other", nodeName="n1", metadata=of_job("job-2")))
    found.store.put(PODS, pod("elsewhere", nodeName="n1", metadata=of_job("job") | {"namespace": "evil"}))
    found.store.put(PODS, pod("gated", metadata=of_job("job")))
    found.store.put(PODS, pod("other-node", nodeName="n2", metadata=of_job("job")))
    assert (found.free_gpus("n1"), found.free_gpus("n2")) == (4, 7)


def test_benchmarks_that_stay_as_they_are_change_no_cell() -> None:
    found = registry((NODES, node("n1")))
    found.store.put(PODS, pod("bench", nodeName="n1", metadata=of_job("job")))
    found.cells.set_benchmarks({"team/job": "n1"})
    before = found.cells.revision
    found.cells.set_benchmarks({"team/job": "n1"})
    found.cells.set_benchmarks({"team/job": "n1", "team/without-pods": "n1"})
    assert found.cells.revision == before
