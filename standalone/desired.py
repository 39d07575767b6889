"""What this machine runs for a service: the controller's own decisions, with this machine as the one accelerator.

A cluster chooses between pods and hosts; here there is one place. So a service is read as one for a host, and fields
that are about pods are named in a note instead of being a reason not to serve: the file is the one for the cluster.
"""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

import msgspec
from msgspec import structs

from artifacts.errors import ArtifactError
from artifacts.inspect import Inspection
from controller import requirements
from controller.jobs import Answer
from controller.parts import Served, read_parts
from controller.plan import Key
from controller.processes import desired_spec, family
from controller.requirements import Problem
from controller.weights import Facts
from crds.inferenceservice import InferenceService, InferenceServiceSpec
from crds.meta import Condition
from crds.model import Model, ModelStatus
from metal_agent.assignments import STANDALONE, Assignment

_POD_FIELDS: Final = {
    "resources": "resources",
    "image": "image",
    "node_selector": "nodeSelector",
    "tolerations": "tolerations",
}


class Decision(NamedTuple):
    """What is decided for one service."""

    assignments: tuple[Assignment, ...] = ()
    """Its replicas; the same ones whenever it is decided anew."""
    problem: Problem | None = None
    """Why there are none."""


def decide(service: InferenceService, models: Mapping[Key, Model]) -> Decision:
    """Decide what runs for a service, out of Models with what is known of them."""
    metadata, here = service.metadata, _on_this_machine(service)
    wanted = 0 if service.spec.suspend else service.spec.replicas
    if not wanted:
        field = "spec.suspend is true" if service.spec.suspend else "spec.replicas is 0"
        return Decision(problem=Problem("Suspended", f"{field}: edit the file to serve it", "Suspended"))
    model = models.get(Key(metadata.namespace, service.spec.model_ref))
    parts = read_parts(models.get, service)
    problem = requirements.spec_problem(here, model, parts) or requirements.model_problem(here, model, parts)
    served = Served(model, parts) if model is not None else None
    if problem is None and served is not None:
        problem = requirements.memory_problem(here, served)
    memory = requirements.memory_bytes(here, served) if problem is None and served is not None else None
    if served is None or memory is None:
        return Decision(problem=problem)
    spec = desired_spec(here, served, memory)
    name = family(metadata.name, spec)
    names = (f"{name}-{number}" for number in range(wanted))
    return Decision(tuple(Assignment(_uid(metadata.namespace, each), metadata.namespace, each, spec) for each in names))


def notes(services: Iterable[InferenceService]) -> list[str]:
    """Say what of the services holds in a cluster only."""
    found = []
    for service in services:
        spec, name = service.spec, service.metadata.name
        if spec.hardware.accelerator == "nvidia":
            found.append(f"{name}: hardware.accelerator nvidia: served by this machine instead")
        fields = [field for attribute, field in _POD_FIELDS.items() if getattr(spec, attribute) != _default(attribute)]
        if fields:
            found.append(f"{name}: {', '.join(fields)}: about pods, and not used here")
    return found


def inspected(model: Model, found: Inspection) -> Model:
    """Return the Model with what its header says, as the controller would write it."""
    facts = Facts.of_answer(model, msgspec.convert(found, Answer, from_attributes=True))
    if model.spec.source.startswith("file://"):
        # A cluster cannot know it: the same process there must be recognised as this one.
        facts = structs.replace(facts, revision="")
    return _with_status(model, "Ready", true=True, reason="Inspected", message=facts.file, facts=facts)


def stated(model: Model) -> Model:
    """Return a Model that nobody here can read as ready, by what its owner states."""
    return _with_status(model, "Ready", true=True, reason="HostInspects", message=model.spec.source, facts=Facts())


def failed(model: Model, error: ArtifactError) -> Model:
    """Return the Model with why it cannot be read."""
    phase = "Pending" if error.retryable else "Failed"
    return _with_status(model, phase, true=False, reason=error.reason, message=error.message, facts=Facts())


def _with_status(model: Model, phase: str, *, true: bool, reason: str, message: str, facts: Facts) -> Model:
    generation = model.metadata.generation
    status = ModelStatus(
        observed_generation=generation,
        phase="Ready" if true else "Failed" if phase == "Failed" else "Pending",
        conditions=[
            Condition(
                type="Ready",
                status="True" if true else "False",
                reason=reason,
                message=message,
                last_transition_time="",
                observed_generation=generation,
            )
        ],
        **structs.asdict(facts),
    )
    return structs.replace(model, status=status)


def _on_this_machine(service: InferenceService) -> InferenceService:
    """Read a service as one for a host outside a cluster."""
    hardware = structs.replace(service.spec.hardware, accelerator="metal")
    of_pods = {attribute: _default(attribute) for attribute in _POD_FIELDS}
    return structs.replace(service, spec=structs.replace(service.spec, hardware=hardware, **of_pods))


def _default(attribute: str) -> object:
    return getattr(InferenceServiceSpec(model_ref=""), attribute)


def _uid(namespace: str, name: str) -> str:
    """Make the same uid for the same process, so that the next run takes over what an earlier one left."""
    return STANDALONE + hashlib.sha256(f"{namespace}/{name}".encode()).hexdigest()[:16]
