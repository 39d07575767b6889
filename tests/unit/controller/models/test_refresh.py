"""Decisions about moving sources: when they are checked again, and what follows when their revision has changed."""

from datetime import timedelta
from typing import Any

import msgspec
import pytest

from controller.models import refresh
from controller.models.claims import RELEASE_SECONDS
from controller.models.served import cache_path, cached_claim
from controller.models.source_secret import TYPE, read_verdict
from crds.cache import CacheOptions
from crds.meta import SecretReference
from kube.client import Client, Obj
from kube.resources import SECRETS, Resource
from tests.support.simulated_model import INSPECTED, SHA, SimulatedModel, make_cached, make_inspected

HOUR = 3600
NEWER = INSPECTED | {"revision": '"etag-2"'}
BRANCH = "hf://org/repo/tiny.gguf"
TAG = "oci://ghcr.io/acme/tiny:v1"


def make_due(simulated: SimulatedModel) -> SimulatedModel:
    """Move the clock to the next look, and return the Model with its Job."""
    simulated.settle()
    wait_seconds = refresh.wait_seconds(simulated.model, simulated.now)
    again = simulated.settle().again_seconds
    assert again is not None
    assert again <= wait_seconds, "the controller looks by itself"
    made = len(simulated.made)
    simulated.now += timedelta(seconds=wait_seconds)
    simulated.settle()
    assert len(simulated.made) == made + 1
    return simulated


def make_changed(**spec: Any) -> SimulatedModel:
    """Return a Model whose weights are on a volume, and whose source has another revision by now."""
    simulated = make_due(make_cached(refresh_policy="OnChange", **spec))
    simulated.mounted = {"tiny-cache"}
    simulated.end("inspect", 0, NEWER)
    simulated.settle()
    return simulated


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"refresh_policy": "OnChange", "source": f"hf://org/repo@{'a' * 40}/tiny.gguf"},
        {"refresh_policy": "OnChange", "source": f"oci://ghcr.io/acme/tiny@sha256:{SHA}"},
    ],
    ids=["IfNotPresent", "a commit", "a digest"],
)
def test_source_that_cannot_change_or_may_not_is_read_once(spec: Obj) -> None:
    simulated = make_inspected(**spec)
    simulated.now += timedelta(days=30)
    assert simulated.settle().again_seconds is None
    assert (len(simulated.made), simulated.model.status.last_checked) == (1, "")


@pytest.mark.parametrize("source", [BRANCH, "http://models.example/tiny.gguf", TAG, "s3://models/tiny.gguf"])
def test_moving_source_is_looked_at_once_in_each_interval(source: str) -> None:
    simulated = make_inspected(refresh_policy="OnChange", source=source)
    assert simulated.model.status.last_checked == "2026-11-21T12:00:00Z"
    for looks in range(1, 4):
        make_due(simulated)
        assert len(simulated.made) == 1 + looks
        assert len(simulated.jobs) == 1, "the look alone"
        simulated.end("inspect", 0, INSPECTED)
        events = simulated.step().events
        simulated.settle()
        assert (events, simulated.jobs) == ((), {})
        assert simulated.condition("Refreshed").reason == "UpToDate"
    elapsed = (simulated.now - simulated.now.replace(hour=12, minute=0, second=0)).total_seconds()
    assert 3 * HOUR <= elapsed <= 3 * 1.1 * HOUR


def test_models_do_not_all_look_at_the_same_time() -> None:
    waits = set()
    for number in range(20):
        simulated = make_inspected(refresh_policy="OnChange", refresh_interval_seconds=300)
        simulated.settle()
        metadata = simulated.model.metadata
        model = msgspec.structs.replace(simulated.model, metadata=msgspec.structs.replace(metadata, uid=str(number)))
        waits.add(refresh.wait_seconds(model, simulated.now))
    assert min(waits) >= 300
    assert max(waits) < 330
    assert len(waits) > 10


def test_pods_serve_the_earlier_revision_until_the_new_one_is_verified() -> None:
    simulated = make_changed()
    old_path = cache_path(simulated.model)
    assert simulated.model.status.revision == '"etag-2"'
    assert simulated.condition("Refreshed").reason == "RevisionChanged"
    assert simulated.condition("Cached").status == "True"
    assert simulated.model.status.phase == "Ready"
    assert cached_claim(simulated.model) == "tiny-cache"
    assert (
        "the source has another revision; pods serve from tiny-cache" in simulated.condition("VolumeChanging").message
    )

    simulated.end("fetch", 0, {"sizeBytes": 1})
    simulated.settle()
    assert cached_claim(simulated.model) != "tiny-cache"
    assert cache_path(simulated.model) != old_path
    assert "tiny-cache" in simulated.claims, "a pod mounts it"
    simulated.mounted.clear()
    simulated.settle()
    assert set(simulated.claims) == {cached_claim(simulated.model)}


def test_change_is_reported_by_one_event() -> None:
    simulated = make_due(make_inspected(refresh_policy="OnChange"))
    simulated.end("inspect", 0, NEWER)
    events = [event for _ in range(4) for event in simulated.step().events]
    assert [(event.type, event.reason) for event in events] == [("Normal", "RevisionChanged")]
    assert events[0].note == 'the source has revision "etag-2", after "etag-1"'


def test_hosts_get_the_new_revision_at_once() -> None:
    simulated = make_due(make_inspected(refresh_policy="OnChange"))
    simulated.end("inspect", 0, NEWER)
    simulated.settle()
    assert (simulated.model.status.revision, simulated.claims) == ('"etag-2"', {})


def test_nodes_mount_the_image_that_the_tag_names_now() -> None:
    first, second = (f"sha256:{digit * 64}" for digit in "12")
    simulated = SimulatedModel(source=TAG, cache=CacheOptions(medium="Image"), refresh_policy="OnChange")
    simulated.settle()
    simulated.end("inspect", 0, INSPECTED | {"revision": first})
    make_due(simulated)
    (container,) = simulated.job("inspect")["spec"]["template"]["spec"]["containers"]
    assert container["args"][:2] == ["inspect", TAG], "the tag is resolved again"
    simulated.end("inspect", 0, INSPECTED | {"revision": second})
    simulated.settle()
    assert simulated.model.status.cached is not None
    assert simulated.model.status.cached.image == f"ghcr.io/acme/tiny@{second}"


def test_revisions_that_change_faster_than_they_are_fetched_pile_up_no_volumes() -> None:
    simulated = make_changed()
    for number in range(3, 6):
        make_due(simulated)
        simulated.end("inspect", 0, INSPECTED | {"revision": f'"etag-{number}"'})
        simulated.settle()
        assert len(simulated.claims) == 2, "what pods mount, and the latest"
        assert cached_claim(simulated.model) == "tiny-cache"


@pytest.mark.parametrize(("exit_code", "looks"), [(2, 1), (1, 2)], ids=["permanent", "transient"])
def test_failed_look_leaves_the_last_revision_in_use(exit_code: int, looks: int) -> None:
    simulated = make_due(make_cached(refresh_policy="OnChange"))
    made = len(simulated.made)
    simulated.end("inspect", exit_code, {"reason": "SourceUnauthorized", "message": "no access."})
    simulated.settle()
    refreshed = simulated.condition("Refreshed")
    assert (refreshed.status, refreshed.reason) == ("False", "SourceUnauthorized")
    assert refreshed.message == "no access; the last revision stays in use, and the source is checked again"
    assert (simulated.model.status.phase, simulated.model.status.revision) == ("Ready", '"etag-1"')
    simulated.now += timedelta(minutes=10)
    simulated.settle()
    assert len(simulated.made) == made + looks - 1, "a permanent failure waits for the next interval"


def test_edit_ends_what_a_look_began() -> None:
    """The owner wants other weights: services wait for these instead of serving the earlier ones as if they were."""
    simulated = make_changed()
    simulated.edit(source="http://models.example/other.gguf")
    simulated.settle()
    simulated.end("inspect", 0, INSPECTED | {"file": "other.gguf"})
    simulated.settle()
    assert simulated.condition("Cached").status == "False"


def test_service_that_is_suspended_keeps_the_verified_weights_until_others_are() -> None:
    simulated = make_changed()
    held = simulated.model.status.cached
    consumers, simulated.consumers = simulated.consumers, []
    simulated.mounted.clear()
    plan = simulated.settle()
    assert simulated.model.status.cached == held
    assert plan.again_seconds is not None
    assert plan.again_seconds > RELEASE_SECONDS, "nothing is to be deleted"
    simulated.consumers = consumers
    simulated.settle()
    assert simulated.condition("Cached").status == "True", "it serves again at once"
    simulated.end("fetch", 0, {"sizeBytes": 1})
    simulated.settle()
    assert set(simulated.claims) == {cached_claim(simulated.model)} != {"tiny-cache"}


def test_change_of_the_source_deletes_no_weights_of_a_suspended_service() -> None:
    simulated = make_due(make_cached(refresh_policy="OnChange"))
    held, simulated.consumers = simulated.model.status.cached, []
    simulated.end("inspect", 0, NEWER)
    simulated.settle()
    assert (simulated.model.status.cached, set(simulated.claims)) == (held, {"tiny-cache"})
    simulated.add_consumer()
    simulated.settle()
    assert simulated.condition("Cached").status == "True", "it serves again at once"


def test_edit_after_a_change_returns_to_no_earlier_revision() -> None:
    """The Job that inspected the Model first has the answer of that time."""
    simulated = make_changed()
    simulated.end("fetch", 0, {"sizeBytes": 1})
    simulated.settle()
    simulated.mounted = {cached_claim(simulated.model)}
    simulated.settle()
    verified = dict(simulated.claims)
    simulated.edit(domains=["coding"])
    simulated.settle()
    simulated.end("inspect", 0, NEWER)
    simulated.settle()
    assert simulated.model.status.revision == '"etag-2"'
    assert (simulated.condition("Cached").status, simulated.claims) == ("True", verified)


def test_policy_that_is_taken_back_leaves_no_trace() -> None:
    simulated = make_inspected(refresh_policy="OnChange")
    simulated.settle()
    simulated.edit(refresh_policy="IfNotPresent")
    simulated.settle()
    assert simulated.model.status.last_checked == ""
    assert [condition.type for condition in simulated.model.status.conditions] == ["Ready", "Cached"]


class Secrets(Client):
    """Answers reads of one Secret, and counts them."""

    def __init__(self) -> None:
        self.reads = 0

    async def get(self, resource: Resource, name: str, namespace: str | None = None) -> Obj:
        assert (resource, name, namespace) == (SECRETS, "hub", "team")
        self.reads += 1
        return {"metadata": {"name": "hub"}, "type": TYPE, "data": {"token": ""}}


async def test_secret_is_judged_again_before_a_look() -> None:
    """Its owner may have taken back the mark since."""
    simulated = SimulatedModel(refresh_policy="OnChange", source_secret_ref=SecretReference(name="hub"))
    client = Secrets()
    simulated.secret = await read_verdict(client, simulated.model)
    simulated.settle()
    simulated.end("inspect", 0, INSPECTED)
    simulated.settle()
    reads = client.reads
    for elapsed, expected in ((0, 0), (2 * HOUR, 1)):
        now = simulated.now + timedelta(seconds=elapsed)
        await read_verdict(client, simulated.model, has_work=refresh.is_due(simulated.model, now))
        assert client.reads == reads + expected
