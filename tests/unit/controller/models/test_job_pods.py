"""The pods of Jobs that the API server refuses: its words are the reason of the Model."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest

from controller.models.job_pods import PODLESS_SECONDS, advise_on_refusal, read_refusals
from controller.reconcile.plan import Snapshot
from crds.meta import ObjectMeta
from kube.client import Client, Obj, ObjectList
from kube.errors import ApiError, Forbidden, Unreachable
from kube.resources import EVENTS, JOBS, PODS, Resource
from tests.support.api_objects import NOW, store
from tests.support.simulated_model import START, SimulatedModel

QUOTA = 'pods "tiny-inspect-1" is forbidden: exceeded quota: q, requested: requests.memory=128Mi'
WORDS = f"Error creating: {QUOTA}"
OWNER = ObjectMeta(name="tiny", namespace="team", uid="model-uid")


def refuse(simulated: SimulatedModel, verb: str) -> None:
    job = simulated.job(verb)
    job["metadata"]["creationTimestamp"] = simulated.now.isoformat()
    simulated.refusals[job["metadata"]["uid"]] = WORDS
    simulated.settle()


def test_refused_pod_of_an_inspection_is_the_reason_of_the_model() -> None:
    simulated = SimulatedModel()
    simulated.settle()
    refuse(simulated, "inspect")
    ready = simulated.condition("Ready")
    assert (ready.reason, simulated.model.status.phase) == ("FailedCreate", "Pending")
    assert QUOTA in ready.message


def test_refused_pod_of_a_fetch_is_the_reason_of_the_weights() -> None:
    simulated = SimulatedModel()
    simulated.begin_fetch()
    refuse(simulated, "fetch")
    cached = simulated.condition("Cached")
    assert cached.reason == "FailedCreate"
    assert QUOTA in cached.message


def test_deadline_of_a_job_without_a_pod_hides_no_refusal() -> None:
    simulated = SimulatedModel()
    simulated.settle()
    refuse(simulated, "inspect")
    simulated.mark("inspect", "Failed", reason="DeadlineExceeded", message="Job was active longer than its deadline")
    simulated.settle()
    ready = simulated.condition("Ready")
    assert ready.reason == "FailedCreate"
    assert ready.message.endswith("it is retried automatically")


def test_job_without_a_pod_is_looked_at_again() -> None:
    simulated = SimulatedModel()
    simulated.settle()
    simulated.job("inspect")["metadata"]["creationTimestamp"] = START.isoformat()
    assert simulated.settle().again_seconds == PODLESS_SECONDS
    simulated.now += timedelta(minutes=1)
    again = simulated.settle().again_seconds
    assert again is not None
    assert again > PODLESS_SECONDS
    simulated.pods[simulated.job("inspect")["metadata"]["uid"]] = [{"metadata": {"creationTimestamp": "2026"}}]
    assert simulated.settle().again_seconds is None


class EventClient(Client):
    """An API that answers with these Events, and records the field selectors."""

    def __init__(self, *events: Obj, refusal: Exception | None = None) -> None:
        self.events, self.refusal, self.asked = events, refusal, list[str]()
        self.kept: list[Obj] = []

    async def list(self, resource: Resource, namespace: str | None = None, **options: Any) -> ObjectList:
        assert (resource, namespace) == (EVENTS, "team")
        self.asked.append(options["field_selector"])
        if self.refusal is not None:
            raise self.refusal
        self.kept = [options["part"](event) for event in self.events[-options["most"] :]]
        return ObjectList(self.kept, "1")


def job(age_seconds: float, **more: Any) -> Obj:
    created = (NOW - timedelta(seconds=age_seconds)).isoformat()
    owner = {"apiVersion": "inference.pomona.dev/v1alpha1", "kind": "Model", "name": "tiny", "uid": "model-uid"}
    metadata = {"name": "a", "namespace": "team", "uid": "job-uid", "creationTimestamp": created}
    return {
        "metadata": metadata | {"ownerReferences": [owner | {"controller": True}]},
        "spec": {"template": {"spec": {}}},
        **more,
    }


def event(name: str, time: str, note: str) -> Obj:
    return {"metadata": {"name": name}, "deprecatedLastTimestamp": time, "note": note}


POD: Obj = {
    "metadata": {
        "name": "a-1",
        "namespace": "team",
        "uid": "pod-uid",
        "ownerReferences": [{"uid": "job-uid", "controller": True, "kind": "Job", "name": "a"}],
    }
}
COMPLETE: Obj = {"status": {"conditions": [{"type": "Complete", "status": "True"}]}}


def ended(reason: str) -> Obj:
    return {"status": {"conditions": [{"type": "Failed", "status": "True", "reason": reason}]}}


async def test_last_event_about_a_job_without_a_pod_is_read() -> None:
    client = EventClient(event("a.1", "2026-11-21T12:00:02Z", "later"), event("a.2", "2026-11-21T12:00:01Z", "first"))
    snapshot = Snapshot(store((JOBS, job(60))), NOW)
    assert await read_refusals(client, snapshot, OWNER) == {"job-uid": "later"}
    assert client.asked == ["regarding.uid=job-uid,reason=FailedCreate"]


async def test_events_that_anybody_may_write_cost_little() -> None:
    """A tenant may create Events about its own Job, each as large as an object can be."""
    flood = [event(f"a.{number}", f"2026-11-21T12:{number:02}:00Z", "x" * 9999) for number in range(60)]
    client = EventClient(*flood, event("a.x", "2026-11-21T13:00:00Z", "last " + "y" * 9999))
    (words,) = (await read_refusals(client, Snapshot(store((JOBS, job(60))), NOW), OWNER)).values()
    assert words.startswith("last y")
    assert len(words) == 1024, "as long as the message of a condition may be"
    assert len(client.kept) == 16
    assert all(len(kept["note"]) <= 1024 for kept in client.kept)


@pytest.mark.parametrize(
    "objects",
    [
        [(JOBS, job(1))],
        [(JOBS, job(60, **COMPLETE))],
        [(JOBS, job(60, **ended("BackoffLimitExceeded")))],
        [(JOBS, job(60)), (PODS, POD)],
    ],
    ids=["young", "complete", "failed, and its pod is gone", "with a pod"],
)
async def test_events_about_other_jobs_are_not_read(objects: Sequence[tuple[Resource, Obj]]) -> None:
    client = EventClient(event("a.1", "2026-11-21T12:00:02Z", WORDS))
    assert await read_refusals(client, Snapshot(store(*objects), NOW), OWNER) == {}
    assert client.asked == []


async def test_events_about_a_job_that_was_late_without_a_pod_are_read() -> None:
    client = EventClient(event("a.1", "2026-11-21T12:00:02Z", WORDS))
    late = Snapshot(store((JOBS, job(60, **ended("DeadlineExceeded")))), NOW)
    assert await read_refusals(client, late, OWNER) == {"job-uid": WORDS}


@pytest.mark.parametrize(
    "refusal",
    [
        Forbidden("list events", status=403, reason="Forbidden", message="no role"),
        ApiError("list events", status=500, message="etcdserver: request timed out"),
        Unreachable("list events: no answer"),
    ],
    ids=["no right", "store of Events is away", "no answer"],
)
async def test_controller_that_cannot_read_events_goes_on(refusal: Exception) -> None:
    client = EventClient(refusal=refusal)
    assert await read_refusals(client, Snapshot(store((JOBS, job(60))), NOW), OWNER) == {}


def test_quota_of_limits_is_told_with_the_way_out() -> None:
    said = 'pods "a" is forbidden: failed quota: q: must specify limits.cpu for: inspect'
    assert advise_on_refusal(said).startswith(said)
    assert "create a LimitRange" in advise_on_refusal(said)
    assert advise_on_refusal(WORDS) == WORDS
