"""The queue's part of `pomona simulate`: what its planner would do with a further service, over a copy of the cluster.

The cluster is read once, for the fit as well, with the rights of the user: one who may not read the whole cluster gets
the fit alone.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

import click

from cli.api_objects import Obj

if TYPE_CHECKING:
    from cli.cluster_access import Cluster
    from cli.queue.planning import ManifestPlan
    from console.density_models import KnownModel
    from controller.placement.cluster_copy import QueueReading
    from kube.resources import Resource
    from kube.store import Store

SIMULATED: Final = "what-if"
"""Name of the service, and the begin of that of its Model, if no Model of the cluster is as it was asked."""


class WantedService(NamedTuple):
    """The service that is simulated; None is what the user has not stated."""

    replicas: int = 1
    priority: str | None = None
    accelerator: str | None = None
    """None: any that has room."""
    devices: int | None = None
    context: int | None = None
    memory_bytes: int | None = None
    quantization: str | None = None


class SimulatedQueue(NamedTuple):
    """The effect of the service on the queue."""

    plan: "ManifestPlan | None" = None
    """None: the user may not read what it follows from."""
    problem: str = ""
    """The reason why it is unknown."""

    @property
    def has_starts(self) -> bool:
        """True if a replica of the service would start."""
        if self.plan is None:
            return False
        keys = {service.key for service in self.plan.services}
        return any(change.fate.state == "starts" and change.fate.unit.service in keys for change in self.plan.changes)


async def simulate_queue(
    cluster: "Cluster", model: "KnownModel", reading: "QueueReading", wanted: WantedService
) -> SimulatedQueue:
    """Return what the planner would do with a further service.

    Args:
        cluster: the cluster.
        model: its model, in the quantization that was asked.
        reading: the cluster as it was read.
        wanted: the service.

    Raises:
        click.UsageError: the API server would refuse the service.
        ApiError: the API server refuses.
        Unreachable: the API server does not answer.
    """
    from cli.queue.model_headers import build_header  # noqa: PLC0415 - not needed for --help
    from cli.queue.planning import copy_for_plan, plan_manifests  # noqa: PLC0415 - same
    from controller.placement.cluster_copy import copy_reading  # noqa: PLC0415 - same
    from kube.resources import ObjectKey  # noqa: PLC0415 - same

    manifests = build_manifests(model, reading.view.store, wanted, model.namespace or cluster.namespace)
    try:
        copied = await copy_for_plan(cluster, copy_reading(cluster.client, reading))
    except click.ClickException as error:
        return SimulatedQueue(problem=error.message)
    header = build_header(model, wanted.accelerator) if len(manifests) > 1 else None
    key = ObjectKey(manifests[0]["metadata"]["namespace"], manifests[0]["metadata"]["name"])
    headers = {key: header} if header is not None else {}
    return SimulatedQueue(await plan_manifests(cluster.client, copied, manifests, headers))


def build_manifests(model: "KnownModel", store: "Store", wanted: WantedService, namespace: str) -> list[Obj]:
    """Return the service, and before it its Model, unless that of the cluster is as it was asked.

    Raises:
        click.UsageError: the API server would refuse one of them.
    """
    from crds import validation  # noqa: PLC0415 - not needed for --help
    from crds.meta import API_VERSION, AUTO_ACCELERATOR  # noqa: PLC0415 - same
    from kube.resources import INFERENCE_SERVICES, MODELS  # noqa: PLC0415 - same

    def name_free(resource: "Resource", name: str) -> str:
        taken = {manifest["metadata"]["name"] for manifest in store.list(resource)}
        while name in taken:
            name += "-again"
        return name

    def build(kind: str, name: str, spec: Obj) -> Obj:
        return {
            "apiVersion": API_VERSION,
            "kind": kind,
            "metadata": {"name": name, "namespace": namespace},
            "spec": spec,
        }

    made, served = list[Obj](), model.name
    if not model.namespace or wanted.quantization is not None or wanted.memory_bytes is not None:
        served = name_free(MODELS, f"{SIMULATED}-model")
        stored = store.get(MODELS, model.name, model.namespace) if model.namespace else None
        spec = dict(stored["spec"]) if stored is not None else {"source": model.source}
        if wanted.quantization is not None:
            spec.pop("memoryBytes", None)  # it is that of the other quantization
        spec |= {"memoryBytes": wanted.memory_bytes} if wanted.memory_bytes is not None else {}
        made.append(build("Model", served, spec))
    accelerator = wanted.accelerator or AUTO_ACCELERATOR
    hardware = {"accelerator": accelerator, **({"count": wanted.devices} if wanted.devices is not None else {})}
    spec = {"modelRef": served, "replicas": wanted.replicas, "hardware": hardware}
    spec |= {"priority": wanted.priority} if wanted.priority is not None else {}
    spec |= {"contextLength": wanted.context} if wanted.context is not None else {}
    spec |= {"mode": model.mode} if model.mode != "chat" else {}
    made.append(build("InferenceService", name_free(INFERENCE_SERVICES, SIMULATED), spec))
    if problems := [str(problem) for manifest in made for problem in validation.problems(manifest)]:
        raise click.UsageError("; ".join(problems))
    return made


def list_remaining(plan: "ManifestPlan") -> list[tuple[str, Mapping[str, int]]]:
    """Return what is left of each node and host on which a replica starts."""
    touched = {cell for change in plan.changes if change.fate.state == "starts" for cell in change.fate.cells}
    return [(cell.id, _choose_amounts(cell.free)) for cell in plan.after.cells if cell.id in touched]


def _choose_amounts(free: Mapping[str, int]) -> Mapping[str, int]:
    from controller.placement.units import MEMORY  # noqa: PLC0415 - not needed for --help

    return {name: amount for name, amount in sorted(free.items()) if name == MEMORY or "/" in name}


def print_queue(queue: SimulatedQueue) -> None:
    """Print the effect on the queue for people."""
    from cli.output import progress_width, terminal_width, wrap_text  # noqa: PLC0415 - not needed for --help
    from cli.queue.fate_table import INCOMPLETE, render_changes  # noqa: PLC0415 - same
    from cli.queue.plan import explain_services  # noqa: PLC0415 - same

    if queue.plan is None:
        click.echo(f"the queue is not simulated: {queue.problem}", err=True)
        return
    changes = queue.plan.changes
    print()
    print(render_changes(changes, progress_width()) if changes else "the queue would start no replica")
    for line in (
        *explain_services(queue.plan.services),
        *_describe_remaining(queue.plan),
        *(() if queue.plan.after.is_complete else (INCOMPLETE,)),
    ):
        print("\n".join(wrap_text(line, terminal_width())))


def _describe_remaining(plan: "ManifestPlan") -> list[str]:
    from controller.placement.units import MEMORY  # noqa: PLC0415 - not needed for --help
    from crds.size import size_text  # noqa: PLC0415 - same

    return [
        f"left on {cell}: "
        + ", ".join(f"{name}: {size_text(amount) if name == MEMORY else amount}" for name, amount in free.items())
        for cell, free in list_remaining(plan)
    ]


def build_queue_facts(queue: SimulatedQueue) -> Obj:
    """Return the effect on the queue for programs."""
    from cli.queue.fate_table import build_changes  # noqa: PLC0415 - not needed for --help

    if queue.plan is None:
        return {"isKnown": False, "problem": queue.problem}
    plan = queue.plan
    (service,) = plan.services
    problem = service.problem
    return {
        "isKnown": True,
        "problem": f"{problem.reason}: {problem.message}" if problem is not None else "",
        "notes": list(service.notes),
        "replicas": build_changes(plan.changes),
        "remaining": [{"cell": cell, "free": dict(free)} for cell, free in list_remaining(plan)],
        "isComplete": plan.after.is_complete,
    }
