"""Assignments of this machine for a service, by the controller's own decisions.

A cluster chooses between pods and hosts; here there is one host. So every service is treated as one for a host.
Fields about pods are reported and ignored, and never prevent serving: the file is the same as for the cluster.
"""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Final, Literal, NamedTuple

from msgspec import structs

from artifacts.errors import ArtifactError
from artifacts.inspect import Inspection
from artifacts.source import SourceError, is_of_hub, parse, scheme_of
from controller.models.served import read_companions
from controller.models.volume import take_answer
from controller.services import preconditions
from controller.services.metal_processes import build_process_spec
from controller.services.preconditions import ServiceProblem
from controller.services.rollout import process_prefix
from controller.services.serving_choice import choose_for_host
from crds.inferenceservice import InferenceService, InferenceServiceSpec, wanted_replicas
from crds.meta import Condition
from crds.model import Model, ModelFacts, ModelStatus
from crds.pods import ServiceHardware
from kube.resources import ObjectKey
from metal_agent.assignments import STANDALONE, Assignment
from metal_agent.lifecycle import LOG_HINT, ProcessState

_TEMPORARY_REASON_PREFIXES: Final = (
    *("SourceUnreachable", "SourceChanged", "NoSpace", "StorageFailed", "WeightsMissing", "InternalError"),
    "Daemon",
)
"""Begins of the reasons of failures that may pass without the user: the process is tried again."""
_SERVED_FROM_STORE: Final = "ServedFromStore"
"""Reason of a Model whose weights are stored and whose source could not be asked."""
_POD_FIELDS: Final = {
    "resources": "spec.resources",
    "image": "spec.image",
    "node_selector": "spec.nodeSelector",
    "tolerations": "spec.tolerations",
    "container": "spec.container",
    "pod": "spec.pod",
}
_DEFAULT_SPEC: Final = InferenceServiceSpec(model_ref="")


class Decision(NamedTuple):
    """The decision for one service: its assignments, or the problem that prevents them."""

    assignments: tuple[Assignment, ...] = ()
    """One for each replica; the same inputs give the same uids."""
    problem: ServiceProblem | None = None
    """The reason why there are none."""
    note: str = ""
    """A remark for the user on weights that serve."""


def decide_assignments(service: InferenceService, models: Mapping[ObjectKey, Model], budget_bytes: int = 0) -> Decision:
    """Return the processes that serve a service, one for each replica, or the problem that prevents them.

    There are none if it is suspended, has no replicas or fails a check: its Model may be missing or not inspected yet,
    or the memory of a replica may be unknown. What an inspection found is read from the status of each Model. The
    serving options that its spec leaves out are chosen for `budget_bytes`, the memory that it may use.
    """
    # 1. Without replicas there is nothing to check.
    # host_service: the service without the fields that only pods use.
    metadata, host_service = service.metadata, build_host_service(service)
    replicas = wanted_replicas(service)
    if not replicas:
        field = "spec.suspend is true" if service.spec.suspend else "spec.replicas is 0"
        return Decision(problem=ServiceProblem("Suspended", f"{field}: edit the file to serve it", phase="Suspended"))

    # 2. Check it as the controller does. Companions: further Models, such as a draft model or adapters.
    model = models.get(ObjectKey(metadata.namespace, service.spec.model_ref))
    companions = read_companions(models.get, service)
    host_service = choose_for_host(host_service, model, companions, budget_bytes)
    checked = preconditions.check_service(host_service, model, companions)
    memory_bytes = checked.memory.total_bytes
    if checked.served is None or memory_bytes is None:
        return Decision(problem=checked.problem)

    # 3. One process for each replica.
    spec = build_process_spec(host_service, checked.served, memory_bytes)
    # The prefix has a hash of the deciding fields of the spec: if they change, other processes serve.
    prefix = process_prefix(metadata.name, spec)
    process_names = [f"{prefix}-{number}" for number in range(replicas)]
    assignments = tuple(
        Assignment(uid=_build_uid(metadata.namespace, name), namespace=metadata.namespace, name=name, spec=spec)
        for name in process_names
    )
    return Decision(assignments, note=_describe_stored_models(model, *(companion.model for companion in companions)))


def _describe_stored_models(*models: Model | None) -> str:
    """Return a sentence for each Model whose stored weights serve since its source could not be asked; "" if none."""
    notes = []
    for model in models:
        # Ready is the only condition that a Model has here.
        ready = model.status.conditions[0] if model and model.status.conditions else None
        # _SERVED_FROM_STORE: the source could not be asked, and the weights are stored.
        if model and ready and ready.reason == _SERVED_FROM_STORE:
            notes.append(f"Model {model.metadata.name}: {ready.message}")
    return "; ".join(notes)


def describe_failure(decision: Decision, states: Iterable[ProcessState]) -> str:
    """Return why a service that has never served will not serve unless the user changes something; "" if it still may.

    It may as long as one of its processes has not failed for good: a process whose failure is temporary is tried again.
    """
    if decision.problem is not None:
        return decision.problem.message if decision.problem.phase == "Failed" else ""
    failed_for_good = [
        state
        for state in states
        if state.phase == "Rejected"
        or (state.phase == "Failed" and not state.reason.startswith(_TEMPORARY_REASON_PREFIXES))
    ]
    if not failed_for_good or len(failed_for_good) < len(decision.assignments):  # some may serve
        return ""
    return "; ".join(dict.fromkeys(state.message.replace(LOG_HINT, "") for state in failed_for_good))


def list_ignored_fields(services: Iterable[InferenceService]) -> list[str]:
    """Return lines about the fields in the files of services that only a cluster uses, with their names."""
    lines = []
    for service in services:
        spec, name = service.spec, service.metadata.name
        if spec.hardware.accelerator not in {None, "auto", "cpu", "metal"}:
            lines.append(f"{name}: ignored on this machine: spec.hardware.accelerator {spec.hardware.accelerator}")
        # _POD_FIELDS: the attributes that only pods use, with their names in the file.
        fields = [
            field
            for attribute, field in _POD_FIELDS.items()
            if getattr(spec, attribute) != getattr(_DEFAULT_SPEC, attribute)
        ]
        if fields:
            lines.append(f"{name}: ignored on this machine, only pods use them: {', '.join(fields)}")
        if spec.scaling and spec.scaling.max_replicas > (loaded := max(1, spec.scaling.min_replicas)):
            lines.append(f"{name}: ignored on this machine: spec.scaling.maxReplicas, no more than {loaded} are loaded")
    return lines


def drop_unusable_secret(model: Model, hub_url: str) -> Model:
    """Return the Model, without the reference to its Secret unless the hub at `hub_url` serves its source.

    This machine has no Secrets, but one token for the hub, which no other server may get.
    """
    try:
        served_by_hub = is_of_hub(parse(model.spec.source), hub_url)
    except SourceError:
        served_by_hub = False  # its inspection reports that the source is invalid
    return model if served_by_hub else structs.replace(model, spec=structs.replace(model.spec, source_secret_ref=None))


def with_inspection(model: Model, inspection: Inspection, problem: str = "") -> Model:
    """Return the Model with the facts of its header in the status, as the controller would write it.

    `problem` is the reason why the facts are those of the stored weights, and the source was not asked.
    """
    facts = take_answer(model, inspection)  # with the checksum that the user states, if none was found
    if scheme_of(model.spec.source) == "file":
        # The process is named by a hash that includes the revision. A cluster, which cannot read the file, knows none.
        facts = structs.replace(facts, revision="")
    if problem:
        message = f"the stored weights serve, since their source could not be asked: {problem}"
        return _set_status(model, "Ready", _SERVED_FROM_STORE, message, facts)
    return _set_status(model, "Ready", "Inspected", facts.file, facts)


def assume_ready(model: Model) -> Model:
    """Return the Model as ready with the facts that its spec states, for a source that cannot be inspected here."""
    return _set_status(model, "Ready", "HostInspects", model.spec.source)


def with_error(model: Model, error: ArtifactError) -> Model:
    """Return the Model with the error of its inspection as a condition."""
    return _set_status(model, "Pending" if error.retryable else "Failed", error.reason, error.message)


def _set_status(
    model: Model,
    phase: Literal["Pending", "Ready", "Failed"],
    reason: str,
    message: str,
    facts: ModelFacts = ModelFacts(),  # noqa: B008 - it is frozen
) -> Model:
    """Return the Model with a phase, a condition Ready that says so, and the facts of its header."""
    generation = model.metadata.generation
    ready = Condition(
        type="Ready",
        status="True" if phase == "Ready" else "False",
        reason=reason,
        message=message,
        last_transition_time="",
        observed_generation=generation,
    )

    # The fields of ModelFacts are also fields of a status.
    facts_by_name = structs.asdict(facts)
    status = ModelStatus(observed_generation=generation, phase=phase, conditions=[ready], **facts_by_name)
    return structs.replace(model, status=status)


def build_host_service(service: InferenceService) -> InferenceService:
    """Return the service as one for a host, without the fields about pods, and about the number of its replicas."""
    hardware = ServiceHardware(accelerator="metal")
    pod_defaults = {attribute: getattr(_DEFAULT_SPEC, attribute) for attribute in _POD_FIELDS}
    spec = structs.replace(service.spec, hardware=hardware, scaling=None, **pod_defaults)
    return structs.replace(service, spec=spec)


def _build_uid(namespace: str, name: str) -> str:
    """Return a uid that is the same in the next run, which can then adopt the engine of this run."""
    return STANDALONE + hashlib.sha256(f"{namespace}/{name}".encode()).hexdigest()[:16]
