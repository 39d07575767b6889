"""The Job of a benchmark: the pod of a replica with its engine as a sidecar, and `pomona bench` beside it.

The pod is that of a replica, so what is measured is what serves. It has another label and the lowest priority, and the
controller ends it when anything waits for its devices. Its result is the termination message of `pomona bench`, and
the controller alone writes it into the store: a pod has no right to do that.
"""

import hashlib
from collections.abc import Sequence
from datetime import datetime
from typing import Final, NamedTuple

import msgspec

from controller.models import jobs
from controller.models.job_pods import FAILED_CREATE
from controller.models.jobs import CONTAINER_SECURITY, TERMINATION_LOG, JobOutcome, keep_literal
from controller.models.served import Served
from controller.pod_settings import PodSettings
from controller.reconcile.plan import child
from controller.services.pods.deployment import mounted_weights
from controller.services.pods.one_node import label_claims
from controller.services.pods.pod_options import pin_to_node
from controller.services.pods.pod_proxy import TOKEN_DIRECTORY, TOKEN_MOUNT
from controller.services.pods.pod_template import EngineChoice, build_pod
from controller.services.tokens import TOKEN_KEY
from crds.inferenceservice import InferenceService
from crds.meta import LABEL_MANAGED_BY, LABEL_MODEL, MANAGED_BY
from crds.performance import BenchmarkOptions
from fitness.performance import MeasuredPerformance
from fitness.performance_store import LABEL_BENCHMARK
from kube.client import Obj
from kube.resources import JOBS, MODELS
from runtimes.pod import SERVICE_PORT

CONTAINER: Final = "bench"
PRIORITY_CLASS: Final = "pomona-batch"
DEADLINE_SECONDS: Final = 3600
"""Time for the start of the engine, its load and the measurement."""
LONGEST_SECONDS: Final = DEADLINE_SECONDS + 300
"""Age at which a Job is ended that Kubernetes has not ended."""
START_SECONDS: Final = 300.0
"""Time in which a pod that the scheduler refuses, or whose image is not pulled, may yet start."""
MEASURE_SECONDS: Final = 300
_PROMPT_TOKENS: Final = 128
_TOKENS: Final = 128
_GRACE_SECONDS: Final = 5
_PROBE_SECONDS: Final = 2
_OF_SERVICE: Final = frozenset({"ports", "readinessProbe", "livenessProbe", "lifecycle"})
"""Fields of a container that takes requests from others."""


class BenchmarkKey(NamedTuple):
    """A model on a device class, and the namespace for which it is measured."""

    namespace: str
    model_hash: str
    device_class: str


class MeasuredEngine(NamedTuple):
    """The facts about a measurement that it does not state itself, with the names of a record's fields."""

    model: str
    """Name of the Model."""
    runtime: str
    image: str
    accelerator: str
    estimated_tokens_per_second: float | None
    """The estimate without corrections; None: unknown."""


def build_benchmark_pod(
    service: InferenceService, served: Served, choice: EngineChoice, settings: PodSettings, node: str = ""
) -> Obj:
    """Return the spec of the pod; without a node, that by which one is looked for."""
    weights = mounted_weights(served.model)
    pod = build_pod(service, choice, weights, settings=settings)
    if node:
        pod = pin_to_node(pod, node)
    sidecars = [_as_sidecar(each) for each in (*pod.get("initContainers", ()), *pod["containers"])]
    secrets = [*(each["name"] for each in pod.get("imagePullSecrets", ())), *settings.image_pull_secrets]
    return pod | {
        "restartPolicy": "Never",
        "priorityClassName": PRIORITY_CLASS,
        "terminationGracePeriodSeconds": _GRACE_SECONDS,
        "initContainers": sidecars,
        "containers": [_build_container(service, settings)],
        # The policy of the controller lets a Job mount these keys of a Secret only.
        "volumes": [_mount_key(each) for each in pod["volumes"]],
        **({"imagePullSecrets": [{"name": name} for name in dict.fromkeys(secrets)]} if secrets else {}),
    }


def build_benchmark_job(
    service: InferenceService, served: Served, choice: EngineChoice, settings: PodSettings, *, node: str, digest: str
) -> Obj:
    """Return the Job of a benchmark on a node; `digest` tells its name from those of others."""
    owner = served.model.metadata
    weights = mounted_weights(served.model)
    claims = label_claims({weights.claim: weights.mark}) if weights.claim and weights.has_one_node else {}
    labels = {LABEL_BENCHMARK: "true", LABEL_MODEL: owner.name}
    pod = build_benchmark_pod(service, served, choice, settings, node)
    spec: Obj = {
        # One pod is one attempt: the controller retries, so that a condition of the service has the reason.
        "backoffLimit": 0,
        "activeDeadlineSeconds": DEADLINE_SECONDS,
        "template": {"metadata": {"labels": {LABEL_MANAGED_BY: MANAGED_BY, **labels, **claims}}, "spec": pod},
    }
    _, job = child(JOBS, f"{owner.name[:40]}-bench-{digest[:10]}", MODELS, owner, labels, spec=spec)
    return job


def digest_start(key: BenchmarkKey, inputs: str, tries: int) -> str:
    """Return the digest by which the Jobs of two tries have names of their own."""
    return hashlib.sha256(msgspec.json.encode([*key, inputs, tries])).hexdigest()


def digest_inputs(service: InferenceService, choice: EngineChoice, settings: PodSettings) -> str:
    """Return the digest of what makes another measurement of the same model worth while after one has failed."""
    spec = service.spec
    inputs = [spec.benchmark, spec.parallel, spec.context_length, spec.resources]
    facts = [*inputs, spec.hardware, choice.runtime, settings.image, service.metadata.uid]
    return hashlib.sha256(msgspec.json.encode(facts)).hexdigest()[:16]


def read_benchmark(
    job: Obj, pods: Sequence[Obj], engine: MeasuredEngine, now: datetime
) -> MeasuredPerformance | JobOutcome:
    """Return the measurement of a Job; if there is none yet, how the Job stands, which may go on without hope."""
    outcome = _read_outcome(job, pods, now)
    if outcome.state == "Going":
        return _find_trouble(job, pods, outcome, now) or outcome
    return _read_record(pods, outcome, engine, now) if outcome.state == "Succeeded" else outcome


def _read_outcome(job: Obj, pods: Sequence[Obj], now: datetime) -> JobOutcome:
    own = [{**pod, "status": {**pod.get("status", {}), "containerStatuses": _list_states(pod)}} for pod in pods]
    return jobs.read(job, own, now)


def _find_trouble(job: Obj, pods: Sequence[Obj], outcome: JobOutcome, now: datetime) -> JobOutcome | None:
    """Return how a Job that goes on fails: its engine ends again and again, or its pod does not start."""
    for pod in pods:
        for container in pod.get("status", {}).get("containerStatuses", ()):
            ended = container.get("lastState", {}).get("terminated")
            if container["name"] != CONTAINER and ended is not None:
                said = (ended.get("message") or "").strip()[-500:]
                message = f"the engine ended with exit code {ended['exitCode']}: {said or ended.get('reason', '')}"
                return JobOutcome(state="Broken", reason="EngineFailed", message=message, ended=now)
    age_seconds = (now - datetime.fromisoformat(job["metadata"]["creationTimestamp"])).total_seconds()
    if not pods and age_seconds > START_SECONDS:
        # The Events about the Job have the words of the API server: a quota, a LimitRange or a webhook refuses it.
        name, namespace = job["metadata"]["name"], job["metadata"]["namespace"]
        message = f"its pod was not created: see: kubectl -n {namespace} describe job {name}"
        return JobOutcome(state="Broken", reason=FAILED_CREATE, message=message, ended=now)
    if outcome.reason and age_seconds > START_SECONDS:
        return msgspec.structs.replace(outcome, state="Broken", ended=now)
    if age_seconds > LONGEST_SECONDS:
        # A tenant can suspend the Job, or lengthen the time that Kubernetes gives it.
        message = f"it has not ended after {LONGEST_SECONDS // 60} minutes"
        return JobOutcome(state="Broken", reason="DeadlineExceeded", message=message, ended=now)
    return None


def _list_states(pod: Obj) -> list[Obj]:
    statuses: list[Obj] = pod.get("status", {}).get("containerStatuses", [])
    return [each for each in statuses if each["name"] == CONTAINER]


def _read_record(
    pods: Sequence[Obj], outcome: JobOutcome, engine: MeasuredEngine, now: datetime
) -> MeasuredPerformance | JobOutcome:
    """Return the measurement of a Job that has succeeded, or that it is none."""
    pod = max(pods, key=lambda pod: pod["metadata"]["creationTimestamp"])
    # Whoever may write the status of a pod can state a container twice; the outcome is that of the first.
    state = _list_states(pod)[0]["state"]["terminated"]
    try:
        record = msgspec.json.decode(state["message"], type=MeasuredPerformance)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        message = f"the result of the Job is no measurement: {error}"
        return msgspec.structs.replace(outcome, state="Broken", reason="ResultUnreadable", message=message)
    return msgspec.structs.replace(
        record,
        **engine._asdict(),
        load_seconds=_find_load_seconds(pod, state),
        node=pod.get("spec", {}).get("nodeName", ""),
        source="job",
        measured_at=state.get("finishedAt") or now.isoformat(),
    )


def _find_load_seconds(pod: Obj, state: Obj) -> float | None:
    """Return the time from the start of the engine to that of the measurement, which begins once it is loaded."""
    for container in pod["status"]["containerStatuses"]:
        running = container.get("state", {}).get("running") or container.get("state", {}).get("terminated")
        if container["name"] != CONTAINER and running and running.get("startedAt") and state.get("startedAt"):
            begun, loaded = (datetime.fromisoformat(each["startedAt"]) for each in (running, state))
            return max(0.0, (loaded - begun).total_seconds())
    return None


def _as_sidecar(container: Obj) -> Obj:
    """Return a container of a replica as a sidecar, after whose start the next container is started."""
    sidecar = {name: value for name, value in container.items() if name not in _OF_SERVICE}
    if probe := container.get("readinessProbe"):
        asked = {**probe["httpGet"], "port": SERVICE_PORT}
        sidecar["startupProbe"] = {**probe, "httpGet": asked, "failureThreshold": DEADLINE_SECONDS // _PROBE_SECONDS}
    return sidecar | {"restartPolicy": "Always"}


def _mount_key(volume: Obj) -> Obj:
    if volume["name"] != "token":
        return volume
    return {**volume, "secret": {**volume["secret"], "items": [{"key": TOKEN_KEY, "path": TOKEN_KEY}]}}


def _build_container(service: InferenceService, settings: PodSettings) -> Obj:
    spec, options = service.spec, service.spec.benchmark or BenchmarkOptions()
    arguments = ["bench", f"http://127.0.0.1:{SERVICE_PORT}", "--model", service.metadata.name]
    arguments += ["--token-file", f"{TOKEN_DIRECTORY}/{TOKEN_KEY}", "--parallel", str(spec.parallel)]
    arguments += ["--warmup", str(options.warmup_iterations), "--runs", str(options.runs)]
    arguments += ["--min-duration", options.min_duration] if options.min_duration else []
    arguments += ["--prompt-tokens", str(min(_PROMPT_TOKENS, spec.context_length // 4))]
    arguments += ["--tokens", str(min(_TOKENS, spec.context_length // 2)), "--max-duration", f"{MEASURE_SECONDS}s"]
    return {
        "name": CONTAINER,
        "image": settings.image,
        "args": keep_literal([*arguments, "--result", TERMINATION_LOG]),
        "terminationMessagePath": TERMINATION_LOG,
        "terminationMessagePolicy": "File",
        "securityContext": CONTAINER_SECURITY,
        "resources": {"requests": {"cpu": "50m", "memory": "96Mi"}, "limits": {"memory": "256Mi"}},
        "volumeMounts": [TOKEN_MOUNT],
    }
