"""The replicas of a service in pods: the Deployment, the state of its pods, and the Service in front of all replicas.

A pod runs the engine's own image under the restricted Pod Security Standard. It reads weights that the Model's Job has
verified, from a read-only volume, and checks the service's token itself, so that it needs no proxy.
"""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any, Final, NamedTuple

import msgspec

from controller.models.jobs import CONTAINER_SECURITY, POD_SECURITY
from controller.models.served import Companion, Served, cache_path, claim_name
from controller.models.volume import MODELS_PATH
from controller.reconcile.indexes import SERVICE_INDEX, namespaced
from controller.reconcile.plan import Patch, Snapshot, child, ref
from controller.reconcile.stamp import is_desired, stamp
from controller.reconcile.triggers import is_scheduled
from controller.services import diagnosis, preconditions
from controller.services.replicas import Replicas
from controller.services.tokens import TOKEN_KEY, token_name
from crds.inferenceservice import InferenceService
from crds.meta import LABEL_MANAGED_BY, LABEL_SERVICE, MANAGED_BY, TOKEN_ROTATION, Accelerator
from crds.model import Model
from devices.vendors import VENDORS, Vendor
from kube.client import Obj
from kube.resources import DEPLOYMENTS, INFERENCE_SERVICES, PODS, SERVICES, Resource
from runtimes import llama_server
from runtimes.serving import CompanionFile, Listen, Serving, build_serving

PORT: Final = 8080
PORT_NAME: Final = "http"
TOKEN_DIRECTORY: Final = "/run/secrets/pomona"  # noqa: S105 - a path
_LOADING_SECONDS: Final = 3600
"""Time for loading weights, after which the kubelet restarts the container."""
_ENDED: Final = frozenset({"Succeeded", "Failed"})
_WITHDRAWAL_SECONDS: Final = 3
"""Time for which a deleted pod serves on: a node applies changes of endpoints about once a second."""


class MountedWeights(NamedTuple):
    """Verified weights on a volume."""

    claim: str
    """PersistentVolumeClaim that holds them."""
    path: str
    """The file, relative to the root of the volume."""


def observe_pods(
    snapshot: Snapshot, service: InferenceService, accelerator: Accelerator | None, served: Served | None, wanted: int
) -> Replicas:
    """Return replicas in pods. Without `served`, existing pods count as wanted and are only scaled down."""
    observed = next(iter(snapshot.children(DEPLOYMENTS, service.metadata.namespace, service.metadata.uid)), None)
    desired: tuple[tuple[Resource, Obj], ...] = ()
    if wanted and served is not None and accelerator is not None and VENDORS[accelerator].in_pods:
        stated = service.spec.resources.memory
        memory = preconditions.memory_bytes(service, served) if stated is None else stated
        companions = [
            (companion, _weights(companion.model)) for companion in served.companions if companion.model is not None
        ]
        if memory is not None:
            weights = _weights(served.model)
            made = deployment(service, accelerator=accelerator, memory=memory, weights=weights, companions=companions)
            is_estimate = stated is None and not preconditions.is_memory_stated(served)
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
        *(diagnosis.diagnose_pod(pod) for pod in pods if not _is_ready(pod)),
    ]
    return Replicas(
        # Counted by the pods: the Deployment's own number follows seconds later when its controller has much to do.
        total=sum(is_scheduled(pod) and pod["status"].get("phase") not in _ENDED for pod in pods),
        ready=tuple(ready[-current:] if current else ()),
        problem=diagnosis.most_severe(problems) if desired else None,
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
    (container,) = kept["spec"]["template"]["spec"]["containers"]
    pod = observed["spec"]["template"]["spec"]
    there: Obj = next((each for each in pod["containers"] if each["name"] == container["name"]), {})
    if is_estimate and (requested := there.get("resources", {}).get("requests", {}).get("memory")):
        container["resources"]["requests"]["memory"] = requested
    if "lifecycle" not in there:
        del container["lifecycle"]
    is_same = is_desired(resource, kept | {"spec": kept["spec"] | replicas}, observed)
    return (resource, kept) if is_same else made


def _weights(model: Model) -> MountedWeights:
    return MountedWeights(claim_name(model.metadata.name), cache_path(model))


def _scale_down(observed: Obj, wanted: int) -> tuple[Patch, ...]:
    """Return the patch that scales down a Deployment with too many pods, whose template cannot be decided now."""
    if observed["spec"]["replicas"] <= wanted:
        return ()
    operations = (
        {"op": "test", "path": "/metadata/uid", "value": observed["metadata"]["uid"]},
        {"op": "replace", "path": "/spec/replicas", "value": wanted},
    )
    return (Patch(ref(DEPLOYMENTS, observed), operations),)


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
        "ports": [{"name": PORT_NAME, "port": PORT, "targetPort": PORT_NAME, "protocol": "TCP"}],
    }
    return child(SERVICES, owner.name, INFERENCE_SERVICES, owner, {}, spec=spec)


def deployment(
    service: InferenceService,
    *,
    accelerator: Accelerator,
    memory: int | str,
    weights: MountedWeights,
    companions: Sequence[tuple[Companion, MountedWeights]] = (),
) -> tuple[Resource, Obj]:
    """Return the Deployment of a service whose replicas are pods.

    Args:
        service: the service.
        accelerator: the accelerator of its pods.
        memory: the memory that each pod requests, as a Kubernetes quantity.
        weights: the weights of its Model.
        companions: its companions with their weights.
    """
    owner = service.metadata
    vendor = VENDORS[accelerator]
    selector = {LABEL_SERVICE: owner.name}
    mounted = [weights, *(each for _companion, each in companions)]
    spec = {
        "replicas": service.spec.replicas,
        "selector": {"matchLabels": selector},
        "strategy": _strategy(vendor),
        "template": {
            "metadata": {"labels": {**selector, LABEL_MANAGED_BY: MANAGED_BY}} | _rotation(service),
            "spec": _pod(service, vendor, _container(service, accelerator, memory, weights, companions), mounted),
        },
    }
    return child(DEPLOYMENTS, owner.name, INFERENCE_SERVICES, owner, {}, spec=spec)


def _rotation(service: InferenceService) -> Obj:
    """Return the annotation that replaces the pods after their token; none before the first replacement."""
    rotation = service.status.token_rotation
    return {"annotations": {TOKEN_ROTATION: rotation}} if rotation else {}


def _strategy(vendor: Vendor) -> Obj:
    """Return Recreate for pods with a device, because a second one is seldom free; else start the new pod first."""
    if vendor.device_resource:
        return {"type": "Recreate"}
    # Stated in full: a later change to Recreate must remove these fields, or it is refused.
    return {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}


def _mounts(count: int) -> list[tuple[str, str]]:
    """Return name and mount path of each volume of weights; the first is that of the main Model."""
    return [("models", MODELS_PATH), *((f"part-{number}", f"/parts/{number}") for number in range(1, count))]


def _pod(service: InferenceService, vendor: Vendor, container: Obj, mounted: Sequence[MountedWeights]) -> Obj:
    spec = service.spec
    pod: Obj = {
        "automountServiceAccountToken": False,
        # Else a Service named llama-arg-... in the namespace would set llama-server's options by its environment.
        "enableServiceLinks": False,
        "securityContext": POD_SECURITY,
        # llama-server waits for requests in flight, for ever if a client stays connected: then the kubelet ends it. The
        # sleep before the stop is a part of this time.
        "terminationGracePeriodSeconds": 30,
        "containers": [container],
        "volumes": [
            *(
                {"name": name, "persistentVolumeClaim": {"claimName": weights.claim, "readOnly": True}}
                for (name, _path), weights in zip(_mounts(len(mounted)), mounted, strict=True)
            ),
            {"name": "token", "secret": {"secretName": token_name(service.metadata.name), "defaultMode": 0o440}},
            {"name": "tmp", "emptyDir": {}},
        ],
    }
    tolerations: list[Any] = [msgspec.to_builtins(each) for each in (*vendor.tolerations, *spec.tolerations)]
    if tolerations:
        pod["tolerations"] = tolerations
    if spec.node_selector:
        pod["nodeSelector"] = spec.node_selector
    return pod


def _serving(
    service: InferenceService,
    vendor: Vendor,
    weights: MountedWeights,
    companions: Sequence[tuple[Companion, MountedWeights]],
) -> Serving:
    """Return the settings of the engine, with paths as they are in the container."""
    spec = service.spec
    files = [
        CompanionFile(companion.role, f"{folder}/{each.path}", companion.scale)
        for (companion, each), (_name, folder) in zip(companions, _mounts(len(companions) + 1)[1:], strict=True)
    ]
    return build_serving(
        service.metadata.name,
        f"{MODELS_PATH}/{weights.path}",
        spec,
        files,
        draft_max_tokens=spec.speculative.max_tokens if spec.speculative else None,
        gpu_layers=vendor.gpu_layers,
    )


def _container(
    service: InferenceService,
    accelerator: Accelerator,
    memory: int | str,
    weights: MountedWeights,
    companions: Sequence[tuple[Companion, MountedWeights]],
) -> Obj:
    spec, vendor = service.spec, VENDORS[accelerator]
    serving = _serving(service, vendor, weights, companions)
    return {
        "name": "llama-server",
        "image": spec.image or llama_server.RUNTIME.images[accelerator],
        "args": llama_server.arguments(serving, Listen("0.0.0.0", PORT, f"{TOKEN_DIRECTORY}/{TOKEN_KEY}")),
        "ports": [{"name": PORT_NAME, "containerPort": PORT, "protocol": "TCP"}],
        "resources": _resources(service, vendor, memory),
        # /health needs no token and returns 503 while weights load. A busy engine still answers it.
        "startupProbe": _health(period_seconds=1, failures=_LOADING_SECONDS),
        "readinessProbe": _health(period_seconds=5, failures=2),
        "livenessProbe": _health(period_seconds=10, failures=6),
        # Nodes send requests to a deleted pod until they have seen its endpoint go.
        "lifecycle": {"preStop": {"sleep": {"seconds": _WITHDRAWAL_SECONDS}}},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": CONTAINER_SECURITY,
        "volumeMounts": [
            *({"name": name, "mountPath": path, "readOnly": True} for name, path in _mounts(len(companions) + 1)),
            {"name": "token", "mountPath": TOKEN_DIRECTORY, "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 - the container's own, on an empty volume
        ],
    }


def _resources(service: InferenceService, vendor: Vendor, memory: int | str) -> Obj:
    asked = service.spec.resources
    requests = {"memory": str(memory)}
    if asked.cpu is not None:
        requests["cpu"] = str(asked.cpu)
    if vendor.device_resource is None:
        return {"requests": requests}
    devices = str(asked.gpu or 1)
    return {
        "requests": {**requests, vendor.device_resource: devices},
        "limits": {vendor.device_resource: devices},
    }


def _health(*, period_seconds: int, failures: int) -> Obj:
    return {
        "httpGet": {"path": "/health", "port": PORT_NAME},
        "periodSeconds": period_seconds,
        "failureThreshold": failures,
        "timeoutSeconds": 5,
    }
