"""The queue's part of `pomona simulate`: what its planner would do with a further service, over a copy of the cluster.

The cluster is read once, for the fit as well, with the rights of the user: one who may not read the whole cluster gets
the fit alone.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

import click
from msgspec import structs

from cli.api_objects import Obj
from cli.cluster_access import Cluster
from cli.density.reading import open_density, report_uncounted
from cli.output import print_note, progress_width
from cli.queue.controller_settings import StatedSettings, read_settings
from cli.queue.model_headers import build_header
from cli.queue.plan_output import QueuePlan, build_changes, print_changes
from cli.queue.planning import copy_for_plan, plan_manifests, read_queue
from console.density_answers import SimulateAnswer, SimulateRequest
from console.density_models import KnownModel
from console.density_simulation import find_asked_model, simulate_model
from controller.placement.cluster_copy import QueueReading, QueueSettings, copy_reading
from controller.placement.units import MEMORY
from crds import validation
from crds.meta import API_VERSION, AUTO_ACCELERATOR
from crds.size import GIB, size_text
from devices.vendors import VENDORS, Vendors
from kube.resources import INFERENCE_SERVICES, MODELS, ObjectKey, Resource
from kube.store import Store

SIMULATED: Final = "what-if"
"""Name of the simulated service; the name of a simulated Model begins with it."""


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

    plan: QueuePlan | None = None
    """None: the user may not read what it follows from."""
    problem: str = ""
    """The reason why it is unknown."""

    @property
    def has_starts(self) -> bool:
        """True if a replica of the service would start."""
        if self.plan is None:
            return False
        # plan.services are those of the simulated manifests; the fate of a unit, one replica, says whether it starts.
        keys = {service.key for service in self.plan.services}
        return any(change.fate.state == "starts" and change.fate.unit.service in keys for change in self.plan.changes)


async def simulate_service(
    cluster: Cluster, vendors: Vendors, request: SimulateRequest, wanted: WantedService, stated: StatedSettings
) -> tuple[SimulateAnswer, SimulatedQueue]:
    """Return where a service fits, and what the queue would do with it, by one reading of the cluster.

    Where the queue cannot be simulated, as the controller's options or parts of the cluster may not be read, the second
    result has the problem, and the first is still complete.

    Args:
        cluster: the cluster.
        vendors: the accelerators, in place of those of the controller where they are not the built-in ones.
        request: the model, with the checked values that the user has stated.
        wanted: the service, without these values.
        stated: options of the controller.

    Raises:
        click.ClickException: nodes may not be read.
        SimulationRefused: there is no such model, or a value is impossible.
        ApiError: the API server refuses.
        Unreachable: the API server does not answer.
    """
    # 1. Read the controller's options, and the cluster; the fit needs the cluster even if the queue has a problem.
    # `problem` says why the queue cannot be simulated, and `note_of_assumptions` names options that are guessed.
    settings, note_of_assumptions, problem = QueueSettings(), "", ""
    try:
        settings, note_of_assumptions = await read_settings(cluster, stated)
    except click.ClickException as error:
        problem = error.message

    # --vendors of this command counts more than the controller's own.
    if vendors is not VENDORS:
        settings = settings._replace(pods=structs.replace(settings.pods, vendors=vendors))
    reading = await read_queue(cluster, settings)
    report_uncounted(reading.refusals)

    # 2. Where it fits.
    # snapshot: the cluster at one moment; table: computes the fits on it
    snapshot, table = open_density(reading.view)
    answer = simulate_model(snapshot, table, None, request)

    # 3. What the queue would do.
    if problem:
        return answer, SimulatedQueue(problem=problem)
    memory_bytes = round(request.memory_gb * GIB) if request.memory_gb is not None else None
    wanted = wanted._replace(context=request.context, memory_bytes=memory_bytes, quantization=request.quantization)
    queue = await _simulate_queue(cluster, find_asked_model(snapshot, None, request), reading, wanted)
    if note_of_assumptions and queue.plan is not None:
        click.echo(note_of_assumptions, err=True)
    return answer, queue


async def _simulate_queue(
    cluster: Cluster, model: KnownModel, reading: QueueReading, wanted: WantedService
) -> SimulatedQueue:
    """Return what the queue's planner would do with a further service, or the problem if the user lacks rights for it.

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
    manifests = build_manifests(model, reading.view.store, wanted, model.namespace or cluster.namespace)
    try:
        copied = await copy_for_plan(cluster, copy_reading(cluster.client, reading))
    except click.ClickException as error:
        return SimulatedQueue(problem=error.message)

    # With a Model of its own, the service comes second; the cluster has not inspected that Model, so state its header.
    is_new_model = len(manifests) > 1
    header = build_header(model, wanted.accelerator) if is_new_model else None
    # The planner takes headers by the namespace and name of the Model.
    key = ObjectKey(manifests[0]["metadata"]["namespace"], manifests[0]["metadata"]["name"])
    headers = {key: header} if header is not None else {}
    return SimulatedQueue(await plan_manifests(cluster.client, copied, manifests, headers))


def build_manifests(model: KnownModel, store: Store, wanted: WantedService, namespace: str) -> list[Obj]:
    """Return the manifests of the simulated service and, before it, of its Model unless one of the cluster will do.

    Args:
        model: the model; without a namespace it is one of the catalog, and no Model of the cluster.
        store: the objects of the cluster, whose names are taken.
        wanted: the service; another quantization or memory than that of the Model needs a Model of its own.
        namespace: the namespace of both.

    Raises:
        click.UsageError: the API server would refuse one of them.
    """

    def find_unused_name(resource: Resource, name: str) -> str:
        """Return the name, with `-again` at its end until no object of this kind in the cluster has it.

        `store` has the objects of the cluster. The simulated object must not replace one of them in the plan.
        """
        taken = {manifest["metadata"]["name"] for manifest in store.list(resource)}
        while name in taken:
            name += "-again"
        return name

    def build(kind: str, name: str, spec: Obj) -> Obj:
        """Return the manifest of one object."""
        metadata = {"name": name, "namespace": namespace}
        return {"apiVersion": API_VERSION, "kind": kind, "metadata": metadata, "spec": spec}

    # 1. A Model, unless one of the cluster is as wanted. It has the spec of the stored one, but for its memory; another
    # quantization is stated by its header, which the caller adds.
    manifests, model_name = list[Obj](), model.name
    if not model.namespace or wanted.quantization is not None or wanted.memory_bytes is not None:
        model_name = find_unused_name(MODELS, f"{SIMULATED}-model")
        stored = store.get(MODELS, model.name, model.namespace) if model.namespace else None
        spec = dict(stored["spec"]) if stored is not None else {"source": model.source}
        if wanted.quantization is not None:
            spec.pop("memoryBytes", None)  # it is the memory of the stored quantization
        if wanted.memory_bytes is not None:
            spec["memoryBytes"] = wanted.memory_bytes
        manifests.append(build("Model", model_name, spec))

    # 2. The service.
    hardware: Obj = {"accelerator": wanted.accelerator or AUTO_ACCELERATOR}
    if wanted.devices is not None:
        hardware["count"] = wanted.devices
    spec = {"modelRef": model_name, "replicas": wanted.replicas, "hardware": hardware}
    stated = {"priority": wanted.priority, "contextLength": wanted.context}
    spec |= {name: value for name, value in stated.items() if value is not None}
    if model.mode != "chat":
        spec["mode"] = model.mode
    manifests.append(build("InferenceService", find_unused_name(INFERENCE_SERVICES, SIMULATED), spec))

    if problems := [str(problem) for manifest in manifests for problem in validation.problems(manifest)]:
        raise click.UsageError("; ".join(problems))
    return manifests


def list_remaining(plan: QueuePlan) -> list[tuple[str, Mapping[str, int]]]:
    """Return, for each cell (a node or host) where the plan starts a replica, the memory and devices free after it."""
    # A fate is what becomes of a replica in the plan; cell.free: the amounts that are free there, by resource.
    touched = {cell_id for change in plan.changes if change.fate.state == "starts" for cell_id in change.fate.cells}
    # The names of devices have a slash, such as nvidia.com/gpu.
    return [
        (cell.id, {name: amount for name, amount in sorted(cell.free.items()) if name == MEMORY or "/" in name})
        for cell in plan.after.cells
        if cell.id in touched
    ]


def print_queue(queue: SimulatedQueue) -> None:
    """Print the effect on the queue for people."""
    if queue.plan is None:
        print_note(f"the queue is not simulated: {queue.problem}")
        return
    remaining = [
        f"left on {cell}: "
        + ", ".join(f"{name}: {size_text(amount) if name == MEMORY else amount}" for name, amount in free.items())
        for cell, free in list_remaining(queue.plan)
    ]
    print()
    print_changes(queue.plan, progress_width(), "the queue would start no replica", remaining)


def build_queue_facts(queue: SimulatedQueue) -> Obj:
    """Return the effect on the queue for programs."""
    if queue.plan is None:
        return {"isKnown": False, "problem": queue.problem}
    plan = queue.plan
    (service,) = plan.services  # the plan is about the simulated service alone
    problem = service.problem
    return {
        "isKnown": True,
        "problem": f"{problem.reason}: {problem.message}" if problem is not None else "",
        "notes": list(service.notes),
        "replicas": build_changes(plan.changes),
        "remaining": [{"cell": cell, "free": dict(free)} for cell, free in list_remaining(plan)],
        "isComplete": plan.after.is_complete,
    }
