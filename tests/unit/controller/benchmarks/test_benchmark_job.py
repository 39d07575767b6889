"""The Job of a benchmark is a replica at the lowest priority, and only what it really measured is a result."""

from datetime import datetime, timedelta
from typing import Any

import pytest

from controller.benchmarks.benchmark_job import (
    CONTAINER,
    LONGEST_SECONDS,
    START_SECONDS,
    BenchmarkKey,
    MeasuredEngine,
    build_benchmark_job,
    digest_inputs,
    digest_start,
    read_benchmark,
)
from controller.benchmarks.benchmark_plan import BenchmarkFailure
from controller.models.jobs import LOST_SECONDS, JobOutcome
from controller.models.served import Served
from controller.pod_settings import PodSettings
from controller.services.checked_replica import check_replica
from controller.services.pods.pod_template import EngineChoice, build_pod
from fitness.performance import MeasuredPerformance
from kube.client import Obj
from tests.support.api_objects import NOW, as_model, as_service, library_model, model, service, store

SETTINGS = PodSettings("pomona:test", image_pull_secrets=("registry",))
ENGINE = MeasuredEngine("tiny", "llama.cpp", "engine:1", "nvidia", None)
RESULT = b'{"tokensPerSecond": 52.1, "runs": [52.1], "source": "live", "node": "lie", "runtime": "lie", "model": "lie"}'


def prepare(of: Obj | None = None, **spec: Any) -> tuple[Any, Served, EngineChoice]:
    chat = as_service(service(**({"hardware": {"accelerator": "nvidia"}} | spec)))
    found = check_replica(store(), chat, as_model(of or model()), (), SETTINGS)
    assert found.checked.served is not None
    assert found.choice is not None
    return chat, found.checked.served, found.choice


def build(**spec: Any) -> Obj:
    return build_benchmark_job(*prepare(**spec), SETTINGS, node="n1", digest="0123456789")


def stored(**more: Any) -> Obj:
    """Return the Job as it is in the store."""
    job = build()
    job["metadata"] |= {"uid": "uid-job", "creationTimestamp": NOW.isoformat()}
    return job | more


def ended(kind: str, reason: str = "", seconds_ago: float = 0.0) -> Obj:
    when = (NOW - timedelta(seconds=seconds_ago)).isoformat()
    condition = {"type": kind, "status": "True", "reason": reason, "message": "so it is", "lastTransitionTime": when}
    return {"status": {"conditions": [condition]}}


def pod(bench: Obj, engine: Obj | None = None, **status: Any) -> Obj:
    engine = engine or {"state": {"running": {"startedAt": "2026-11-21T12:00:00Z"}}}
    states = [{"name": "llama-server", **engine}, {"name": CONTAINER, **bench}]
    return {
        "metadata": {"name": "p", "creationTimestamp": NOW.isoformat()},
        "spec": {"nodeName": "n1"},
        "status": {"containerStatuses": states, **status},
    }


def over(message: bytes | str, code: int = 0) -> Obj:
    text = message if isinstance(message, str) else message.decode()
    times = {"startedAt": "2026-11-21T12:00:42Z", "finishedAt": "2026-11-21T12:01:00Z"}
    return {"state": {"terminated": {"exitCode": code, "message": text, **times}}}


def read(job: Obj, *pods: Obj, now: datetime = NOW) -> JobOutcome:
    """Return how a Job without a measurement stands."""
    found = read_benchmark(job, pods, ENGINE, now)
    assert isinstance(found, JobOutcome)
    return found


def test_pod_is_that_of_a_replica_with_its_engine_as_sidecar() -> None:
    chat, served, choice = prepare()
    job = build_benchmark_job(chat, served, choice, SETTINGS, node="n1", digest="0123456789")
    sidecars = job["spec"]["template"]["spec"]["initContainers"]
    replica = build_pod(chat, choice, _weights(served), settings=SETTINGS)
    alike = ("name", "image", "args", "resources", "securityContext", "volumeMounts")
    for sidecar, container in zip(sidecars, (*replica["initContainers"], *replica["containers"]), strict=True):
        assert {name: sidecar[name] for name in alike} == {name: container[name] for name in alike}
        assert sidecar["restartPolicy"] == "Always"
        assert not {"ports", "readinessProbe", "livenessProbe", "lifecycle"} & sidecar.keys()
    assert sidecars[-1]["startupProbe"]["httpGet"] == {"path": "/health", "port": 8080}


def _weights(served: Served) -> Any:
    from controller.services.pods.deployment import mounted_weights  # noqa: PLC0415 - for one test

    return mounted_weights(served.model)


def test_pod_has_the_lowest_priority_and_serves_nobody() -> None:
    job = build()
    template = job["spec"]["template"]
    spec = template["spec"]
    assert spec["priorityClassName"] == "pomona-batch"
    assert spec["terminationGracePeriodSeconds"] <= 5
    assert spec["automountServiceAccountToken"] is False
    assert "inference.pomona.dev/service" not in template["metadata"]["labels"]
    assert (job["spec"]["backoffLimit"], job["spec"]["activeDeadlineSeconds"]) == (0, 3600)
    assert spec["imagePullSecrets"] == [{"name": "registry"}]
    terms = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert all(each["matchFields"][-1]["values"] == ["n1"] for each in terms)


def test_token_is_a_file_and_no_argument() -> None:
    spec = build()["spec"]["template"]["spec"]
    (token,) = (each for each in spec["volumes"] if each["name"] == "token")
    assert token["secret"]["items"] == [{"key": "token", "path": "token"}]
    (bench,) = spec["containers"]
    assert bench["args"][bench["args"].index("--token-file") + 1].endswith("/token")
    assert [each["name"] for each in bench["volumeMounts"]] == ["token"]


def test_extent_is_that_of_the_service_within_its_context() -> None:
    (bench,) = build(parallel=4, benchmark={"runs": 9, "warmupIterations": 0, "minDuration": "30s"})["spec"][
        "template"
    ]["spec"]["containers"]
    text = " ".join(bench["args"])
    assert "--parallel 4 --warmup 0 --runs 9 --min-duration 30s --prompt-tokens 128 --tokens 128" in text
    (short,) = build(contextLength=128)["spec"]["template"]["spec"]["containers"]
    assert "--prompt-tokens 32 --tokens 64" in " ".join(short["args"])


def test_engine_behind_the_proxy_is_measured_once_the_proxy_is_up() -> None:
    job = build_benchmark_job(*prepare(library_model(), runtime="ollama"), SETTINGS, node="n1", digest="0123456789")
    engine, proxy = job["spec"]["template"]["spec"]["initContainers"]
    assert (engine["name"], proxy["name"]) == ("ollama", "proxy")
    assert proxy["restartPolicy"] == engine["restartPolicy"] == "Always"
    assert proxy["startupProbe"]["httpGet"] == {"path": "/health", "port": 8080}
    assert proxy["startupProbe"]["failureThreshold"] >= 1800


def test_tries_have_names_of_their_own() -> None:
    key = BenchmarkKey("team", "3f9a0c51d2e84b77", "nvidia-l4x1")
    digests = [digest_start(key, "1", 0), digest_start(key, "1", 1), digest_start(key, "2", 0)]
    names = {
        build_benchmark_job(*prepare(), SETTINGS, node="n1", digest=digest)["metadata"]["name"] for digest in digests
    }
    assert len(names) == 3
    assert all(len(name) <= 63 for name in names)


def test_edit_of_what_is_measured_is_another_measurement() -> None:
    def digest(**spec: Any) -> str:
        chat, _, choice = prepare(**spec)
        return digest_inputs(chat, choice, SETTINGS)

    assert digest() == digest(replicas=3, priority="high", nodeSelector={"a": "b"})
    changed = [
        digest(parallel=2),
        digest(benchmark={"runs": 9}),
        digest(hardware={"accelerator": "nvidia", "count": 2}),
    ]
    assert len({digest(), *changed}) == 4


def test_result_is_what_was_measured_and_where_it_really_was() -> None:
    expected = MeasuredPerformance(
        tokens_per_second=52.1,
        runs=[52.1],
        load_seconds=42,
        model="tiny",
        runtime="llama.cpp",
        image="engine:1",
        node="n1",
        measured_at="2026-11-21T12:01:00Z",
        accelerator="nvidia",
        source="job",
    )
    assert read_benchmark(stored(**ended("Complete")), [pod(over(RESULT))], ENGINE, NOW) == expected


@pytest.mark.parametrize(
    "message", ["", "{", "[]", '{"x": ' + "[" * 4000, '{"tokensPerSecond": 0}', '{"tokensPerSecond": 1e15}', "{}"]
)
def test_result_that_is_no_measurement_is_a_failure(message: str) -> None:
    found = read(stored(**ended("Complete")), pod(over(message)))
    assert (found.state, found.reason) == ("Broken", "ResultUnreadable")


def test_failure_has_the_reason_of_the_measurement() -> None:
    said = '{"reason": "BrokenOff", "message": "the engine died", "retryable": true}'
    found = read(stored(**ended("Failed")), pod(over(said, 1)))
    assert (found.state, found.reason, found.message) == ("Broken", "BrokenOff", "the engine died")
    assert read(stored(**ended("Failed")), pod(over(said, 2))).state == "Failed"


def test_pod_that_vanished_with_its_device_is_a_failure_once_no_result_can_come() -> None:
    early = read(stored(**ended("Failed", "BackoffLimitExceeded")))
    assert early.state == "Going"
    late = read(stored(**ended("Failed", "BackoffLimitExceeded", LOST_SECONDS + 1)))
    assert (late.state, late.reason) == ("Broken", "ResultLost")


def test_engine_that_ends_again_and_again_has_no_hope() -> None:
    crashed = {"state": {"waiting": {}}, "lastState": {"terminated": {"exitCode": 1, "message": "out of memory\n"}}}
    found = read(stored(), pod({"state": {"waiting": {"reason": "PodInitializing"}}}, crashed))
    assert (found.state, found.reason) == ("Broken", "EngineFailed")
    assert found.message == "the engine ended with exit code 1: out of memory"
    assert read(stored(), pod({"state": {"running": {}}})).state == "Going"


def test_pod_that_no_node_takes_has_no_hope_after_some_time() -> None:
    refused = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes"}
    waiting = pod({}, {"state": {}}, conditions=[refused])
    assert read(stored(), waiting).state == "Going"
    late = read(stored(), waiting, now=NOW + timedelta(seconds=START_SECONDS + 1))
    assert (late.reason, late.message) == ("Unschedulable", "0/1 nodes")


def test_job_that_never_ends_is_hopeless() -> None:
    """A tenant has lengthened the time that Kubernetes gives it."""
    runs = pod({"state": {"running": {}}})
    assert read(stored(), runs, now=NOW + timedelta(seconds=LONGEST_SECONDS)).state == "Going"
    late = read(stored(), runs, now=NOW + timedelta(seconds=LONGEST_SECONDS + 1))
    assert late.reason == "DeadlineExceeded"


def test_job_whose_pod_is_refused_has_no_hope_after_some_time() -> None:
    """A quota, a LimitRange or a webhook refuses it, or a tenant has suspended the Job."""
    assert read(stored(), now=NOW + timedelta(seconds=START_SECONDS)).state == "Going"
    late = read(stored(), now=NOW + timedelta(seconds=START_SECONDS + 1))
    assert late.reason == "FailedCreate"
    assert "kubectl -n team describe job" in late.message


FORGED = (
    (ended("Complete", seconds_ago=0.0), "9999-12-31T23:59:59Z", ()),
    (ended("Complete"), NOW.isoformat(), ({"name": CONTAINER, **over(RESULT)},) * 2),
    (ended("Complete"), NOW.isoformat(), ({"name": CONTAINER, **over(RESULT)}, {"name": CONTAINER, "state": {}})),
)


@pytest.mark.parametrize(("status", "when", "states"), FORGED)
def test_status_that_a_tenant_has_forged_ends_no_round(status: Obj, when: str, states: tuple[Obj, ...]) -> None:
    (condition,) = status["status"]["conditions"]
    job = stored(status={"conditions": [condition | {"lastTransitionTime": when}]})
    pods = [pod(over(RESULT)) | {"status": {"containerStatuses": list(states)}}] if states else []
    found = read_benchmark(job, pods, ENGINE, NOW)
    if isinstance(found, JobOutcome):
        BenchmarkFailure("1", 1, found).find_wait(NOW)
