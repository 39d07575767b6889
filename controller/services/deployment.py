"""The replicas of a service in pods: Deployment, state of the pods, and the Service in front of all replicas."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Final

from controller.models.served import Companion, Served, cache_path, cached_claim, format_of, runtime_of
from controller.placement.nodes import find_largest_memory
from controller.pod_settings import DEFAULT_SETTINGS, PodSettings
from controller.reconcile.indexes import SERVICE_INDEX, namespaced
from controller.reconcile.plan import Patch, Snapshot, child, ref
from controller.reconcile.stamp import is_desired, stamp
from controller.reconcile.triggers import is_scheduled
from controller.services import diagnosis, replica_memory
from controller.services.devices import request_devices
from controller.services.key_proxy import PORT_NAME
from controller.services.pod_template import EngineChoice, MountedWeights, build_pod
from controller.services.preconditions import ServiceProblem
from controller.services.replicas import Replicas
from crds.inferenceservice import InferenceService
from crds.meta import LABEL_MANAGED_BY, LABEL_SERVICE, MANAGED_BY, TOKEN_ROTATION, Accelerator
from crds.model import Model
from crds.quantity import quantity_bytes
from crds.size import size_text
from devices.vendors import Vendor
from kube.client import Obj
from kube.resources import DEPLOYMENTS, INFERENCE_SERVICES, PODS, SERVICES, Resource
from runtimes.pod import SERVICE_PORT

_ENDED: Final = frozenset({"Succeeded", "Failed"})


def observe_pods(
    snapshot: Snapshot,
    service: InferenceService,
    accelerator: Accelerator | None,
    served: Served | None,
    wanted: int,
    *,
    settings: PodSettings,
) -> Replicas:
    """Return replicas in pods. Without `served`, existing pods count as wanted and are only scaled down."""
    observed = next(iter(snapshot.children(DEPLOYMENTS, service.metadata.namespace, service.metadata.uid)), None)
    desired: tuple[tuple[Resource, Obj], ...] = ()
    vendor = settings.vendors.get(accelerator or "")
    if wanted and served is not None and accelerator is not None and vendor is not None and vendor.in_pods:
        stated = service.spec.resources.memory
        devices = request_devices(service, vendor).number
        memory = replica_memory.container_bytes(service, served, devices) if stated is None else stated
        companions = [
            (companion, _weights(companion.model)) for companion in served.companions if companion.model is not None
        ]
        if memory is not None:
            estimated = replica_memory.estimate_pod_memory(service, served, devices)
            cache_bytes = estimated.cache_bytes if estimated is not None else None
            runtime = runtime_of(service, served.model)
            choice = EngineChoice(runtime, accelerator, vendor, memory, cache_bytes, service.spec.container)
            made = deployment(service, choice, _weights(served.model), companions, settings=settings)
            is_estimate = stated is None and not replica_memory.is_memory_stated(served)
            resource, wanted_deployment = _keep_pods(made, observed, is_estimate=is_estimate) if observed else made
            desired = ((resource, stamp(wanted_deployment)),)
    if observed is None:
        return Replicas(total=0, apply=desired)
    named = namespaced(service.metadata.namespace, service.metadata.name)
    pods = [
        pod for pod in snapshot.store.by_index(PODS, SERVICE_INDEX, named) if "deletionTimestamp" not in pod["metadata"]
    ]
    ready = sorted(pod["metadata"]["uid"] for pod in pods if _is_ready(pod))
    current = _current_ready(observed, desired, len(ready)) if desired or served is None else 0
    problems = [
        diagnosis.diagnose_deployment(observed),
        *(diagnosis.diagnose_pod(pod, _memory_requested(observed)) for pod in pods if not _is_ready(pod)),
    ]
    return Replicas(
        # Counted by the pods: the Deployment's own number follows seconds later when its controller has much to do.
        total=sum(is_scheduled(pod) and pod["status"].get("phase") not in _ENDED for pod in pods),
        ready=tuple(ready[-current:] if current else ()),
        nodes=frozenset(node for pod in pods if (node := pod.get("spec", {}).get("nodeName"))),
        problem=_explain_memory(snapshot, service, served, diagnosis.most_severe(problems)) if desired else None,
        apply=desired,
        patch=_scale_down(observed, wanted) if wanted and served is None else (),
    )


def _keep_pods(made: tuple[Resource, Obj], observed: Obj, *, is_estimate: bool) -> tuple[Resource, Obj]:
    """Return the Deployment with the template that its pods have, if it differs only in what restarts no pod.

    That is a better estimate of the memory, such as that of a later version, and the hook before the stop, which
    earlier versions did not have.
    """
    resource, desired = made
    replicas = {"replicas": observed["spec"]["replicas"]}
    if is_desired(resource, desired | {"spec": desired["spec"] | replicas}, observed):
        return made
    kept = deepcopy(desired)
    pod, there = kept["spec"]["template"]["spec"], observed["spec"]["template"]["spec"]
    before = {each["name"]: each for each in (*there.get("initContainers", ()), *there["containers"])}
    for container in (*pod.get("initContainers", ()), *pod["containers"]):
        known: Obj = before.get(container["name"], {})
        if is_estimate and (requested := known.get("resources", {}).get("requests", {}).get("memory")):
            container["resources"]["requests"]["memory"] = requested
        if "lifecycle" not in known:
            container.pop("lifecycle", None)
    is_same = is_desired(resource, kept | {"spec": kept["spec"] | replicas}, observed)
    return (resource, kept) if is_same else made


def _weights(model: Model) -> MountedWeights:
    if format_of(model) == "ollama":
        # Serving takes at least the memory that the weights take on disk.
        return MountedWeights(None, model.spec.source, model.spec.memory_bytes)
    image = model.status.cached.image if model.status.cached is not None else ""
    return MountedWeights(cached_claim(model), cache_path(model), model.status.size_bytes, image)


def _scale_down(observed: Obj, wanted: int) -> tuple[Patch, ...]:
    """Return the patch that scales down a Deployment with too many pods, whose template cannot be decided now."""
    if observed["spec"]["replicas"] <= wanted:
        return ()
    operations = (
        {"op": "test", "path": "/metadata/uid", "value": observed["metadata"]["uid"]},
        {"op": "replace", "path": "/spec/replicas", "value": wanted},
    )
    return (Patch(ref(DEPLOYMENTS, observed), operations),)


def _explain_memory(
    snapshot: Snapshot, service: InferenceService, served: Served | None, problem: ServiceProblem | None
) -> ServiceProblem | None:
    """Add to the scheduler's words that a replica requests more memory than any node has, with what would fit."""
    if problem is None or problem.reason != "Unschedulable" or served is None:
        return problem
    needed, largest = _requested_bytes(service, served), find_largest_memory(snapshot.store)
    if needed is None or largest is None or needed < largest + (1 << 30):
        return problem
    way_out = (
        replica_memory.memory_advice(service, served, largest).way_out
        if service.spec.resources.memory is None
        else "lower resources.memory"
    )
    message = (
        f"{problem.message}; a replica requests {size_text(needed)} of memory, and the largest node has "
        f"{size_text(largest)}: {way_out}"
    )
    return problem._replace(message=message)


def _requested_bytes(service: InferenceService, served: Served) -> int | None:
    stated = service.spec.resources.memory
    return replica_memory.memory_bytes(service, served) if stated is None else quantity_bytes(stated)


def _memory_requested(observed: Obj) -> str:
    """Return the memory that the engine of each pod may use: its limit, else its request; empty if it has neither."""
    pod = observed["spec"]["template"]["spec"]
    # An engine behind a proxy is the proxy's sidecar.
    container: Obj = next(iter((*pod.get("initContainers", ()), *pod["containers"])), {})
    resources = container.get("resources", {})
    stated: str = resources.get("limits", {}).get("memory") or resources.get("requests", {}).get("memory") or ""
    return stated


def _is_ready(pod: Obj) -> bool:
    return any(
        each["type"] == "Ready" and each["status"] == "True" for each in pod.get("status", {}).get("conditions", [])
    )


def _current_ready(observed: Obj, desired: Sequence[tuple[Resource, Obj]], ready: int) -> int:
    """Return the number of ready pods that certainly have the wanted template."""
    status = observed.get("status", {})
    applied = all(is_desired(resource, obj, observed) for resource, obj in desired)
    if not applied or status.get("observedGeneration") != observed["metadata"]["generation"]:
        return 0
    earlier: int = status.get("replicas", 0) - status.get("updatedReplicas", 0)
    reported: int = status.get("readyReplicas", 0)
    return max(0, min(ready, reported) - earlier)


def network_service(service: InferenceService) -> tuple[Resource, Obj]:
    """Return the Service, the one address of replicas in pods and on hosts; it stays while there is no replica."""
    owner = service.metadata
    spec = {
        "selector": {LABEL_SERVICE: owner.name},
        "ports": [{"name": PORT_NAME, "port": SERVICE_PORT, "targetPort": PORT_NAME, "protocol": "TCP"}],
    }
    return child(SERVICES, owner.name, INFERENCE_SERVICES, owner, {}, spec=spec)


def deployment(
    service: InferenceService,
    choice: EngineChoice,
    weights: MountedWeights,
    companions: Sequence[tuple[Companion, MountedWeights]] = (),
    *,
    settings: PodSettings = DEFAULT_SETTINGS,
) -> tuple[Resource, Obj]:
    """Return the Deployment of a service whose replicas are pods; the arguments are those of `build_pod`."""
    owner = service.metadata
    selector = {LABEL_SERVICE: owner.name}
    spec = {
        "replicas": service.spec.replicas,
        "selector": {"matchLabels": selector},
        "strategy": _strategy(choice.vendor),
        "template": {
            "metadata": {"labels": {**selector, LABEL_MANAGED_BY: MANAGED_BY}} | _rotation(service),
            "spec": build_pod(service, choice, weights, companions, settings=settings),
        },
    }
    return child(DEPLOYMENTS, owner.name, INFERENCE_SERVICES, owner, {}, spec=spec)


def _rotation(service: InferenceService) -> Obj:
    """Return the annotation that replaces the pods after their token; none before the first replacement."""
    rotation = service.status.token_rotation
    return {"annotations": {TOKEN_ROTATION: rotation}} if rotation else {}


def _strategy(vendor: Vendor) -> Obj:
    """Return Recreate for pods with a device, because a second one is seldom free; else start the new pod first."""
    if vendor.resource:
        return {"type": "Recreate"}
    # Stated in full: a later change to Recreate must remove these fields, or it is refused.
    return {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
