"""The Job of a benchmark is a replica at the lowest priority, and what it states is no result."""

from datetime import timedelta
from typing import Any

import pytest

from controller.benchmarks.benchmark_job import (
    DEADLINE_SECONDS,
    START_SECONDS,
    BenchmarkKey,
    build_benchmark_job,
    digest_inputs,
    digest_start,
    read_benchmark,
)
from controller.models.jobs import JobOutcome
from controller.models.served import Served
from controller.pod_settings import PodSettings
from controller.services.checked_replica import check_replica
from controller.services.endpoints import Endpoint
from controller.services.pods.deployment import mounted_weights
from controller.services.pods.pod_template import EngineChoice, build_pod
from kube.client import Obj
from tests.support.api_objects import NOW, as_model, as_service, model, service, store

SETTINGS = PodSettings("pomona:test", image_pull_secrets=("registry",))


def prepare(of: Obj | None = None, **spec: Any) -> tuple[Any, Served, EngineChoice]:
    chat = as_service(service(**({"hardware": {"accelerator": "nvidia"}} | spec)))
    replica = check_replica(store(), chat, as_model(of or model()), (), SETTINGS)
    assert replica.checked.served is not None
    assert replica.choice is not None
    return chat, replica.checked.served, replica.choice


def build(**spec: Any) -> Obj:
    return build_benchmark_job(*prepare(**spec), SETTINGS, node="n1", digest="0123456789")


def stored(**more: Any) -> Obj:
    """Return the Job as it is in the store."""
    job = build()
    job["metadata"] |= {"uid": "uid-job", "creationTimestamp": NOW.isoformat()}
    return job | more


def pod(engine: Obj | None = None, **status: Any) -> Obj:
    """Return the pod of the Job as the watch cache has it, with the state of its engine, and further parts."""
    engine = engine if engine is not None else {"state": {"running": {}}}
    return {
        "metadata": {"name": "p", "creationTimestamp": NOW.isoformat()},
        "spec": {"nodeName": "n1"},
        "status": {"containerStatuses": [{"name": "llama-server", **engine}], **status},
    }


def read(*pods: Obj, seconds: float = 0.0) -> JobOutcome:
    """Return how a Job that has no pod to measure stands after some time."""
    outcome = read_benchmark(stored(), pods, NOW + timedelta(seconds=seconds))
    assert isinstance(outcome, JobOutcome)
    return outcome


def test_pod_is_that_of_a_replica() -> None:
    chat, served, choice = prepare()
    spec = build()["spec"]["template"]["spec"]
    replica = build_pod(chat, choice, mounted_weights(served.model), settings=SETTINGS)
    assert spec["initContainers"] == replica["initContainers"]
    (made,), (proxy,) = spec["containers"], replica["containers"]
    assert made == {name: value for name, value in proxy.items() if name not in {"livenessProbe", "lifecycle"}}
    assert spec["restartPolicy"] == "Never"


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
    assert all(term["matchFields"][-1]["values"] == ["n1"] for term in terms)


def test_one_key_of_the_secret_with_the_token_is_mounted() -> None:
    spec = build()["spec"]["template"]["spec"]
    (token,) = (volume for volume in spec["volumes"] if volume["name"] == "token")
    assert token["secret"]["items"] == [{"key": "token", "path": "token"}]


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


def test_pod_is_measured_once_it_is_ready() -> None:
    ready = [{"type": "Ready", "status": "True"}]
    assert read(pod(podIPs=[{"ip": "10.0.0.9"}])).state == "Going"
    endpoint = read_benchmark(stored(), [pod(podIPs=[{"ip": "10.0.0.9"}], conditions=ready)], NOW)
    assert endpoint == Endpoint("10.0.0.9", 8080, node="n1")


@pytest.mark.parametrize("state", ["state", "lastState"])
def test_engine_that_has_ended_has_no_hope(state: str) -> None:
    outcome = read(pod({state: {"terminated": {"exitCode": 1, "message": "out of memory\n"}}}))
    assert (outcome.state, outcome.reason) == ("Broken", "EngineFailed")
    assert outcome.message == "container llama-server ended with exit code 1: out of memory"


def test_pod_that_no_node_takes_has_no_hope_after_some_time() -> None:
    refused = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes"}
    waiting = pod({"state": {}}, conditions=[refused])
    assert read(waiting).state == "Going"
    late = read(waiting, seconds=START_SECONDS + 1)
    assert (late.state, late.reason, late.message) == ("Broken", "Unschedulable", "0/1 nodes")


def test_job_whose_pod_is_refused_has_no_hope_after_some_time() -> None:
    """A quota, a LimitRange or a webhook refuses it, or a tenant has suspended the Job."""
    assert read(seconds=START_SECONDS).state == "Going"
    late = read(seconds=START_SECONDS + 1)
    assert (late.state, late.reason) == ("Broken", "FailedCreate")
    assert "kubectl -n team describe job" in late.message


@pytest.mark.parametrize("pods", [(), (pod(),)])
def test_job_that_is_never_ready_is_hopeless(pods: tuple[Obj, ...]) -> None:
    assert read(pod(), seconds=DEADLINE_SECONDS).state == "Going"
    assert read(*pods, seconds=DEADLINE_SECONDS + 1).reason == "DeadlineExceeded"
    failed = stored(status={"conditions": [{"type": "Failed", "status": "True"}]})
    outcome = read_benchmark(failed, pods, NOW)
    assert isinstance(outcome, JobOutcome)
    assert outcome.reason == "DeadlineExceeded"
