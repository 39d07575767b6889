"""The replicas of a service in pods: Deployment, state of the pods, and the Service in front of all replicas."""

from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace

from controller.models.jobs import NO_IMAGE
from controller.models.served import Companion, Served, cache_path, cached_claim, format_of, runtime_of
from controller.placement.nodes import find_largest_memory
from controller.pod_settings import DEFAULT_SETTINGS, PodSettings
from controller.reconcile.indexes import SERVICE_INDEX, namespaced
from controller.reconcile.plan import Patch, Snapshot, child, ref
from controller.reconcile.stamp import is_desired
from controller.reconcile.triggers import is_scheduled
from controller.services import diagnosis, replica_memory
from controller.services.pods.devices import request_devices
from controller.services.pods.key_proxy import PORT_NAME
from controller.services.pods.pod_options import find_option_problem
from controller.services.pods.pod_template import EngineChoice, MountedWeights, build_pod
from controller.services.pods.template_rollout import annotate, decide_rollout, digest_inputs
from controller.services.preconditions import CheckedService, ServiceProblem
from controller.services.replicas import Replicas
from crds.inferenceservice import InferenceService
from crds.meta import LABEL_MANAGED_BY, LABEL_SERVICE, MANAGED_BY, TOKEN_ROTATION, Accelerator
from crds.model import Model
from crds.pods import PodOptions
from crds.quantity import quantity_bytes
from crds.size import GIB, size_text
from devices.vendors import Vendor
from kube.client import Obj
from kube.resources import DEPLOYMENTS, INFERENCE_SERVICES, PODS, PVCS, SERVICES, ObjectKey, Resource
from runtimes.pod import SERVICE_PORT

_ENDED: Final = frozenset({"Succeeded", "Failed"})


def observe_pods(
    snapshot: Snapshot,
    service: InferenceService,
    served: Served | None,
    choice: EngineChoice | None,
    wanted: int,
    *,
    settings: PodSettings,
    may_roll: bool = True,
) -> Replicas:
    """Return replicas in pods. Without `served`, existing pods count as wanted and are only scaled down.

    While the template of a later version of Pomona may not be rolled out yet, existing pods are as wanted, too.
    """
    observed = next(iter(snapshot.children(DEPLOYMENTS, service.metadata.namespace, service.metadata.uid)), None)
    desired: tuple[tuple[Resource, Obj], ...] = ()
    waits = False
    if wanted and choice is not None and served is not None:
        resource, made = deployment(
            service, choice, _weights(served.model), _companion_weights(served), settings=settings
        )
        is_estimate = service.spec.resources.memory is None and not replica_memory.is_memory_stated(served)
        inputs = digest_inputs(service, served)
        decided = (
            decide_rollout(made, observed, inputs, is_estimate=is_estimate, may_roll=may_roll)
            if observed is not None
            else annotate(made, inputs)
        )
        waits = decided is None
        desired = ((resource, decided),) if decided is not None else ()
    if observed is None:
        return Replicas(total=0, apply=desired)
    named = namespaced(service.metadata.namespace, service.metadata.name)
    pods = [
        pod for pod in snapshot.store.by_index(PODS, SERVICE_INDEX, named) if "deletionTimestamp" not in pod["metadata"]
    ]
    ready = sorted(pod["metadata"]["uid"] for pod in pods if _is_ready(pod))
    current = _current_ready(observed, desired, len(ready)) if desired or waits or served is None else 0
    problems = [
        diagnosis.diagnose_deployment(observed),
        *(diagnosis.diagnose_pod(pod, _memory_requested(observed)) for pod in pods if not _is_ready(pod)),
    ]
    return Replicas(
        # Counted by the pods: the Deployment's own number follows seconds later when its controller has much to do.
        total=sum(is_scheduled(pod) and pod["status"].get("phase") not in _ENDED for pod in pods),
        ready=tuple(ready[-current:] if current else ()),
        nodes=frozenset(node for pod in pods if (node := pod.get("spec", {}).get("nodeName"))),
        problem=_explain_memory(snapshot, service, served, choice, diagnosis.most_severe(problems))
        if desired or waits
        else None,
        apply=desired,
        keep=((DEPLOYMENTS, observed),) if waits else (),
        patch=_scale(observed, wanted, may_grow=waits) if wanted and (waits or served is None) else (),
    )


def choose_engine(
    service: InferenceService, accelerator: Accelerator | None, checked: CheckedService, settings: PodSettings
) -> EngineChoice | None:
    """Return the engine of a service in pods, or None if it runs on hosts, or has an unmet precondition."""
    vendor = settings.vendors.get(accelerator or "")
    if checked.served is None or accelerator is None or vendor is None or not vendor.in_pods:
        return None
    stated, needed = service.spec.resources.memory, checked.memory
    memory = needed.container_bytes if stated is None else stated
    if memory is None:
        return None
    runtime = runtime_of(service, checked.served.model)
    return EngineChoice(runtime, accelerator, vendor, memory, needed.cache_bytes, service.spec.container)


def _companion_weights(served: Served) -> list[tuple[Companion, MountedWeights]]:
    return [(companion, _weights(companion.model)) for companion in served.companions if companion.model is not None]


def find_pod_problem(
    snapshot: Snapshot,
    service: InferenceService,
    served: Served | None,
    choice: EngineChoice | None,
    settings: PodSettings,
) -> ServiceProblem | None:
    """Return why the controller cannot make these pods, or why they cannot have what spec.pod adds, or None."""
    options = service.spec.pod
    if choice is not None and choice.pod.key == "proxy" and not settings.image:
        missing = (
            f"runtime {choice.runtime} needs a container with an image of Pomona in its pods, and the controller has "
            "none: start `pomona controller` with --image, or choose another runtime"
        )
        return ServiceProblem(NO_IMAGE, missing, "Failed")
    if choice is None or served is None or options == PodOptions():
        return None
    bare = replace(service, spec=replace(service.spec, pod=PodOptions()))
    pod = build_pod(bare, choice, _weights(served.model), _companion_weights(served), settings=settings)
    claims = {each.persistent_volume_claim.claim_name for each in options.volumes if each.persistent_volume_claim}
    namespace = service.metadata.namespace
    of_models = (claim for claim in claims if snapshot.get(PVCS, ObjectKey(namespace, claim)) is not None)
    message = find_option_problem(options, pod, of_models)
    return ServiceProblem("InvalidSpec", message, "Failed") if message else None


def _weights(model: Model) -> MountedWeights:
    if format_of(model) == "ollama":
        # Serving takes at least the memory that the weights take on disk.
        return MountedWeights(None, model.spec.source, model.spec.memory_bytes)
    image = model.status.cached.image if model.status.cached is not None else ""
    return MountedWeights(cached_claim(model), cache_path(model), model.status.size_bytes, image)


def _scale(observed: Obj, wanted: int, *, may_grow: bool) -> tuple[Patch, ...]:
    """Return the patch that scales a Deployment whose template is not decided, or not applied, now."""
    replicas = observed["spec"]["replicas"]
    if replicas == wanted or (replicas < wanted and not may_grow):
        return ()
    operations = (
        {"op": "test", "path": "/metadata/uid", "value": observed["metadata"]["uid"]},
        {"op": "replace", "path": "/spec/replicas", "value": wanted},
    )
    return (Patch(ref(DEPLOYMENTS, observed), operations),)


def _explain_memory(
    snapshot: Snapshot,
    service: InferenceService,
    served: Served | None,
    choice: EngineChoice | None,
    problem: ServiceProblem | None,
) -> ServiceProblem | None:
    """Add to the scheduler's words that a replica requests more memory than any node has, with what would fit."""
    if problem is None or problem.reason != "Unschedulable" or served is None or choice is None:
        return problem
    needed, largest = quantity_bytes(choice.memory), find_largest_memory(snapshot.store)
    if largest is None or needed < largest + GIB:
        return problem
    if service.spec.resources.memory is not None:
        way_out = "lower resources.memory"
    elif request_devices(service, choice.vendor).number:
        way_out = "lower hardware.count, or state resources.memory"  # weights and cache are in the devices
    else:
        way_out = replica_memory.memory_advice(service, served, largest).way_out
    message = (
        f"{problem.message}; a replica requests {size_text(needed)} of memory, and the largest node has "
        f"{size_text(largest)}: {way_out}"
    )
    return problem._replace(message=message)


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
        "strategy": _strategy(choice.vendor, service.spec.replicas),
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


def _strategy(vendor: Vendor, replicas: int) -> Obj:
    """Return the way in which pods are replaced: the new one first, unless it needs a device, which is seldom free."""
    if vendor.resource and replicas == 1:
        return {"type": "Recreate"}
    surge, unavailable = (0, 1) if vendor.resource else (1, 0)
    # Stated in full: a later change to Recreate must remove these fields, or it is refused.
    return {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": surge, "maxUnavailable": unavailable}}
