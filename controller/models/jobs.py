"""The works that read and fetch weights for a Model, and the Jobs that do them: their specs and their outcomes.

The controller never opens a source itself: a hostile header, a slow mirror or 40 GB of weights need a separate process
with limits. A Job is one attempt and is never changed. Its name contains a digest of work and attempt, so creating
the same Job again finds the existing one. Its result is the termination message of its container. The number of the
attempt is stored on the Job, so that a restarted controller continues with the same attempt.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated, Final, Literal, NamedTuple

import msgspec

from artifacts.errors import PERMANENT_EXIT, Reason
from artifacts.repositories.registry_login import SECRET_KEYS, SECRET_VARIABLE
from artifacts.source import HUB_TOKEN_VARIABLE
from controller.models.job_pods import DEADLINE_EXCEEDED, FAILED_CREATE, ObservedPods, find_refusal_check_seconds
from controller.reconcile.plan import child
from crds.meta import GROUP, LABEL_MANAGED_BY, LABEL_MODEL, MANAGED_BY, ObjectMeta
from crds.model import ModelFacts
from crds.quantity import parse_quantity
from kube.backoff import EXACT, backoff_seconds
from kube.client import Obj
from kube.resources import JOBS, MODELS

ANNOTATION_WORK: Final = f"{GROUP}/work"
"""Digest of the work of a Job; equal for all attempts."""
ANNOTATION_ATTEMPT: Final = f"{GROUP}/attempt"
ANNOTATION_PLACED: Final = f"{GROUP}/placed"
"""Digest of the nodes that the pod of a Job selects, of the taints that it tolerates and of what it reserves."""
NO_IMAGE: Final = "NoImage"
"""Reason of a work that needs a Job, of a controller without an image for Jobs."""
MEMORY_MIB: Final = 512
"""Memory limit of a Job; a hostile header is read within it."""
TERMINATION_LOG: Final = "/dev/termination-log"
_OVERCOMMITTED: Final = frozenset({"cpu", "memory", "ephemeral-storage"})
"""Resources whose limit may be larger than the request."""
_STORAGE_FAILED: Final[Reason] = "StorageFailed"
_UNSCHEDULABLE: Final = "Unschedulable"
_PULL_FAILURES: Final = frozenset({"ErrImagePull", "ImagePullBackOff"})
LOGIN_PATH: Final = "/run/secrets/pomona"
"""Folder of the keys of a Secret with the login of a registry."""

FIRST_RETRY_SECONDS: Final = 5.0
LAST_RETRY_SECONDS: Final = 300.0
_LATEST: Final = datetime(9000, 1, 1, tzinfo=UTC)
LOST_SECONDS: Final = 60.0
"""A Job that ended this long ago and whose pod is gone will give no result any more."""

USER: Final = 65532
POD_SECURITY: Final[Obj] = {
    "runAsNonRoot": True,
    "runAsUser": USER,
    "runAsGroup": USER,
    "fsGroup": USER,
    "fsGroupChangePolicy": "OnRootMismatch",
    "seccompProfile": {"type": "RuntimeDefault"},
}
"""Satisfies the `restricted` Pod Security Standard; the group owns the weights on the volume."""
CONTAINER_SECURITY: Final[Obj] = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


def keep_literal(arguments: Iterable[str]) -> list[str]:
    """Return arguments of a container in which Kubernetes replaces no $(VARIABLE).

    Tenants and servers state parts of them, and a variable of the container may be a secret.
    """
    return [argument.replace("$", "$$") for argument in arguments]


class Placement(msgspec.Struct, frozen=True):
    """Constraints on the node of the pod."""

    node_selector: dict[str, str] = {}
    tolerations: tuple[Obj, ...] = ()


ANYWHERE: Final = Placement()


class Reservation(msgspec.Struct, frozen=True):
    """Resources and nodes that a Job's pod asks for in the place of a replica, which then fits on the same node."""

    requests: Mapping[str, str] = {}
    """Quantity of each resource."""
    affinity: Obj = {}
    runtime_class_name: str | None = None

    @property
    def has_devices(self) -> bool:
        """True if it asks for more than memory, processor and disk."""
        return any("/" in name for name in self.requests)


class SecretVariable(NamedTuple):
    """An environment variable whose value is a key of a Secret."""

    variable: str
    key: str
    optional: bool = False


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """One task for a Model, in one or more attempts, each of which is a Job."""

    owner: ObjectMeta
    verb: Literal["inspect", "fetch"]
    identity: tuple[str, ...]
    """The values that, with `verb`, identify the work; every other field may change without a new Job."""
    arguments: tuple[str, ...]
    image: str
    image_pull_secrets: tuple[str, ...] = ()
    """Secrets with which nodes pull `image`; no container can read them."""
    environment: Mapping[str, str] = {}
    token_secret: str | None = None
    secret_variables: tuple[SecretVariable, ...] = (SecretVariable(HUB_TOKEN_VARIABLE, "token"),)
    """Environment variables of `pomona` that come from `token_secret`."""
    login_secret: str | None = None
    """Secret whose keys are mounted as files, for the login of a registry; an environment could be read elsewhere."""
    claim: str | None = None
    """PersistentVolumeClaim that is mounted at /models; for an inspection, read-only."""
    storage_class: str = ""
    """The StorageClass of `claim`, if that is known and states one."""
    deadline_seconds: int | None = None
    """An attempt that takes longer is ended and retried."""
    placement: Placement = Placement()
    reservation: Reservation = Reservation()

    def digest(self) -> str:
        """Return the digest of this work, which is equal for all attempts."""
        return hashlib.sha256("\0".join((self.verb, *self.identity)).encode()).hexdigest()

    def name(self, attempt: int) -> str:
        """Return the name of the Job of this attempt, counted from 0."""
        digest = hashlib.sha256(f"{self.digest()}\0{attempt}".encode()).hexdigest()
        return f"{self.owner.name}-{self.verb}-{digest[:8]}"

    def read_attempt(self, attempt: Obj, pods: Sequence[Obj], now: datetime) -> "JobOutcome":
        """Return the outcome of an attempt so far; `pods` are those of the Job.

        It is the outcome of the Job, with two exceptions. A Job cannot be changed, so one that cannot start counts as
        Broken, and is replaced, if that may help: if its pod is refused and a new Job would be placed differently, or
        if its image cannot be pulled and a new Job would have another pull secret. And the message about a volume or
        image that failed says more.
        """
        # 1. A volume that failed: the message says which.
        outcome = read_outcome(attempt, pods, now)
        if outcome.reason == _STORAGE_FAILED and self.claim:
            of_class = f"of StorageClass {self.storage_class}" if self.storage_class else "of no StorageClass"
            volume = f"the volume is that of PersistentVolumeClaim {self.claim}, {of_class}"
            return msgspec.structs.replace(outcome, message=f"{outcome.message}; {volume}")

        # 2. A pod that cannot start: it is Broken if a new Job would be placed differently, as its digest shows.
        created = _parse_time(attempt["metadata"].get("creationTimestamp"))
        placed = (attempt["metadata"].get("annotations") or {}).get(ANNOTATION_PLACED, "")
        # A quota or a policy may refuse what a Job without a pod asks for.
        lacks_pod = self.verb == "fetch" and not pods and not has_ended(attempt)
        cannot_start = outcome.reason == _UNSCHEDULABLE or lacks_pod
        if cannot_start and self.digest_placement() != placed:
            # `ended`: the pause until the next attempt counts from the creation, as this one never ran.
            reason = outcome.reason or FAILED_CREATE
            return msgspec.structs.replace(outcome, state="Broken", reason=reason, ended=created)

        # 3. An image that cannot be pulled: it is Broken if a new Job would have another pull secret.
        if outcome.reason not in _PULL_FAILURES:
            return outcome
        pull_secrets = {secret["name"] for secret in attempt["spec"]["template"]["spec"].get("imagePullSecrets") or ()}
        if not pull_secrets.issuperset(self.image_pull_secrets):
            return msgspec.structs.replace(outcome, state="Broken", ended=created)
        message = f"{outcome.message.rstrip('.')}; {self._advise_on_pull(attempt['metadata']['name'])}"
        return msgspec.structs.replace(outcome, message=message)

    def digest_placement(self) -> str:
        """Return the value of ANNOTATION_PLACED; empty for a pod that any node may run and that tolerates nothing."""
        placed = (self.placement, self.reservation)
        if placed == (Placement(), Reservation()):
            return ""
        return hashlib.sha256(msgspec.json.encode(placed, order="sorted")).hexdigest()[:16]

    def _advise_on_pull(self, job: str) -> str:
        """Return the way out for a Job whose node cannot pull its image."""
        namespace, names = self.owner.namespace, " or ".join(self.image_pull_secrets) or "NAME"
        start = "" if self.image_pull_secrets else "starts `pomona controller` with --image-pull-secret NAME and "
        return (
            f"if the registry needs a login, an administrator {start}creates Secret {names} with it in namespace "
            f"{namespace}; after another --image, make another Job: kubectl -n {namespace} delete job {job}"
        )


class JobResult(ModelFacts, frozen=True):
    """The content of `--result` of `pomona inspect` and `pomona fetch`, on success and on failure."""

    reason: str = ""
    message: str = ""
    retry_after_seconds: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 0.0


class JobOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a Job so far; `reason` and `message` explain why it has not succeeded."""

    state: Literal["Going", "Succeeded", "Failed", "Broken"]
    """After Broken another attempt may succeed, after Failed none can."""
    reason: str = ""
    message: str = ""
    ended: datetime | None = None
    retry_after_seconds: float = 0.0
    """The pause that the source's server asks for."""
    answer: ModelFacts = ModelFacts()


class JobProgress(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of a work, and the next step for it."""

    outcome: JobOutcome
    job: str = ""
    """Name of the current attempt, if there is one; all others are deleted."""
    create: Obj | None = None
    again_seconds: float | None = None


class _Ended(NamedTuple):
    """The condition that ends a Job."""

    type: str
    reason: str
    message: str
    when: datetime


def proceed(work: Work, jobs: Sequence[Obj], pods: ObservedPods, now: datetime) -> JobProgress:
    """Return the next step of a work: start it, wait for it, or retry it after a back-off, for ever.

    The last attempt is Going while it may still succeed; Broken attempts are retried; Succeeded and Failed are final.
    """
    # 1. Without a Job, start the first attempt.
    current = _find_current(work, jobs)
    if current is None:
        return _start(work, 0, JobOutcome(state="Going"))

    # 2. Read the outcome of the last attempt.
    attempt = _read_attempt_number(current)
    outcome = work.read_attempt(current, pods.find(current), now)
    outcome = _read_refusal(outcome, pods.refusals.get(current["metadata"]["uid"]))
    progress = JobProgress(outcome=outcome, job=work.name(attempt))

    # 3. It goes on: look again for a pod that the API server refuses; or, if the Job has ended, for its pod's result.
    if outcome.state == "Going":
        check_seconds = find_refusal_check_seconds(current, pods.find(current), now)
        return msgspec.structs.replace(progress, again_seconds=LOST_SECONDS if has_ended(current) else check_seconds)
    if outcome.state != "Broken" or outcome.ended is None:  # it is over, or there is no time to count a pause from
        return progress

    # 4. It is Broken: start another attempt after a pause. Attempts are counted from 0. The pause is exact, because
    # this decision is repeated until the pause is over.
    seconds = backoff_seconds(attempt + 1, first=FIRST_RETRY_SECONDS, most=LAST_RETRY_SECONDS, jitter=EXACT)
    if outcome.reason == _UNSCHEDULABLE:  # no attempt has failed: the service asks for something else
        seconds = FIRST_RETRY_SECONDS
    # The source may have asked for a longer pause (retry_after_seconds).
    retry_at = outcome.ended + timedelta(seconds=max(seconds, outcome.retry_after_seconds))
    if now < retry_at:
        return msgspec.structs.replace(progress, again_seconds=(retry_at - now).total_seconds())
    return _start(work, attempt + 1, outcome)


def _read_refusal(outcome: JobOutcome, words: str | None) -> JobOutcome:
    """Return the outcome of a Job with the API server's words about its pod, if it never had one."""
    if words is None or (outcome.state != "Going" and outcome.reason != DEADLINE_EXCEEDED):
        return outcome
    return msgspec.structs.replace(outcome, reason=FAILED_CREATE, message=words)


def _start(work: Work, attempt: int, outcome: JobOutcome) -> JobProgress:
    """Return the progress with the Job of an attempt to create; it fails without an image for Jobs."""
    if not work.image:
        message = "the controller has no image for the Job that this needs: start `pomona controller` with --image"
        return JobProgress(outcome=JobOutcome(state="Failed", reason=NO_IMAGE, message=message))
    return JobProgress(outcome=outcome, job=work.name(attempt), create=build_job(work, attempt))


def _find_current(work: Work, jobs: Iterable[Obj]) -> Obj | None:
    """Return the Job of the last attempt, or None."""
    # Each Job of a work has its digest as an annotation.
    digest = work.digest()
    attempts = (
        job
        for job in jobs
        if "deletionTimestamp" not in job["metadata"]
        and job["metadata"].get("annotations", {}).get(ANNOTATION_WORK) == digest
    )
    return max(attempts, key=_read_attempt_number, default=None)


def name_last_job(work: Work, jobs: Iterable[Obj]) -> str:
    """Return the name of the last Job of a finished work, which is kept as a record; empty if there is none."""
    current = _find_current(work, jobs)
    return "" if current is None else current["metadata"]["name"]


def read_verb(job: Obj) -> str:
    """Return the verb of a Job: inspect or fetch."""
    name: str = job["spec"]["template"]["spec"]["containers"][0]["name"]
    return name


def read_outcome(job: Obj, pods: Sequence[Obj], now: datetime) -> JobOutcome:
    """Return the outcome of a Job, from its conditions and its newest pod.

    A Job that has ended and whose result is missing counts as going on for `LOST_SECONDS`, and then as broken.
    """
    pod = max(pods, key=lambda candidate: candidate["metadata"]["creationTimestamp"], default=None)
    ended = _find_end(job)  # None: it goes on
    if ended is not None and ended.reason == DEADLINE_EXCEEDED:  # whatever its pod says by now
        return JobOutcome(state="Broken", reason=ended.reason, message=ended.message, ended=ended.when)

    # Its container has ended: that tells the outcome.
    containers = pod.get("status", {}).get("containerStatuses") if pod is not None else None
    terminated = containers[0].get("state", {}).get("terminated") if containers else None
    if terminated is not None:
        return _read_terminated(terminated, ended)

    # It has not ended, or its result is missing.
    if ended is None:
        return read_waiting(pod) if pod is not None else JobOutcome(state="Going")
    if now < ended.when + timedelta(seconds=LOST_SECONDS):
        return JobOutcome(state="Going")  # the event of its pod may come later, from another watch
    message = f"the Job ended and its pod is gone without a result: {ended.message or ended.reason or ended.type}"
    return JobOutcome(state="Broken", reason="ResultLost", message=message, ended=ended.when)


def _read_terminated(state: Obj, ended: _Ended | None) -> JobOutcome:
    """Return the outcome by the termination message of the Job's container."""
    when = ended.when if ended else _parse_time(state.get("finishedAt"))
    termination_message = state.get("message") or ""
    try:
        answer = msgspec.json.decode(termination_message, type=JobResult)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        answer = JobResult()  # a killed container writes no result
        if termination_message or state["exitCode"] == 0:
            message = f"the Job's result cannot be decoded ({error}): {termination_message[-500:]!r}"
            answer = JobResult(reason="ResultUnreadable", message=message)
    else:  # it was written and can be read
        if state["exitCode"] == 0:
            return JobOutcome(state="Succeeded", answer=answer, ended=when)

    # Else `answer` says why it has not, if it was written.
    reason, code = answer.reason or state.get("reason") or "Error", state["exitCode"]
    return JobOutcome(
        # By this exit code the container says that another attempt would fail, too.
        state="Failed" if code == PERMANENT_EXIT else "Broken",
        reason=reason,
        message=answer.message or f"the Job's container ended with exit code {code} ({reason}) and without a result",
        ended=when,
        retry_after_seconds=answer.retry_after_seconds,
    )


def read_waiting(pod: Obj) -> JobOutcome:
    """Return why a pod does not start, if its status has a cause other than normal start-up."""
    status = pod.get("status", {})
    for condition in status.get("conditions", []):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return JobOutcome(state="Going", reason=condition["reason"], message=condition.get("message", ""))
    for container in status.get("containerStatuses", []):
        waiting = container.get("state", {}).get("waiting", {})
        if waiting.get("reason") not in {None, "ContainerCreating", "PodInitializing"}:
            return JobOutcome(state="Going", reason=waiting["reason"], message=waiting.get("message", ""))
    return JobOutcome(state="Going")


def has_ended(job: Obj) -> bool:
    """Return whether a Job has succeeded or failed."""
    return _find_end(job) is not None


def _find_end(job: Obj) -> _Ended | None:
    """Return the condition by which a Job has succeeded or failed, or None."""
    for condition in job.get("status", {}).get("conditions", []):
        if condition["type"] in {"Complete", "Failed"} and condition["status"] == "True":
            when = _parse_time(condition.get("lastTransitionTime"))
            return _Ended(condition["type"], condition.get("reason", ""), condition.get("message", ""), when)
    return None


def _parse_time(text: str | None) -> datetime:
    """Return a time of a status; anybody who may write the status can state a time near the last possible one."""
    return min(datetime.fromisoformat(text), _LATEST) if text else datetime.fromtimestamp(0, UTC)


def _read_attempt_number(job: Obj) -> int:
    return int(job["metadata"]["annotations"][ANNOTATION_ATTEMPT])


def build_job(work: Work, attempt: int) -> Obj:
    """Return the Job of an attempt."""
    # 1. The pod; first the fields that each has.
    labels = {LABEL_MANAGED_BY: MANAGED_BY, LABEL_MODEL: work.owner.name}
    pod: Obj = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 5,
        "securityContext": POD_SECURITY,
        "nodeSelector": work.placement.node_selector,
        "tolerations": list(work.placement.tolerations),
        "containers": [_build_container(work)],
    }
    if work.image_pull_secrets:
        pod["imagePullSecrets"] = [{"name": name} for name in work.image_pull_secrets]
    if work.reservation.affinity:
        pod["affinity"] = work.reservation.affinity
    if work.reservation.runtime_class_name is not None:
        pod["runtimeClassName"] = work.reservation.runtime_class_name
    pod["volumes"] = _build_volumes(work)

    # 2. The Job.
    spec: Obj = {
        # One pod is one attempt: the controller retries, so that a condition of the Model has the reason.
        "backoffLimit": 0,
        # A pod that is evicted or preempted is no failed attempt: the Job replaces it.
        "podFailurePolicy": {
            "rules": [{"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}]
        },
        "template": {"metadata": {"labels": labels}, "spec": pod},
    }
    if work.deadline_seconds is not None:
        spec["activeDeadlineSeconds"] = work.deadline_seconds
    _, job = child(JOBS, work.name(attempt), MODELS, work.owner, {LABEL_MODEL: work.owner.name}, spec=spec)
    job["metadata"]["annotations"] = {ANNOTATION_WORK: work.digest(), ANNOTATION_ATTEMPT: str(attempt)}
    if placed := work.digest_placement():
        job["metadata"]["annotations"][ANNOTATION_PLACED] = placed
    return job


def _build_volumes(work: Work) -> list[Obj]:
    """Return the volumes of a Job's pod: that of the weights, which an inspection only reads, and the login."""
    volumes: list[Obj] = []
    if work.claim is not None:
        claim = {"claimName": work.claim} | ({"readOnly": True} if work.verb == "inspect" else {})
        volumes.append({"name": "models", "persistentVolumeClaim": claim})
    if work.login_secret is not None:
        # A Secret has some of these keys; the admission policy of the controller allows no others.
        items = [{"key": key, "path": key} for key in SECRET_KEYS]
        secret = {"secretName": work.login_secret, "defaultMode": 0o440, "items": items, "optional": True}
        volumes.append({"name": "login", "secret": secret})
    return volumes


def _build_container(work: Work) -> Obj:
    """Return the container of a Job: `pomona inspect` or `pomona fetch`, which writes its result to a file.

    The kubelet copies that file into the status of the pod as the termination message. Credentials come as environment
    variables from the Secret of the source, or as the mounted login of a registry.
    """
    # The variables of the controller's options, then the credentials.
    environment: list[Obj] = [{"name": name, "value": value} for name, value in sorted(work.environment.items())]
    if work.login_secret is not None:
        environment.append({"name": SECRET_VARIABLE, "value": LOGIN_PATH})
    if work.token_secret is not None:
        for variable, key, optional in work.secret_variables:
            reference = {"name": work.token_secret, "key": key, "optional": optional}
            environment.append({"name": variable, "valueFrom": {"secretKeyRef": reference}})

    container: Obj = {
        "name": work.verb,
        "image": work.image,
        "args": [work.verb, *keep_literal(work.arguments), "--result", TERMINATION_LOG],
        "env": environment,
        "terminationMessagePath": TERMINATION_LOG,
        "terminationMessagePolicy": "File",
        "securityContext": CONTAINER_SECURITY,
        "resources": _build_resources(work.reservation),
    }
    container["volumeMounts"] = []
    if work.claim is not None:
        mount = {"name": "models", "mountPath": "/models"}
        container["volumeMounts"].append(mount | ({"readOnly": True} if work.verb == "inspect" else {}))
    if work.login_secret is not None:
        container["volumeMounts"].append({"name": "login", "mountPath": LOGIN_PATH, "readOnly": True})
    return container


def _build_resources(reservation: Reservation) -> Obj:
    """Return the resources of a Job's container: those that Pomona needs, or the reserved ones where they are more."""
    requests = {"cpu": "100m", "memory": "128Mi"}
    for name, quantity in reservation.requests.items():
        requests[name] = _larger(quantity, requests.get(name, "0"))
    # Kubernetes demands that requests and limits of all other resources are equal.
    limits = {name: quantity for name, quantity in requests.items() if name not in _OVERCOMMITTED}
    return {"requests": requests, "limits": limits | {"memory": _larger(requests["memory"], f"{MEMORY_MIB}Mi")}}


def _larger(quantity: str, other: str) -> str:
    return max(quantity, other, key=lambda amount: parse_quantity(amount) or 0)
