"""The Deployment, Service and token Secret of an InferenceService: what serves it in the cluster.

A pod runs the engine's own image under the restricted Pod Security Standard. It reads weights that the Model's Job has
verified, from a read-only volume, and checks the service's token by itself, so that nothing needs to stand before it.
"""

import base64
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec

from controller.jobs import CONTAINER_SECURITY, POD_SECURITY
from controller.parts import Part
from controller.plan import child, controller_of
from controller.weights import MODELS_PATH
from crds.inferenceservice import InferenceService
from crds.meta import LABEL_MANAGED_BY, LABEL_SERVICE, MANAGED_BY, Accelerator
from devices.vendors import VENDORS, Vendor
from kube.client import Obj
from kube.resources import DEPLOYMENTS, INFERENCE_SERVICES, SECRETS, SERVICES, Resource
from runtimes import llama_server
from runtimes.serving import Adapter, Listen, Serving

PORT: Final = 8080
PORT_NAME: Final = "http"
TOKEN_KEY: Final = "token"  # noqa: S105 - the name of a key
TOKEN_DIRECTORY: Final = "/run/secrets/pomona"  # noqa: S105 - a path
_LOADING_SECONDS: Final = 3600
"""How long weights may take to load before the kubelet starts the container again."""


class Weights(NamedTuple):
    """Verified weights on a volume."""

    claim: str
    """PersistentVolumeClaim that holds them."""
    path: str
    """The file, relative to the root of the volume."""


def token_name(service: str) -> str:
    """Return the name of the Secret with the bearer token of a service."""
    return f"{service}-token"


def token_secret(service: InferenceService, token: str) -> tuple[Resource, Obj]:
    """Return the Secret that holds the service's bearer token; it is created once and never applied."""
    owner = service.metadata
    data = {TOKEN_KEY: base64.b64encode(token.encode()).decode()}
    return child(SECRETS, token_name(owner.name), INFERENCE_SERVICES, owner, {}, type="Opaque", data=data)


def is_token_secret(secret: Obj, service_uid: str) -> bool:
    """Whether this is the Secret that was made for this service: another's with its name is never used."""
    owner = controller_of(secret)
    return owner is not None and owner["uid"] == service_uid


def network_service(service: InferenceService) -> tuple[Resource, Obj]:
    """Return the Service: the one address of pods and hosts alike, which stays while there is no replica."""
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
    weights: Weights,
    parts: Sequence[tuple[Part, Weights]] = (),
) -> tuple[Resource, Obj]:
    """Return the Deployment of a service whose replicas are pods.

    Args:
        service: what is to be served.
        accelerator: what its pods run on.
        memory: the memory that each pod requests, as a Kubernetes quantity.
        weights: what it serves.
        parts: what is served together with that.
    """
    owner = service.metadata
    vendor = VENDORS[accelerator]
    selector = {LABEL_SERVICE: owner.name}
    mounted = [weights, *(each for _part, each in parts)]
    spec = {
        "replicas": service.spec.replicas,
        "selector": {"matchLabels": selector},
        "strategy": _strategy(vendor),
        "template": {
            "metadata": {"labels": {**selector, LABEL_MANAGED_BY: MANAGED_BY}},
            "spec": _pod(service, vendor, _container(service, accelerator, memory, weights, parts), mounted),
        },
    }
    return child(DEPLOYMENTS, owner.name, INFERENCE_SERVICES, owner, {}, spec=spec)


def _strategy(vendor: Vendor) -> Obj:
    """A new pod beside the old one where memory is all it takes; a device is seldom free twice."""
    if vendor.device_resource:
        return {"type": "Recreate"}
    # Owned although near the defaults: else a later change to Recreate would leave them behind and be refused.
    return {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}


def _mounts(count: int) -> list[tuple[str, str]]:
    """Name the volumes of weights and where they are mounted, the first those of the model itself."""
    return [("models", MODELS_PATH), *((f"part-{number}", f"/parts/{number}") for number in range(1, count))]


def _pod(service: InferenceService, vendor: Vendor, container: Obj, mounted: Sequence[Weights]) -> Obj:
    spec = service.spec
    pod: Obj = {
        "automountServiceAccountToken": False,
        # Else a Service named llama-arg-... in the namespace would set llama-server's options by its environment.
        "enableServiceLinks": False,
        "securityContext": POD_SECURITY,
        # llama-server waits for the answers in flight, and for ever if a client stays: then the kubelet ends it.
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
    service: InferenceService, vendor: Vendor, weights: Weights, parts: Sequence[tuple[Part, Weights]]
) -> Serving:
    """Return what the engine serves, with paths as they are in the container."""
    spec = service.spec
    there = [
        (part, f"{folder}/{each.path}")
        for (part, each), (_name, folder) in zip(parts, _mounts(len(parts) + 1)[1:], strict=True)
    ]
    paths = {part.role: path for part, path in there}
    return Serving(
        service=service.metadata.name,
        model=f"{MODELS_PATH}/{weights.path}",
        context_length=spec.context_length,
        parallel=spec.parallel,
        gpu_layers=vendor.gpu_layers,
        mode=spec.mode,
        cache_type_k=spec.cache_type_k,
        cache_type_v=spec.cache_type_v,
        draft=paths.get("draft"),
        draft_max_tokens=spec.speculative.max_tokens if spec.speculative else None,
        projector=paths.get("projector"),
        adapters=[Adapter(path, part.scale) for part, path in there if part.role == "adapter"],
        chat_template=spec.chat_template,
        extra=spec.extra_args,
    )


def _container(
    service: InferenceService,
    accelerator: Accelerator,
    memory: int | str,
    weights: Weights,
    parts: Sequence[tuple[Part, Weights]],
) -> Obj:
    spec, vendor = service.spec, VENDORS[accelerator]
    serving = _serving(service, vendor, weights, parts)
    return {
        "name": "llama-server",
        "image": spec.image or llama_server.RUNTIME.images[accelerator],
        "args": llama_server.arguments(serving, Listen("0.0.0.0", PORT, f"{TOKEN_DIRECTORY}/{TOKEN_KEY}")),
        "ports": [{"name": PORT_NAME, "containerPort": PORT, "protocol": "TCP"}],
        "resources": _resources(service, vendor, memory),
        # /health is open without a token and says 503 while weights load. A busy engine still answers it.
        "startupProbe": _health(period_seconds=1, failures=_LOADING_SECONDS),
        "readinessProbe": _health(period_seconds=5, failures=2),
        "livenessProbe": _health(period_seconds=10, failures=6),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": CONTAINER_SECURITY,
        "volumeMounts": [
            *({"name": name, "mountPath": path, "readOnly": True} for name, path in _mounts(len(parts) + 1)),
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
