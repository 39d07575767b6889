"""Decisions about Models that only hosts serve: a host inspects them, and a Job only where none can or pods serve."""

from datetime import timedelta
from typing import Any

import pytest

from controller.models import host_inspection, refresh, volume
from controller.models.inspecting_hosts import InspectingHost
from crds.cache import CacheOptions
from crds.meta import SecretReference
from crds.model import ModelHardware
from kube.client import Obj
from kube.resources import METAL_HOSTS, METAL_PROCESSES, MODELS
from tests.support.api_objects import host
from tests.support.simulated_copies import SimulatedCopies
from tests.support.simulated_model import INSPECTED, SHA, SimulatedModel, make_cached, make_inspected, pod

LIVE = InspectingHost(is_live=True)
LOST = InspectingHost(is_live=False, is_lost=True)
METAL = {"hardware": ModelHardware(accelerator="metal")}
REPORT = INSPECTED | {"format": "gguf"}
COMMIT = "a" * 40
LAYOUT = {
    "tensorBytes": 100,
    "vocabularySize": 32,
    "embeddingSize": 8,
    "attentionSize": 8,
    "headCount": 2,
    "feedForwardSize": 16,
    "layers": [{"count": 2, "keyElements": 8, "valueElements": 8}],
}


def make_host_model(*hosts: str, image: str = "", **spec: Any) -> SimulatedModel:
    """Return a Model that only hosts serve, with live hosts, of a controller without an image for Jobs."""
    simulated = SimulatedModel(**METAL | spec)
    simulated.image = image
    simulated.hosts = dict.fromkeys(hosts or ("studio-1",), LIVE)
    simulated.settle()
    return simulated


def make_reported(*hosts: str, image: str = "", **spec: Any) -> SimulatedModel:
    """Return such a Model that a host has inspected."""
    simulated = make_host_model(*hosts, image=image, **spec)
    simulated.report(phase="Stopped", inspection=REPORT)
    simulated.settle()
    return simulated


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"memory_bytes": 5},
        {"sha256": SHA},
        {"source": "hf://org/repo/tiny.gguf"},
        {"source": "hf://org/repo"},
        {"source": "oci://ghcr.io/acme/tiny:v1", "files": ["*.gguf"]},
    ],
    ids=["http", "memory stated", "digest", "hub", "folder", "registry"],
)
def test_public_source_of_hosts_is_inspected_by_a_host(spec: Obj) -> None:
    simulated = make_host_model(image="pomona:test", **spec)
    (made,) = simulated.made
    assert made["kind"] == "MetalProcess"
    assert made["spec"] | {"artifact": None} == {
        "inspect": True,
        "modelName": "tiny",
        "artifact": None,
        "memoryBytes": 1,
        "hostName": "studio-1",
    }
    assert made["spec"]["artifact"]["source"] == simulated.model.spec.source
    assert made["metadata"]["ownerReferences"][0]["kind"] == "Model"
    assert "finalizers" not in made["metadata"]
    condition = simulated.condition("Ready")
    assert (condition.reason, condition.message) == ("Inspecting", "host studio-1 reads the artifact's header")


@pytest.mark.parametrize(
    "spec",
    [
        {"hardware": ModelHardware()},
        {"source_secret_ref": SecretReference(name="hub")},
        {"source": "s3://bucket/tiny.gguf"},
        {"source": "pvc://claim/tiny.gguf"},
        {"source": "oci://ghcr.io/acme/tiny:v1", "cache": CacheOptions(medium="Image")},
    ],
    ids=["pods", "Secret", "bucket", "claim", "image volume"],
)
def test_source_that_hosts_may_not_inspect_needs_a_job(spec: Obj) -> None:
    simulated = make_host_model(image="pomona:test", **spec)
    assert simulated.job("inspect")
    assert simulated.processes == {}
    without_image = make_host_model(**spec)
    assert without_image.made == []
    condition = without_image.condition("Ready")
    assert (condition.reason, condition.status, without_image.model.status.phase) == ("NoImage", "False", "Failed")
    assert condition.message.endswith("start `pomona controller` with --image")


def test_report_becomes_the_facts_and_its_process_is_deleted() -> None:
    simulated = make_reported()
    status = simulated.model.status
    assert (status.phase, simulated.condition("Ready").reason) == ("Ready", "Inspected")
    assert (status.revision, status.size, status.inspected_by) == ('"etag-1"', "100.0 MiB", "studio-1")
    assert simulated.condition("Cached").reason == "NoConsumers"
    assert simulated.processes == {}
    assert len(simulated.made) == 1


def test_report_is_kept_until_the_status_has_it() -> None:
    simulated = make_host_model()
    simulated.report(phase="Stopped", inspection=REPORT)
    plan = simulated.decide()
    assert plan.status is not None
    assert (plan.delete, plan.status["revision"]) == ((), '"etag-1"')
    assert plan.again_seconds == host_inspection.KEPT_SECONDS, "then the process is deleted"
    assert simulated.decide() == plan, "a controller that dies before the write decides the same"


def test_second_report_changes_nothing() -> None:
    simulated = make_host_model()
    simulated.report(phase="Stopped", inspection=REPORT)
    simulated.step()
    simulated.report(phase="Stopped", inspection=REPORT | {"revision": '"thief"'})
    simulated.settle()
    assert simulated.model.status.revision == '"etag-1"'


def test_digest_of_the_user_is_the_digest_of_the_model() -> None:
    assert make_reported(sha256=SHA).model.status.sha256 == SHA


@pytest.mark.parametrize(
    ("spec", "changes", "problem"),
    [
        ({"sha256": SHA}, {"sha256": "cd" * 32}, "is not the one of spec.sha256"),
        ({}, {"sha256": "../../etc"}, "matching regex"),
        ({}, {"file": "other.gguf"}, "is not tiny.gguf of spec.source"),
        ({}, {"format": "ollama"}, "is not tiny.gguf"),
        ({}, {"sizeBytes": None}, "the files have no size"),
        ({}, {"sizeBytes": -1}, ">= 0"),
        ({}, {"sizeBytes": 1 << 62}, "larger than"),
        ({}, {"layout": LAYOUT | {"tensorBytes": 1 << 40}}, "larger than the files"),
        ({}, {"layout": LAYOUT | {"headCount": 1 << 51}}, "larger than"),
        ({}, {"layout": LAYOUT | {"layers": [{"count": 1}] * 17}}, "length <= 16"),
        ({}, {"layout": {"tensorBytes": 1}}, "missing required field"),
        ({}, {"gguf": {"architecture": "a" * 257}}, "length <= 256"),
        ({}, {"gguf": {"architecture": "\x1b[2J"}}, "not printable"),
        ({}, {"gguf": {"contextLength": -1}}, "negative"),
        ({}, {"revision": "r" * 257}, "length <= 256"),
        ({}, {"revision": "a\nb"}, "not printable"),
        ({"source": f"hf://org/repo@{COMMIT}/tiny.gguf"}, {"revision": "b" * 40}, f"is not {COMMIT}"),
        ({"source": "hf://org/repo/tiny.gguf"}, {"revision": "--help"}, "is no commit"),
        ({"source": "oci://ghcr.io/acme/tiny:v1"}, {"revision": "v2"}, "is no digest"),
        (
            {"source": f"oci://ghcr.io/acme/tiny@sha256:{SHA}"},
            {"revision": f"sha256:{'cd' * 32}"},
            "is not sha256:abab",
        ),
        ({"source": "hf://org/repo"}, {"file": "../tiny.gguf", "revision": COMMIT}, "nothing that a folder can have"),
        ({"source": "hf://org/repo"}, {"file": "", "revision": COMMIT}, "nothing that a folder can have"),
        ({"source": "hf://org/repo"}, {"file": "a.gguf", "format": "mlx", "revision": COMMIT}, "nothing that a folder"),
    ],
)
def test_hostile_report_is_refused_and_another_host_is_asked(spec: Obj, changes: Obj, problem: str) -> None:
    simulated = make_host_model("studio-1", "studio-2", **spec)
    simulated.report(phase="Stopped", inspection=REPORT | changes)
    simulated.settle()
    condition = simulated.condition("Ready")
    assert condition.reason == "ReportRefused"
    assert condition.message.startswith("host studio-1 sent a report that cannot be used: ")
    assert problem in condition.message
    assert simulated.model.status.revision == ""
    simulated.now += timedelta(seconds=10)
    simulated.settle()
    assert simulated.inspection["spec"]["hostName"] == "studio-2"
    assert len(simulated.processes) == 1


@pytest.mark.parametrize("inspection", [None, {"inspection": "x"}, {"inspection": {"gguf": 1}}])
def test_report_of_another_type_is_refused(inspection: Obj | None) -> None:
    simulated = make_host_model()
    simulated.report(phase="Stopped", **(inspection or {}))
    simulated.settle()
    assert simulated.condition("Ready").reason == "ReportRefused"


@pytest.mark.parametrize(
    ("reason", "shown"),
    [
        ("SourceUnreachable", "SourceUnreachable"),
        ("Inspected", "InspectionFailed"),
        ("HostInspects", "InspectionFailed"),
        ("not a reason!", "InspectionFailed"),
        (None, "InspectionFailed"),
    ],
)
def test_failure_is_shown_without_what_a_host_could_feign(reason: str | None, shown: str) -> None:
    simulated = make_host_model()
    simulated.report(phase="Failed", reason=reason, message="no route\x1b[2J\n" + "x" * 5000)
    simulated.settle()
    condition = simulated.condition("Ready")
    assert (condition.reason, condition.status, simulated.model.status.phase) == (shown, "False", "Pending")
    assert condition.message.startswith("host studio-1: no route [2J xxx")
    assert condition.message.endswith("; it is retried automatically")
    assert condition.message.isprintable()
    assert len(condition.message) < 1200


def test_failure_that_feigns_an_inspection_yields_no_facts() -> None:
    simulated = make_host_model()
    simulated.report(phase="Failed", reason="Inspected", message="x", inspection=REPORT)
    simulated.settle()
    simulated.step()
    assert (simulated.model.status.phase, simulated.model.status.revision) == ("Pending", "")


def test_permanent_failure_is_shown_and_other_hosts_are_asked_with_back_off() -> None:
    simulated = make_host_model("studio-1", "studio-2", "studio-3")
    asked = []
    for _ in range(4):
        asked.append(simulated.inspection["spec"]["hostName"])
        simulated.report(phase="Rejected", reason="SourceNotFound", message="404")
        again = simulated.settle().again_seconds
        condition = simulated.condition("Ready")
        assert (condition.reason, simulated.model.status.phase) == ("SourceNotFound", "Failed")
        assert condition.message.endswith(": 404; edit the Model; it is retried automatically")
        assert again is not None
        simulated.now += timedelta(seconds=again)
        simulated.settle()
    assert asked == ["studio-1", "studio-2", "studio-3", "studio-1"]
    assert len(simulated.processes) == 1


def test_clock_of_the_host_does_not_decide_when_the_next_attempt_follows() -> None:
    simulated = make_host_model()
    simulated.report(phase="Failed", reason="SourceUnreachable", message="x")
    process = simulated.inspection
    process["metadata"]["managedFields"] = [{"subresource": "status", "time": "9999-01-01T00:00:00Z"}]
    again = simulated.settle().again_seconds
    assert again is not None
    assert again <= 5


@pytest.mark.parametrize(
    ("state", "reason"),
    [(LOST, "HostLost"), (None, "HostGone")],
    ids=["its Lease expired", "deleted or no longer given to the namespace"],
)
def test_host_that_is_lost_is_replaced_by_another(state: InspectingHost | None, reason: str) -> None:
    simulated = make_host_model("studio-1", "studio-2")
    simulated.now += timedelta(seconds=6)
    simulated.hosts = {"studio-2": LIVE} | ({"studio-1": state} if state else {})
    plan = simulated.step()
    assert plan.status is not None
    assert plan.status["conditions"][0]["reason"] == reason
    simulated.settle()
    assert [each["spec"]["hostName"] for each in simulated.processes.values()] == ["studio-2"]


def test_report_of_a_host_that_lost_the_namespace_is_not_believed() -> None:
    simulated = make_host_model("studio-1", "studio-2")
    simulated.report(phase="Stopped", inspection=REPORT)
    del simulated.hosts["studio-1"]
    simulated.settle()
    assert simulated.condition("Ready").reason == "HostGone"
    assert simulated.model.status.revision == ""


def test_report_of_a_host_that_died_afterwards_is_used() -> None:
    simulated = make_host_model()
    simulated.report(phase="Stopped", inspection=REPORT)
    simulated.hosts["studio-1"] = LOST
    simulated.settle()
    assert simulated.model.status.inspected_by == "studio-1"


@pytest.mark.parametrize(
    ("status", "seconds"),
    [({}, host_inspection.SILENT_SECONDS), ({"phase": "Fetching"}, volume.INSPECT_SECONDS)],
    ids=["never reports", "never ends"],
)
def test_host_that_does_not_answer_is_given_up(status: Obj, seconds: float) -> None:
    simulated = make_host_model("studio-1", "studio-2")
    simulated.report(**status)
    assert simulated.settle().again_seconds == seconds
    simulated.now += timedelta(seconds=seconds - 1)
    simulated.settle()
    assert simulated.inspection["spec"]["hostName"] == "studio-1"
    simulated.now += timedelta(seconds=1)
    simulated.step()
    assert simulated.condition("Ready").reason == "HostSilent"
    simulated.settle()
    assert [each["spec"]["hostName"] for each in simulated.processes.values()] == ["studio-2"]


def test_least_loaded_host_is_asked_first() -> None:
    simulated = SimulatedModel(**METAL)
    simulated.hosts = {"a": InspectingHost(is_live=True, load=2), "b": LIVE, "c": InspectingHost(is_live=False)}
    simulated.settle()
    assert simulated.inspection["spec"]["hostName"] == "b"


def test_report_about_an_earlier_edit_is_not_used() -> None:
    simulated = make_host_model()
    first = simulated.inspection["metadata"]["name"]
    simulated.report(phase="Stopped", inspection=REPORT | {"file": "other.gguf"})
    simulated.edit(source="http://models.example/other.gguf")
    simulated.settle()
    assert simulated.model.status.revision == ""
    assert simulated.inspection["metadata"]["name"] != first
    assert len(simulated.processes) == 1


def test_edit_is_inspected_by_a_host_again() -> None:
    simulated = make_reported()
    simulated.edit(domains=["code"])
    simulated.settle()
    simulated.report(phase="Stopped", inspection=REPORT | {"revision": '"etag-2"'})
    simulated.settle()
    assert simulated.model.status.revision == '"etag-2"'
    assert simulated.processes == {}


def test_moving_source_is_checked_by_a_host() -> None:
    simulated = make_reported(refresh_policy="OnChange")
    simulated.now += timedelta(seconds=refresh.wait_seconds(simulated.model, simulated.now))
    simulated.settle()
    simulated.report(phase="Stopped", inspection=REPORT | {"revision": '"etag-2"'})
    simulated.settle()
    assert simulated.condition("Refreshed").reason == "RevisionChanged"
    assert simulated.model.status.revision == '"etag-2"'
    assert simulated.processes == {}


def test_without_a_live_host_the_job_inspects() -> None:
    simulated = SimulatedModel(**METAL)
    simulated.hosts = {"studio-1": LOST}
    simulated.settle()
    simulated.end("inspect", 0, INSPECTED)
    simulated.hosts = {"studio-1": LIVE}
    simulated.settle()
    assert (simulated.model.status.revision, simulated.model.status.inspected_by) == ('"etag-1"', "")
    assert simulated.processes == {}


def test_host_that_becomes_live_takes_over_from_a_job_whose_image_is_out_of_reach() -> None:
    simulated = SimulatedModel(**METAL)
    simulated.settle()
    waiting = {"state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}}
    uid = simulated.job("inspect")["metadata"]["uid"]
    simulated.pods[uid] = [pod({}) | {"status": {"containerStatuses": [waiting]}}]
    simulated.settle()
    assert simulated.condition("Ready").reason == "ImagePullBackOff"
    simulated.hosts = {"studio-1": LIVE}
    simulated.settle()
    assert (simulated.jobs, simulated.inspection["spec"]["hostName"]) == ({}, "studio-1")


def test_without_a_live_host_and_an_image_the_condition_names_both_ways_out() -> None:
    simulated = SimulatedModel(**METAL)
    simulated.image = ""
    simulated.settle()
    condition = simulated.condition("Ready")
    assert (condition.reason, simulated.model.status.phase, simulated.made) == ("NoImage", "Failed", [])
    assert "no live host that serves namespace team" in condition.message
    assert "start `pomona agent`" in condition.message
    assert "--image" in condition.message
    simulated.hosts = {"studio-1": LIVE}
    simulated.settle()
    assert simulated.inspection["spec"]["hostName"] == "studio-1"


def test_pods_wait_for_a_job_and_not_for_the_report_of_a_host() -> None:
    simulated = make_reported(image="pomona:test")
    simulated.add_consumer()
    simulated.settle()
    assert simulated.job("inspect")
    assert (simulated.condition("Ready").status, simulated.condition("Cached").reason) == ("True", "Inspecting")
    assert simulated.claims == {}, "nothing is fetched by what a host said"
    simulated.end("inspect", 0, INSPECTED | {"revision": '"etag-0"'})
    simulated.settle()
    assert (simulated.model.status.revision, simulated.model.status.inspected_by) == ('"etag-0"', "")
    assert simulated.job("fetch")


def test_pods_get_no_weights_on_a_volume_with_the_dimensions_that_a_host_reported() -> None:
    simulated = make_cached(refresh_policy="OnChange", **METAL)
    simulated.consumers.clear()
    simulated.hosts = {"studio-1": LIVE}
    simulated.settle()
    simulated.now += timedelta(seconds=refresh.wait_seconds(simulated.model, simulated.now))
    simulated.settle()
    simulated.report(phase="Stopped", inspection=REPORT | {"revision": '"thief"', "layout": LAYOUT})
    simulated.settle()
    assert (simulated.model.status.inspected_by, simulated.condition("Cached").status) == ("studio-1", "True")
    simulated.add_consumer()
    simulated.settle()
    assert (simulated.condition("Cached").status, simulated.condition("Cached").reason) == ("False", "Inspecting")
    assert simulated.claim, "the weights that a Job has verified stay"
    simulated.end("inspect", 0, INSPECTED)
    simulated.settle()
    assert (simulated.condition("Cached").status, simulated.model.status.layout) == ("True", None)


def test_pods_of_a_controller_without_an_image_leave_hosts_served() -> None:
    simulated = make_reported()
    simulated.add_consumer()
    simulated.settle()
    assert (simulated.condition("Ready").status, simulated.condition("Cached").reason) == ("True", "NoImage")
    assert (simulated.model.status.revision, simulated.model.status.phase) == ('"etag-1"', "Failed")
    simulated.consumers.clear()
    simulated.settle()
    assert (simulated.model.status.phase, simulated.condition("Cached").reason) == ("Ready", "NoConsumers")


def test_inspected_model_of_hosts_keeps_its_facts_after_an_edit() -> None:
    simulated = make_inspected()
    simulated.edit(**METAL)
    simulated.settle()
    assert simulated.made[1:] == []
    assert simulated.model.status.revision == '"etag-1"'


def test_mirror_that_was_read_has_no_revision() -> None:
    simulated = make_host_model(sha256=SHA, mirrors=["http://mirror.example/tiny.gguf"])
    assert simulated.inspection["spec"]["artifact"]["mirrors"] == ["http://mirror.example/tiny.gguf"]
    simulated.report(phase="Stopped", inspection=REPORT | {"revision": ""})
    simulated.settle()
    assert (simulated.model.status.revision, simulated.model.status.sha256) == ("", SHA)


def test_copies_on_nodes_wait_for_a_job_too() -> None:
    simulated = SimulatedCopies({"a": 1})
    live = host()
    simulated.put(METAL_HOSTS, "studio-1", namespace="", status=live["status"])
    cache = {"scope": "node", "storageClassName": "local"}
    spec = {"source": "http://models.example/tiny.gguf", "cache": cache, "hardware": {"accelerator": "metal"}}
    simulated.put(MODELS, "tiny", spec=spec)
    simulated.settle()
    (asked,) = simulated.store.list(METAL_PROCESSES)
    reported = {"phase": "Stopped", "inspection": REPORT}
    simulated.put(METAL_PROCESSES, asked["metadata"]["name"], **{**asked, "status": reported})
    simulated.settle()
    assert simulated.model().status.inspected_by == "studio-1"
    assert simulated.store.list(METAL_PROCESSES) == []

    simulated.make_service()
    assert (simulated.claims(), simulated.condition("Ready").status) == ({}, "True")
    (job,) = simulated.jobs("inspect")
    simulated.end(job, 0, INSPECTED | {"revision": '"etag-0"'})
    simulated.settle()
    assert (simulated.model().status.inspected_by, simulated.model().status.revision) == ("", '"etag-0"')
    assert len(simulated.claims()) == 1
