"""The status of an InferenceService: the conditions, phase and endpoint that follow from its replicas and Models.

`judge_ready` and `pick_phase` are read from the top: the first rule that applies decides.
"""

from typing import Final, NamedTuple

import msgspec

from controller.models.served import Served, list_companions
from controller.placement.kueue import KueueStanding
from controller.placement.standing import ServiceStanding
from controller.reconcile.conditions import condition, find, transitions
from controller.reconcile.plan import Event
from controller.services.accelerator_choice import ChosenAccelerators
from controller.services.diagnosis import LOADING
from controller.services.endpoints import Endpoint
from controller.services.preconditions import Phase, ServiceProblem
from controller.services.probe_policy import Question
from controller.services.queue_report import (
    SILENT_QUEUE_REASONS,
    build_kueue_status,
    build_queue_events,
    build_queue_status,
    explain_wait,
)
from controller.services.replica_memory import ReplicaMemory
from controller.services.replicas import Replicas
from crds.inferenceservice import InferenceService
from crds.meta import LABEL_SERVICE, Accelerator, without_defaults
from crds.quantity import quantity_bytes
from crds.size import size_text
from kube.client import Obj
from runtimes.pod import SERVICE_PORT
from runtimes.probe import ProbeResult, build_success

_MOST_NAMED: Final = 3
MOST_NODES: Final = 20
READY: Final = "Ready"
MODEL_READY: Final = "ModelReady"
REASONS_WITHOUT_EVENT: Final = {
    "Progressing",
    "Probing",
    "MeasuringSpeed",
    "Starting",
    "Fetching",
    "Binding",
    "Downloading",
    "NoEndpoints",
    "ForeignEndpoints",
    "ModelNotReady",
    "Choosing",
    *SILENT_QUEUE_REASONS,
}
"""Reasons of normal progress, for which no Event is sent."""
REASONS_OF_NORMAL_EVENTS: Final = {LOADING, "ScaledToZero", "Suspended", "WaitsToLoad"}
"""Reasons for which a service does not serve although nothing is wrong."""


class ServiceView(msgspec.Struct, frozen=True, kw_only=True):
    """All inputs of a decision about a service."""

    service: InferenceService
    accelerator: Accelerator | None
    """Accelerator of the replicas; the first one if they are on several."""
    accelerator_choice: ChosenAccelerators | None = None
    """The accelerators of a service that may use several; None: it uses one."""
    runtime: str = ""
    """Engine of the replicas; empty while it depends on a Model that does not exist."""
    pod_runtime: str = ""
    """Engine of the replicas in pods, if it is another one than that of those on hosts."""
    remarks: tuple[str, ...] = ()
    """Remarks about engine and weights that their users should read although they are served."""
    memory: ReplicaMemory = ReplicaMemory()
    """Memory of one replica of `served`."""
    served: Served | None = None
    """The Models to serve; None if `blocker` prevents it."""
    model_problem: ServiceProblem | None
    blocker: ServiceProblem | None
    """The reason why no replica can be created now; replicas that serve stay."""
    wanted: int
    replicas: Replicas
    endpoints: tuple[Endpoint, ...]
    own_endpoints: tuple[Endpoint, ...]
    """The endpoints that are at an address of a replica: only they are probed."""
    standing: ServiceStanding | None = None
    """The place in the queue of the first replica that waits; None: none waits."""
    kueue: KueueStanding | None = None
    """The place in a queue of Kueue of the first replica that waits there; None: none waits."""

    @property
    def memory_bytes(self) -> int | None:
        """Memory of its node or host that one replica takes, as stated or as computed; None: unknown."""
        stated = self.service.spec.resources.memory
        return self.memory.container_bytes if stated is None else quantity_bytes(stated)

    @property
    def device_memory(self) -> str:
        """Number of the devices of one replica, and memory that each must have; empty if there is none, or unknown."""
        device_bytes = self.memory.device_bytes_each
        return f"{self.memory.devices} x {size_text(device_bytes)}" if device_bytes is not None else ""

    @property
    def question(self) -> Question | None:
        """The question whose answer makes the service Ready; None when there is nothing to probe yet."""
        ready = self.replicas.ready
        if self.blocker or not self.wanted or not ready or not self.own_endpoints:
            return None
        metadata = self.service.metadata
        mode = self.service.spec.mode
        return Question(metadata.uid, metadata.generation, replicas=ready, endpoints=self.own_endpoints, mode=mode)

    @property
    def proof(self) -> ProbeResult | None:
        """The answer to `question` by which the status says Ready already, for a leader that has not probed yet.

        None: Ready is not True, or it is by the answer to another question, about other replicas or endpoints. The
        status has the digest of the question.
        """
        ready, question = find(self.service.status.conditions, READY), self.question
        if question is None or ready is None or ready.status != "True" or self.service.status.proof != question.digest:
            return None
        urls = [endpoint.url for endpoint in question.endpoints]
        # The message begins with the endpoint that answered, or with "still serving" if it came from an earlier answer.
        first_word = ready.message.partition(" ")[0]
        if first_word in urls:
            return build_success(first_word, question.mode)
        # Which of several endpoints answered is not known any more.
        return build_success(urls[0] if len(urls) == 1 else "an endpoint", question.mode)


class ReadyInputs(NamedTuple):
    """Inputs of Ready and the phase."""

    suspended: bool = False
    wanted: int = 1
    ready_replicas: int = 0
    blocked: bool = False
    """No replica can be created now."""
    problem: ServiceProblem | None = None
    """Why some replicas are not ready, or are reached by different schemes."""
    probe: ProbeResult | None = None
    """The last result of the probe; None before the first, or if there is nothing to probe."""
    can_be_probed: bool = False
    foreign: str = ""
    """Addresses of endpoints, if none of them is that of a replica."""
    was_ready: bool = False
    """Ready is True already, and there still are endpoints: the replicas that answered still exist."""
    generation: int = 1
    last_generation: int = 0
    """The observedGeneration of Ready."""
    last_reason: str = ""
    last_message: str = ""


class ReadyVerdict(NamedTuple):
    """The value of the condition Ready."""

    is_true: bool
    reason: str
    message: str
    keeps_generation: bool = False
    """observedGeneration stays: the latest generation has not been probed yet."""


def judge_ready(inputs: ReadyInputs) -> ReadyVerdict:
    """Return the value of Ready: the first rule that applies decides.

    Ready is True once an endpoint has generated a token. It stays so until a probe finds an error, none of the replicas
    that answered is left, or no replica is wanted any more.
    """
    probe, problem = inputs.probe, inputs.problem
    # 1. No replica is wanted.
    if inputs.suspended:
        return ReadyVerdict(False, "Suspended", "spec.suspend is true: set it to false to serve again")
    if not inputs.wanted:
        return ReadyVerdict(False, "ScaledToZero", "spec.replicas is 0: set it to 1 or more to serve again")

    # 2. A probe has an answer.
    if probe is not None and not probe.ok:
        return ReadyVerdict(False, probe.reason, probe.message)
    if probe is not None:
        return ReadyVerdict(True, "Serving", f"{probe.message}; {problem.message}" if problem else probe.message)

    # 3. It was Ready, and some of the replicas that answered are left.
    if inputs.was_ready:
        return _judge_without_answer(inputs)

    # 4. It was not: say what it waits for.
    if problem is not None:
        return ReadyVerdict(False, problem.reason, problem.message)
    if inputs.can_be_probed:
        return ReadyVerdict(False, "Probing", "replicas are ready; waiting for them to generate a first token")
    if inputs.foreign:
        message = (
            f"the EndpointSlices of the Service name {inputs.foreign}, which is the address of no replica and is not "
            "sent the token: delete the slice, or wait until the replica reports this address"
        )
        return ReadyVerdict(False, "ForeignEndpoints", message)
    message = "replicas are ready; waiting for them in the EndpointSlices of the Service"
    return ReadyVerdict(False, "NoEndpoints", message)


def _judge_without_answer(inputs: ReadyInputs) -> ReadyVerdict:
    """Return the value of Ready of a service that was Ready and whose latest state has not been probed yet.

    It stays True, since replicas that answered still exist. Unless it is as it was, the message says what is missing,
    and the condition keeps its observedGeneration: the latest one has not answered.
    """
    problem, is_same_spec = inputs.problem, inputs.last_generation == inputs.generation
    # Nothing has changed, so the condition stays as it is.
    if problem is None and is_same_spec and inputs.last_reason == "Serving":
        return ReadyVerdict(True, "Serving", inputs.last_message)

    if problem is None:
        reason, state = "Probing", "waiting for the replicas to generate a first token"
    elif is_same_spec:
        reason, state = problem.reason, problem.message
    else:
        reason, state = problem.reason, f"the latest spec is not rolled out yet: {problem.message}"

    return ReadyVerdict(True, reason, f"still serving; {state}", keeps_generation=True)


def pick_phase(inputs: ReadyInputs, ready: Obj) -> Phase:
    """Return the phase of a service with this condition `ready`: the first rule that applies decides.

    Ready with the observedGeneration of an earlier spec means that replicas of that spec still serve.
    """
    if not inputs.wanted:
        return "Suspended"
    if not _is_true(ready):
        return inputs.problem.phase if inputs.problem is not None else "Progressing"
    if inputs.problem is None:
        return "Ready" if ready["observedGeneration"] == inputs.generation else "Progressing"
    # Without a ready replica of the latest spec, one of an earlier spec still serves while an edit is rolled out.
    return "Degraded" if inputs.ready_replicas or inputs.blocked else "Progressing"


def build_status(view: ServiceView, probe: ProbeResult | None) -> Obj:
    """Return the status of a service by its view and its last probe, with Ready as its first condition.

    The reconciler adds traffic, speed, replacement and token. Optional fields without a value are left out.
    """
    metadata = view.service.metadata
    inputs = _read_ready_inputs(view, probe)

    # 1. Ready, and the proof: the digest of the question that was answered.
    ready = build_ready_condition(inputs)
    proof = ""
    if probe is not None and probe.ok and view.question is not None:
        proof = view.question.digest
    elif _is_true(ready):  # by an earlier answer, whose proof stays
        proof = view.service.status.proof

    # 2. The fields that may have no value.
    choice = view.accelerator_choice
    accelerator = choice.accelerator if choice is not None else view.accelerator or ""
    optional = {
        "choice": without_defaults(choice.status) if choice is not None else None,
        "serving": without_defaults(view.service.status.serving) if view.service.status.serving else None,
        "runtime": view.runtime,
        "memory": size_text(view.memory_bytes) if view.memory_bytes else "",
        "deviceMemory": view.device_memory,
        "deviceMemoryBytes": view.memory.device_bytes_each,
        "nodes": sorted(view.replicas.nodes)[:MOST_NODES],
        "queue": _build_queue(view),
        "proof": proof,
    }

    # 3. All fields.
    return {
        "observedGeneration": metadata.generation,
        "phase": pick_phase(inputs, ready),
        "replicas": view.replicas.total,
        "readyReplicas": len(view.replicas.ready),
        "availableReplicas": view.replicas.available,
        "selector": f"{LABEL_SERVICE}={metadata.name}",
        "accelerator": accelerator,
        "endpoint": f"{_find_scheme(view)}://{metadata.name}.{metadata.namespace}.svc:{SERVICE_PORT}/v1",
        "conditions": [ready, _build_model_condition(view)],
    } | {name: value for name, value in optional.items() if value}


def _build_queue(view: ServiceView) -> Obj | None:
    """Return `status.queue`, of Kueue or of our queue; None: no replica waits."""
    if view.kueue is not None:
        return build_kueue_status(view.kueue)
    return build_queue_status(view.standing) if view.standing is not None and view.wanted else None


def build_events(service: InferenceService, status: Obj) -> tuple[Event, ...]:
    """Return the Events for a change of Ready and of the place in the queue."""
    ready = [condition for condition in status["conditions"] if condition["type"] == READY]
    return (
        *transitions(
            service.status.conditions,
            ready,
            action="Reconcile",
            silent=REASONS_WITHOUT_EVENT,
            normal=REASONS_OF_NORMAL_EVENTS,
        ),
        *build_queue_events(service.status.queue, status.get("queue")),
    )


def build_ready_condition(inputs: ReadyInputs) -> Obj:
    """Return the condition Ready: True only when the endpoints have answered with a token."""
    verdict = judge_ready(inputs)
    generation = inputs.last_generation if verdict.keeps_generation else inputs.generation
    return condition(READY, true=verdict.is_true, reason=verdict.reason, message=verdict.message, generation=generation)


def _read_ready_inputs(view: ServiceView, probe: ProbeResult | None) -> ReadyInputs:
    """Return what Ready and the phase follow from: the view, the last probe, and the last condition Ready."""
    last = find(view.service.status.conditions, READY)
    # Endpoints of the Service, of replicas or foreign.
    addresses = sorted({endpoint.address for endpoint in view.endpoints})
    return ReadyInputs(
        suspended=view.service.spec.suspend,
        wanted=view.wanted,
        ready_replicas=len(view.replicas.ready),
        blocked=view.blocker is not None,
        problem=_find_problem(view),
        probe=probe,
        can_be_probed=view.question is not None,
        # Endpoints exist, and none of them is that of a replica.
        foreign=", ".join(addresses[:_MOST_NAMED]) if not view.own_endpoints else "",
        was_ready=last is not None and last.status == "True" and bool(view.own_endpoints),
        generation=view.service.metadata.generation,
        last_generation=(last.observed_generation or 0) if last else 0,
        last_reason=last.reason if last else "",
        last_message=last.message if last else "",
    )


def _is_true(ready: Obj) -> bool:
    is_true: bool = ready["status"] == "True"
    return is_true


def _find_problem(view: ServiceView) -> ServiceProblem | None:
    """Return why not all replicas are ready and reached by the same scheme, or None when they are."""
    if view.blocker is not None:
        return view.blocker
    ready = len(view.replicas.ready)
    if ready >= view.wanted:
        return _find_mixed_schemes(view.endpoints, has_pods=view.accelerator_choice is not None)
    counted = f"{ready} of {view.wanted} replicas are ready"
    cause = explain_wait(view.replicas.problem, view.standing)
    if cause is None:
        return ServiceProblem("Progressing", counted, "Progressing")
    return cause._replace(message=f"{counted}: {cause.message}")


def _find_mixed_schemes(endpoints: tuple[Endpoint, ...], *, has_pods: bool) -> ServiceProblem | None:
    """Return the problem that some replicas serve https and others http, with the way out, or None.

    Args:
        endpoints: the endpoints of the replicas.
        has_pods: pods, which have no certificate, are beside hosts for good, and not only while one kind replaces the
            other.
    """
    plain = [endpoint for endpoint in endpoints if endpoint.scheme == "http"]
    if not plain or len(plain) == len(endpoints):
        return None

    hosts = sorted({endpoint.host for endpoint in plain if endpoint.host})
    if hosts:
        names = ", ".join(hosts)
        message = f"some hosts serve https and some http: start the agent of {names} with --tls-certificate too"
    elif has_pods:
        message = (
            "hosts serve https and pods http, and clients of the Service reach both: start the agents without "
            "--tls-certificate, or name one accelerator"
        )
    else:
        return None

    return ServiceProblem("MixedEndpoints", message, "Degraded")


def _find_scheme(view: ServiceView) -> str:
    """Return the URL scheme of the service: https if all endpoints serve it; without endpoints, the last scheme."""
    if not view.endpoints:
        return "https" if view.service.status.endpoint.startswith("https:") else "http"
    return "https" if all(endpoint.scheme == "https" for endpoint in view.endpoints) else "http"


def _build_model_condition(view: ServiceView) -> Obj:
    """Return the condition ModelReady."""
    problem, generation = view.model_problem, view.service.metadata.generation
    if problem is not None:
        return condition(MODEL_READY, true=False, reason=problem.reason, message=problem.message, generation=generation)

    names = [view.service.spec.model_ref, *(companion.name for companion in list_companions(view.service.spec))]
    message = f"{'Models' if len(names) > 1 else 'Model'} {', '.join(names)} can be served"
    if view.blocker is None:
        message = "; ".join((message, *view.remarks))
    return condition(MODEL_READY, true=True, reason="ModelUsable", message=message, generation=generation)
