"""The Job of a benchmark: the pod of a replica, which the controller asks once its engine is ready.

The pod is that of a replica, so what is measured is what serves. It has another label and the lowest priority, and the
controller ends it once it is measured, or when a unit is admitted to its node. Nothing that the pod or the Job states
is a result: the controller measures by its own clock.
"""

import hashlib
from collections.abc import Sequence
from datetime import datetime
from typing import Final, NamedTuple

import msgspec

from controller.models import jobs
from controller.models.job_pods import FAILED_CREATE
from controller.models.jobs import JobOutcome
from controller.models.served import Served
from controller.pod_settings import PodSettings
from controller.reconcile.plan import child
from controller.services.endpoints import Endpoint
from controller.services.pods.deployment import mounted_weights
from controller.services.pods.observed_deployments import is_ready
from controller.services.pods.one_node import label_claims
from controller.services.pods.pod_options import pin_to_node
from controller.services.pods.pod_template import EngineChoice, build_pod
from controller.services.tokens import TOKEN_KEY
from crds.inferenceservice import InferenceService
from crds.meta import LABEL_MANAGED_BY, LABEL_MODEL, MANAGED_BY
from fitness.performance_store import LABEL_BENCHMARK
from kube.client import Obj
from kube.resources import JOBS, MODELS
from runtimes.pod import SERVICE_PORT

PRIORITY_CLASS: Final = "pomona-batch"
DEADLINE_SECONDS: Final = 3600
"""Time for the start of the engine, its load and the measurement."""
START_SECONDS: Final = 300.0
"""Time in which a pod that the scheduler refuses, or whose image is not pulled, may yet start."""
_GRACE_SECONDS: Final = 5
_REPLICA_ONLY_FIELDS: Final = frozenset({"livenessProbe", "lifecycle"})
"""Fields of the proxy's container that keep a replica from harm, and that a benchmark does without."""


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
    """Return the spec of the pod: that of a replica, changed so that it runs once and gives way to everything else.

    It is pinned to `node`. Without one, it is the spec by which nodes with room for it are looked for.
    """
    # The spec of a replica, which keeps no compiled code: that would take time from the measurement.
    pod = build_pod(service, choice, mounted_weights(served.model)._replace(is_ours=False), settings=settings)
    if node:
        pod = pin_to_node(pod, node)

    # The same spec with other values of these fields.
    return pod | {
        "restartPolicy": "Never",
        # The lowest priority, and a short time to end: it gives way.
        "priorityClassName": PRIORITY_CLASS,
        "terminationGracePeriodSeconds": _GRACE_SECONDS,
        # Without the livenessProbe and the lifecycle (a pause before the end) of a replica: nobody else uses this pod.
        "containers": [
            {name: value for name, value in container.items() if name not in _REPLICA_ONLY_FIELDS}
            for container in pod["containers"]
        ],
        # Of the Secret of the service, only the key with the token: the admission policy that guards the controller's
        # Jobs lets them mount no other.
        "volumes": [_mount_only_token(volume) for volume in pod["volumes"]],
    }


def build_benchmark_job(
    service: InferenceService, served: Served, choice: EngineChoice, settings: PodSettings, *, node: str, digest: str
) -> Obj:
    """Return the Job of a benchmark on a node, which its Model owns; `digest` makes its name unique."""
    owner = served.model.metadata
    # The labels of the Job, which its pod has, too.
    labels = {LABEL_BENCHMARK: "true", LABEL_MODEL: owner.name}
    # A ReadWriteOnce volume is attached to one node: by this label, other pods of the volume find that node.
    weights = mounted_weights(served.model)
    volume_labels = label_claims({weights.claim: weights.mark}) if weights.claim and weights.has_one_node else {}

    pod = build_benchmark_pod(service, served, choice, settings, node)
    spec: Obj = {
        # One pod is one attempt: the controller retries, so that a condition of the service has the reason.
        "backoffLimit": 0,
        "activeDeadlineSeconds": DEADLINE_SECONDS,
        "template": {"metadata": {"labels": {LABEL_MANAGED_BY: MANAGED_BY, **labels, **volume_labels}}, "spec": pod},
    }
    # A name is limited in length, so it has the beginnings of both.
    _, job = child(JOBS, f"{owner.name[:40]}-bench-{digest[:10]}", MODELS, owner, labels, spec=spec)
    return job


def digest_start(key: BenchmarkKey, inputs: str, tries: int) -> str:
    """Return a digest for the name of the Job: each try of a benchmark has another one."""
    return hashlib.sha256(msgspec.json.encode([*key, inputs, tries])).hexdigest()


def digest_inputs(service: InferenceService, choice: EngineChoice, settings: PodSettings) -> str:
    """Return a digest of the settings that a measurement depends on beside the model.

    Another digest ends a benchmark that runs, and lets one that has failed for good be tried again.
    """
    spec = service.spec
    inputs = [spec.benchmark, spec.parallel, spec.context_tokens, spec.resources]
    facts = [*inputs, spec.hardware, choice.runtime, settings.image, service.metadata.uid]
    return hashlib.sha256(msgspec.json.encode(facts)).hexdigest()[:16]


def read_benchmark(job: Obj, pods: Sequence[Obj], now: datetime) -> Endpoint | JobOutcome:
    """Return the address of the pod of a Job once its engine is ready; before that, the state of the Job.

    The state is Going, or Broken for one of these reasons, the first of which counts: a container has ended; the Job
    has ended or is older than `DEADLINE_SECONDS`, and the pod is not ready; or, after `START_SECONDS`, there is still
    no pod, or it waits for a cause other than normal start-up, such as an image that cannot be pulled.
    """
    # The newest pod of the Job.
    pod = max(pods, key=lambda pod: str(pod["metadata"]["creationTimestamp"]), default=None)
    status: Obj = pod.get("status", {}) if pod is not None else {}

    # 1. A container has ended, now or before its last restart: each container of a replica should run for ever.
    for container in status.get("containerStatuses", ()):
        ends = ((container.get(name) or {}).get("terminated") for name in ("state", "lastState"))
        if ended := next(filter(None, ends), None):
            # Of a long message, the end is kept.
            cause = (ended.get("message") or "").strip()[-500:] or ended.get("reason", "")
            message = f"container {container['name']} ended with exit code {ended['exitCode']}: {cause}"
            return _describe_failure("EngineFailed", message, now)

    # 2. The engine is ready.
    addresses = status.get("podIPs") or []
    if pod is not None and is_ready(pod) and addresses:
        return Endpoint(addresses[0]["ip"], SERVICE_PORT, node=pod["spec"].get("nodeName", ""))

    # 3. It is not ready, and the Job has ended or is too old.
    age_seconds = (now - datetime.fromisoformat(job["metadata"]["creationTimestamp"])).total_seconds()
    if jobs.has_ended(job) or age_seconds > DEADLINE_SECONDS:
        return _describe_failure("DeadlineExceeded", f"it was not ready after {DEADLINE_SECONDS // 60} minutes", now)

    # 4. It does not start: it still has no pod, or its pod states a reason to wait.
    if age_seconds > START_SECONDS and pod is None:
        # The Events about the Job have the words of the API server: a quota, a LimitRange or a webhook refuses it.
        name, namespace = job["metadata"]["name"], job["metadata"]["namespace"]
        message = f"its pod was not created: see: kubectl -n {namespace} describe job {name}"
        return _describe_failure(FAILED_CREATE, message, now)
    waiting = jobs.read_waiting(pod) if pod is not None else JobOutcome(state="Going")
    # Without a reason to wait, the engine is loading: that may take until the deadline.
    is_stuck = bool(waiting.reason) and age_seconds > START_SECONDS
    return _describe_failure(waiting.reason, waiting.message, now) if is_stuck else JobOutcome(state="Going")


def _describe_failure(reason: str, message: str, now: datetime) -> JobOutcome:
    return JobOutcome(state="Broken", reason=reason, message=message, ended=now)


def _mount_only_token(volume: Obj) -> Obj:
    """Return a volume of a pod; that of the token Secret mounts no key but the token."""
    if volume["name"] != "token":
        return volume
    return {**volume, "secret": {**volume["secret"], "items": [{"key": TOKEN_KEY, "path": TOKEN_KEY}]}}
