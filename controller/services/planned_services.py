"""Manifests in a copy of the cluster, as if they were applied: the pods and MetalProcesses that services would get.

The decisions are those of the reconciler of services. The rollout is shortened to its end: all new replicas are there
at once, and the queue decides which of them start.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Final, NamedTuple

from controller.models.served import format_of, list_companions
from controller.placement.candidate_room import CandidateRoom, ProspectiveReplica, RoomCounter, restrict_to_volume_nodes
from controller.placement.cluster_copy import ClusterCopy
from controller.placement.forecast import forecast
from controller.placement.pod_units import find_template
from controller.placement.queue_places import find_place, format_place
from controller.placement.queued_service import read_template_mark
from controller.reconcile.conditions import find
from controller.reconcile.indexes import SERVICE_INDEX, namespaced
from controller.reconcile.plan import Snapshot
from controller.reconcile.stamp import ANNOTATION_INPUTS, is_desired
from controller.reconcile.triggers import is_gated
from controller.services.accelerator_choice import choose_accelerators
from controller.services.checked_replica import read_models
from controller.services.class_speeds import SpeedAssessor, cut_speeds
from controller.services.planned_models import ModelHeaders, assume_inspection, revise
from controller.services.preconditions import ServiceProblem
from controller.services.service_view import ViewFacts, build_view
from controller.services.serving_choice import choose_serving
from controller.services.speed_report import SpeedSources
from controller.services.status import ServiceView
from crds.inferenceservice import InferenceService
from crds.meta import ENQUEUED_AT, POD_TEMPLATE, without_defaults
from crds.model import Model
from crds.placement import ClassSpeed
from kube.client import Obj
from kube.resources import (
    DEPLOYMENTS,
    INFERENCE_SERVICES,
    METAL_PROCESSES,
    MODELS,
    PODS,
    ObjectKey,
    Resource,
    object_key,
)
from kube.time import rfc3339

_NO_HEADERS: Final[ModelHeaders] = {}
_TEMPLATE: Final = "planned"
_NEW_VERSION: Final = "1"


class PlannedService(NamedTuple):
    """One service of the manifests."""

    key: ObjectKey
    problem: ServiceProblem | None = None
    """The reason why it would get no replica yet."""
    notes: tuple[str, ...] = ()
    """Assumptions about it, and what the queue does not decide."""


class _CopiedRooms:
    """The room of accelerators once all that waits in a copy has got its place, or will never get one."""

    def __init__(self, copy: ClusterCopy, now: datetime) -> None:
        self._copy, self._now = copy, now
        self._counter: RoomCounter | None = None

    def count(self, prospect: ProspectiveReplica) -> CandidateRoom:
        """Return the room for replicas like this one that is left once all that waits in the copy has its place."""
        if self._counter is None:  # at the first call, forecast the queue of the copy to its end
            copy, now = self._copy, self._now
            end_of_queue = forecast(copy.list_cells(), copy.list_units(now), copy.rules, now.timestamp())
            self._counter = RoomCounter(end_of_queue.cells, end_of_queue.round, planned=end_of_queue.cells)
        # A volume that has not been read yet counts as one that is anywhere.
        return self._counter.count(
            restrict_to_volume_nodes(prospect, lambda pod: self._copy.volumes.find_nodes(pod) or None)
        )

    def follow(self, service: ObjectKey, prospects: Mapping[str, ProspectiveReplica]) -> None:
        """Do nothing: a plan is made once."""

    def free_seconds(self, service: ObjectKey, accelerator: str) -> float:  # noqa: ARG002 - part of the protocol
        """Return 0: no time passes in a plan."""
        return 0.0


def plan_services(
    copy: ClusterCopy, manifests: Iterable[Obj], now: datetime, headers: ModelHeaders = _NO_HEADERS
) -> list[PlannedService]:
    """Put Models and InferenceServices into a copy of the cluster, with the replicas that they would get.

    Args:
        copy: the copy, which is changed.
        manifests: the manifests, each with its namespace.
        now: the wall clock.
        headers: what was read in the headers of Models that the cluster has not inspected.
    """
    models_first = sorted(manifests, key=lambda manifest: manifest["kind"] != "Model")
    speeds = SpeedSources(assessor=SpeedAssessor(copy.registry.list_classes, copy.measured, copy.settings.pods.vendors))

    # The services, and a note for each Model of which something is assumed.
    keys, assumed = list[ObjectKey](), dict[ObjectKey, str]()
    for manifest in models_first:
        key = object_key(manifest)
        resource = MODELS if manifest["kind"] == "Model" else INFERENCE_SERVICES
        earlier = copy.store.get(resource, key.name, key.namespace)
        _put_manifest(copy, resource, manifest, now)

        if resource == INFERENCE_SERVICES:
            keys.append(key)
        elif note := assume_inspection(copy, key, earlier, headers, now):
            assumed[key] = note

    # Once all manifests are there, put the replicas of the services.
    return [_plan_service(copy, key, now, speeds, assumed) for key in keys]


def _put_manifest(copy: ClusterCopy, resource: Resource, manifest: Obj, now: datetime) -> None:
    """Put a manifest into the copy; of an object that exists, fields that the manifest leaves out stay."""
    key = object_key(manifest)
    existing = copy.store.get(resource, key.name, key.namespace)
    if existing is None:
        metadata = manifest["metadata"] | _identify(resource, key, now) | {"generation": 1}
        copy.store.put(resource, {**manifest, "metadata": metadata, "status": {}})
        return

    spec = {**existing["spec"], **manifest["spec"]}
    if spec != existing["spec"]:
        generation = existing["metadata"].get("generation", 1) + 1
        copy.store.put(resource, revise({**existing, "spec": spec}, generation=generation))


def _identify(resource: Resource, key: ObjectKey, now: datetime) -> Obj:
    """Return the metadata that the API server would give to a new object."""
    return {
        "uid": f"{_TEMPLATE}-{resource.kind}-{key.namespace}.{key.name}",
        "resourceVersion": _NEW_VERSION,  # `revise` counts it up
        "creationTimestamp": rfc3339(now),
    }


def _plan_service(
    copy: ClusterCopy, key: ObjectKey, now: datetime, speeds: SpeedSources, assumed: Mapping[ObjectKey, str]
) -> PlannedService:
    """Put the replicas that a service would get into the copy; return its problem, and notes about what is assumed.

    With a problem (a blocker, because of which the controller would create no replica), no replica is put.
    """
    # 1. Read the service, and note what is assumed about its Models.
    snapshot = Snapshot(copy.store, now)
    service = snapshot.read(INFERENCE_SERVICES, key, InferenceService)
    if service is None:
        problem = ServiceProblem("InvalidSpec", "its fields cannot be read: see `pomona deploy --dry-run`", "Failed")
        return PlannedService(key, problem)
    service = choose_serving(copy.store, service, *read_models(snapshot, service), copy.settings.pods)
    model_key = ObjectKey(key.namespace, service.spec.model_ref)
    models = (model_key, *(ObjectKey(key.namespace, companion.name) for companion in list_companions(service.spec)))
    notes = tuple(assumed[model] for model in models if model in assumed)
    notes += _assume_weights(copy, snapshot.read(MODELS, model_key, Model))

    # 2. Decide about it as the controller would.
    rooms, pods = _CopiedRooms(copy, now), copy.settings.pods
    chosen = choose_accelerators(snapshot, service, pods, rooms, find_speeds=speeds.find_speeds)
    # The view has what follows from the store: the replicas, and the blocker if none can be created.
    view = build_view(snapshot, key, service, pods, ViewFacts(accelerator_choice=chosen))
    if view.blocker is not None and view.wanted:
        return PlannedService(key, _explain_problem(view.blocker), notes)
    if chosen is not None and view.wanted:
        notes += (chosen.status.message,)
    if service.status.serving is not None and service.status.serving.message:
        notes += (service.status.serving.message,)

    # 3. Put its status, pods and processes into the copy.
    _note_status(copy, view, key, speeds.report(snapshot, key, view, pods.vendors).classes)
    _put_processes(copy, view, now)
    bypasses_queue = _put_pods(copy, view, key, now)
    if view.wanted and bypasses_queue:
        other = "Kueue admits" if service.spec.scheduling.mode == "Kueue" else "Kubernetes' scheduler places"
        notes += (f"{other} its pods: the queue gives them nothing",)
    return PlannedService(key, None, notes)


def _note_status(copy: ClusterCopy, view: ServiceView, key: ObjectKey, classes: Sequence[ClassSpeed]) -> None:
    """Put what the queue reads of a service into its status: the speeds of a replica, and its memory on each device.

    The controller writes both before the first replica waits.
    """
    obj = copy.store.get(INFERENCE_SERVICES, key.name, key.namespace)
    if obj is None:
        return
    status: Obj = {"observedGeneration": obj["metadata"].get("generation")}
    status["speeds"] = [without_defaults(speed) for speed in cut_speeds(classes)]
    if (device_bytes := view.memory.device_bytes_each) is not None:
        status["deviceMemoryBytes"] = device_bytes
    copy.store.put(INFERENCE_SERVICES, revise({**obj, "status": {**(obj.get("status") or {}), **status}}))


def _explain_problem(problem: ServiceProblem) -> ServiceProblem:
    """Return the problem, with what to do before the plan can be made, if something is unknown until then."""
    if problem.reason == "Downloading":
        copies = "no plan tells on which nodes its copies will be: apply the Model, and plan again once it has some"
        return problem._replace(message=f"{problem.message}: {copies}")
    if problem.reason != "ModelNotReady":
        return problem
    unknown = (
        "the memory of its replicas is unknown until then, so state its spec.memoryBytes, or apply the Model first, "
        "and plan again"
    )
    return problem._replace(message=f"{problem.message}: {unknown}")


def _assume_weights(copy: ClusterCopy, model: Model | None) -> tuple[str, ...]:
    """Assume the weights of a Model that has been inspected to be on its volume; return a note that says so."""
    # The Ollama of each pod pulls its model by itself.
    if model is None or model.spec.cache.scope == "node" or format_of(model) == "ollama":
        return ()

    # Only those of a Model that is Ready, and that are not on the volume yet.
    ready, cached = (find(model.status.conditions, kind) for kind in ("Ready", "Cached"))
    if ready is None or ready.status != "True" or cached is None or cached.status == "True":
        return ()

    # Set the condition Cached to True in the copy.
    obj = copy.store.get(MODELS, model.metadata.name, model.metadata.namespace)
    if obj is None:
        return ()
    conditions = [
        {**condition, "status": "True"} if condition["type"] == "Cached" else condition
        for condition in obj["status"]["conditions"]
    ]
    copy.store.put(MODELS, revise({**obj, "status": {**obj["status"], "conditions": conditions}}))
    return (f"after the weights of Model {model.metadata.name} have been fetched",)


def _put_pods(copy: ClusterCopy, view: ServiceView, key: ObjectKey, now: datetime) -> bool:
    """Put the new pods of a service into the copy, and remove those that it needs no more.

    Returns whether a new pod bypasses the queue, because Kueue or Kubernetes' scheduler places it.
    """
    pods_of: dict[str, list[Obj]] = {}
    """The pods that stay, by the name of their Deployment; those that are being deleted do not."""
    for pod in copy.store.by_index(PODS, SERVICE_INDEX, namespaced(*key)):
        if "deletionTimestamp" not in pod["metadata"]:
            pods_of.setdefault(find_template(pod)[0], []).append(pod)  # find_template: name, then template

    if not view.wanted:
        for pods in pods_of.values():
            _remove_pods(copy, pods)

    bypasses_queue = False
    for _, desired in view.replicas.apply:  # the Deployments to write
        existing = pods_of.get(desired["metadata"]["name"], [])
        new_pods = _roll_out(copy, desired, existing, now)
        bypasses_queue = bypasses_queue or not all(is_gated(pod) for pod in new_pods)
    return bypasses_queue


def _roll_out(copy: ClusterCopy, desired: Obj, existing: Sequence[Obj], now: datetime) -> list[Obj]:
    """Put a Deployment and its new pods into the copy, and remove its pods that are too many; return the new ones.

    If its template changes, it gets all of its pods anew: earlier ones that have a node stay beside them, and those
    that wait are removed and leave the new ones their places in the queue. `mark` is the pods' annotation with the
    identifier of their template, and `template` the part of their names that stands for it.
    """
    name, namespace = desired["metadata"]["name"], desired["metadata"]["namespace"]
    observed = copy.store.get(DEPLOYMENTS, name, namespace)
    wanted: int = desired["spec"]["replicas"]
    inherited_places: list[str] = []
    template, mark = _TEMPLATE, read_template_mark(desired["spec"]["template"])

    # 1. Remove pods, and put the Deployment: with its template as it is, only the number of pods changes.
    if observed is not None and _has_template(observed, desired):
        if existing:
            _deployment_name, template = find_template(existing[0])
        mark = read_template_mark(observed["spec"]["template"])
        missing = max(0, wanted - len(existing))
        surplus = max(0, len(existing) - wanted)
        _remove_pods(copy, _sort_by_removal(existing)[:surplus])
    else:  # a new Deployment, or another template
        waiting = [pod for pod in existing if is_gated(pod)]
        placed = _sort_by_removal(pod for pod in existing if not is_gated(pod))
        inherited_places = [format_place(find_place(pod, 0.0)) for pod in waiting]
        missing = wanted
        surplus = max(0, len(placed) - wanted)
        _remove_pods(copy, [*waiting, *placed[:surplus]])
        if observed is not None:
            copy.store.put(DEPLOYMENTS, revise({**observed, "spec": desired["spec"]}))
    if observed is None:
        identity = _identify(DEPLOYMENTS, ObjectKey(namespace, name), now)
        copy.store.put(DEPLOYMENTS, {**desired, "metadata": {**desired["metadata"], **identity, "generation": 1}})

    # 2. Put the new pods; the first inherit the places of the pods that waited.
    new_pods = []
    for number in range(missing):
        annotations = {POD_TEMPLATE: mark}
        if number < len(inherited_places):
            annotations[ENQUEUED_AT] = inherited_places[number]
        pod = _build_pod(desired, f"{name}-{template}", number, annotations, now)
        copy.store.put(PODS, pod)
        new_pods.append(pod)
    return new_pods


def _has_template(observed: Obj, desired: Obj) -> bool:
    """Return whether the pods of a Deployment stay: no user has edited what they follow from, or the templates agree.

    A template may also differ because an update of Pomona is due, which a plan of manifests is not about.
    """
    earlier, later = (
        (deployment["metadata"].get("annotations") or {}).get(ANNOTATION_INPUTS) for deployment in (observed, desired)
    )
    # ANNOTATION_INPUTS is a digest of what the user decides about the pods; the number of pods restarts none.
    same = {**desired, "spec": {**desired["spec"], "replicas": observed["spec"].get("replicas")}}
    return earlier == later or is_desired(same, observed)


def _sort_by_removal(pods: Iterable[Obj]) -> list[Obj]:
    """Return pods in the order in which those go that are too many: first those that wait, and of these the latest."""
    latest_first = sorted(pods, key=lambda pod: str(pod["metadata"].get("creationTimestamp")), reverse=True)
    return sorted(latest_first, key=lambda pod: not is_gated(pod))


def _remove_pods(copy: ClusterCopy, pods: Iterable[Obj]) -> None:
    for pod in pods:
        copy.store.remove(PODS, pod["metadata"]["namespace"], pod["metadata"]["name"])


def _build_pod(deployment: Obj, prefix: str, number: int, annotations: Mapping[str, str], now: datetime) -> Obj:
    """Return a pod as a Deployment would make it by a ReplicaSet named `prefix`."""
    template, namespace = deployment["spec"]["template"], deployment["metadata"]["namespace"]
    key = ObjectKey(namespace, f"{prefix}-new-{number}")
    labels = template["metadata"]["labels"] | {"pod-template-hash": prefix.rpartition("-")[2]}

    # No ReplicaSet is put into the copy. By its name, the queue finds Deployment and template of a pod.
    owner = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": prefix, "uid": prefix, "controller": True}

    metadata = {
        "name": key.name,
        "namespace": namespace,
        **_identify(PODS, key, now),
        "labels": labels,
        "annotations": {**(template["metadata"].get("annotations") or {}), **annotations},
        "ownerReferences": [owner],
    }
    return {"metadata": metadata, "spec": template["spec"], "status": {"phase": "Pending"}}


def _put_processes(copy: ClusterCopy, view: ServiceView, now: datetime) -> None:
    """Put the next MetalProcesses of a service into the copy, and remove those that it deletes.

    One that has a host is only marked as deleted, since it holds its memory until it ends.
    """
    for _, made in view.replicas.create:  # each with its resource
        identity = _identify(METAL_PROCESSES, object_key(made), now)
        copy.store.put(METAL_PROCESSES, {**made, "metadata": {**made["metadata"], **identity}})

    for ref in view.replicas.delete:
        if ref.resource != METAL_PROCESSES:
            continue

        obj = copy.store.get(METAL_PROCESSES, ref.name, ref.namespace)
        if obj is not None and obj["spec"].get("hostName"):
            copy.store.put(METAL_PROCESSES, revise(obj, deletionTimestamp=rfc3339(now)))
        else:
            copy.store.remove(METAL_PROCESSES, ref.namespace, ref.name)
