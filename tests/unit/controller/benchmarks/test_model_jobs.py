"""The reconciler of a Model leaves its benchmarks alone, and still deletes other Jobs that it does not know."""

from typing import Any

from controller.models.reconciler import model_reconciler
from controller.pod_settings import PodSettings
from controller.reconcile.plan import Snapshot
from fitness.performance_store import LABEL_BENCHMARK
from kube.client import Obj
from kube.resources import JOBS, MODELS, ObjectKey
from tests.support.api_objects import NOW, model, store


def job(name: str, **labels: str) -> Obj:
    owner = {"kind": "Model", "name": "tiny", "uid": model()["metadata"]["uid"], "controller": True}
    metadata: dict[str, Any] = {"name": name, "namespace": "team", "uid": name, "resourceVersion": "1"}
    metadata |= {"labels": labels, "annotations": {}, "ownerReferences": [{**owner, "apiVersion": "x/v1"}]}
    container = {"name": "inspect"}
    return {"metadata": metadata, "spec": {"template": {"spec": {"containers": [container]}}}, "status": {}}


def test_benchmark_of_a_model_is_not_deleted_with_its_past_jobs() -> None:
    there = store((MODELS, model()), (JOBS, job("past")), (JOBS, job("speed", **{LABEL_BENCHMARK: "true"})))
    plan = model_reconciler(PodSettings("pomona:test")).decide(Snapshot(there, NOW), ObjectKey("team", "tiny"))
    assert [ref.name for ref in plan.delete] == ["past"]
