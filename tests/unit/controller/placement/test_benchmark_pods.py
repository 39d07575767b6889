"""The pods of benchmarks hold no room: those whose Job is known, and no pod that looks alike."""

from kube.client import Obj
from kube.resources import NODES, PODS
from tests.unit.controller.placement.test_cell_registry import node, pod, registry


def of_job(job: str, *, is_controller: bool = True) -> Obj:
    """Return metadata of a pod that a Job has made, or that says so."""
    return {"ownerReferences": [{"kind": "Job", "name": "bench", "uid": job, "controller": is_controller}]}


def test_pod_of_a_benchmark_holds_no_room_while_its_job_is_known() -> None:
    cluster = registry((NODES, node("n1")))
    cluster.cells.set_benchmarks({"team/job": "n1"})
    cluster.store.put(PODS, pod("bench", nodeName="n1", metadata=of_job("job")))
    assert cluster.free_gpus("n1") == 8
    cluster.cells.set_benchmarks({})
    assert cluster.free_gpus("n1") == 7
    cluster.cells.set_benchmarks({"team/job": "n1"})
    assert cluster.free_gpus("n1") == 8
    cluster.store.put(PODS, pod("bench", version=2, phase="Succeeded", nodeName="n1", metadata=of_job("job")))
    cluster.cells.set_benchmarks({})
    assert cluster.free_gpus("n1") == 8
    cluster.store.remove(PODS, "team", "bench")
    assert cluster.free_gpus("n1") == 8


def test_pod_that_looks_like_that_of_a_benchmark_holds_its_room() -> None:
    cluster = registry((NODES, node("n1")), (NODES, node("n2")))
    cluster.cells.set_benchmarks({"team/job": "n1"})
    labels = {"labels": {"inference.pomona.dev/benchmark": "true"}}
    cluster.store.put(PODS, pod("labelled", nodeName="n1", metadata=labels))
    cluster.store.put(PODS, pod("child", nodeName="n1", metadata=of_job("job", is_controller=False)))
    cluster.store.put(PODS, pod("other", nodeName="n1", metadata=of_job("job-2")))
    cluster.store.put(PODS, pod("elsewhere", nodeName="n1", metadata=of_job("job") | {"namespace": "evil"}))
    cluster.store.put(PODS, pod("gated", metadata=of_job("job")))
    cluster.store.put(PODS, pod("other-node", nodeName="n2", metadata=of_job("job")))
    assert (cluster.free_gpus("n1"), cluster.free_gpus("n2")) == (4, 7)


def test_benchmarks_that_stay_as_they_are_change_no_cell() -> None:
    cluster = registry((NODES, node("n1")))
    cluster.store.put(PODS, pod("bench", nodeName="n1", metadata=of_job("job")))
    cluster.cells.set_benchmarks({"team/job": "n1"})
    before = cluster.cells.revision
    cluster.cells.set_benchmarks({"team/job": "n1"})
    cluster.cells.set_benchmarks({"team/job": "n1", "team/without-pods": "n1"})
    assert cluster.cells.revision == before
