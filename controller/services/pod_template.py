"""The pod of a service: its engine's container, with the vendor's devices, verified weights and the service's token.

A pod runs the engine's own image under the restricted Pod Security Standard. It reads weights that the Model's Job has
verified, from a read-only volume, and only requests with the service's token are answered.
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec

from controller.models.jobs import CONTAINER_SECURITY, POD_SECURITY
from controller.models.served import Companion
from controller.models.volume import MODELS_PATH
from controller.services.devices import DeviceRequest, build_node_affinity, request_devices
from controller.services.tokens import TOKEN_KEY, token_name
from crds.inferenceservice import InferenceService
from crds.meta import Accelerator
from crds.serving import RuntimeName
from devices.vendors import Vendor
from kube.client import Obj
from runtimes.pod import EnginePod, PodServing
from runtimes.registry import RUNTIMES
from runtimes.serving import CompanionFile, Listen, Serving, build_serving

PORT: Final = 8080
PORT_NAME: Final = "http"
TOKEN_DIRECTORY: Final = "/run/secrets/pomona"  # noqa: S105 - a path
_LOADING_SECONDS: Final = 3600
"""Time for loading weights, after which the kubelet restarts the container, unless they are very large."""
_LOADING_BYTES_PER_SECOND: Final = 25 * 1000 * 1000
"""Slow network storage."""
_WITHDRAWAL_SECONDS: Final = 3
"""Time for which a deleted pod serves on: a node applies changes of endpoints about once a second."""
_SHM: Final = "/dev/shm"  # noqa: S108 - the container's own


class MountedWeights(NamedTuple):
    """Verified weights on a volume."""

    claim: str
    """PersistentVolumeClaim that holds them."""
    path: str
    """The file or folder, relative to the root of the volume."""
    size_bytes: int | None = None


class EngineChoice(NamedTuple):
    """The engine of a service in pods, and the hardware that it runs on."""

    runtime: RuntimeName
    accelerator: Accelerator
    vendor: Vendor
    memory: int | str
    """Memory of the node that each pod requests, as a Kubernetes quantity."""
    cache_bytes: int | None = None
    """KV cache in that memory, for an engine that must be told; None: unknown."""

    @property
    def pod(self) -> EnginePod:
        """The engine's description. Raises ValueError: it does not run in pods."""
        pod = RUNTIMES[self.runtime].pod
        if pod is None:
            raise ValueError(f"runtime {self.runtime} does not run in pods")
        return pod


class _Replica(NamedTuple):
    """All that one pod is made of."""

    service: InferenceService
    choice: EngineChoice
    weights: MountedWeights
    companions: Sequence[tuple[Companion, MountedWeights]]
    devices: DeviceRequest


def build_pod(
    service: InferenceService,
    choice: EngineChoice,
    weights: MountedWeights,
    companions: Sequence[tuple[Companion, MountedWeights]] = (),
) -> Obj:
    """Return the spec of a pod.

    Args:
        service: the service.
        choice: its engine and accelerator.
        weights: the weights of its Model.
        companions: its companions with their weights.
    """
    vendor = choice.vendor
    replica = _Replica(service, choice, weights, companions, request_devices(service, vendor))
    spec = service.spec
    pod: Obj = {
        "automountServiceAccountToken": False,
        # Else a Service named llama-arg-... in the namespace would set llama-server's options by its environment.
        "enableServiceLinks": False,
        "securityContext": _pod_security(replica),
        # llama-server waits for requests in flight, for ever if a client stays connected: then the kubelet ends it. The
        # sleep before the stop is a part of this time.
        "terminationGracePeriodSeconds": 30,
        "containers": [_container(replica)],
        "volumes": _volumes(replica),
    }
    tolerations: list[Any] = [msgspec.to_builtins(each) for each in (*vendor.tolerations, *spec.tolerations)]
    if tolerations:
        pod["tolerations"] = tolerations
    if spec.node_selector:
        pod["nodeSelector"] = spec.node_selector
    if affinity := build_node_affinity(spec.hardware, vendor):
        pod["affinity"] = affinity
    if vendor.runtime_class:
        pod["runtimeClassName"] = vendor.runtime_class
    return pod


def _pod_security(replica: _Replica) -> Obj:
    groups = replica.choice.vendor.supplemental_groups if replica.devices.number else ()
    return POD_SECURITY | ({"supplementalGroups": list(groups)} if groups else {})


def _mounts(count: int) -> list[tuple[str, str]]:
    """Return name and mount path of each volume of weights; the first is that of the main Model."""
    return [("models", MODELS_PATH), *((f"part-{number}", f"/parts/{number}") for number in range(1, count))]


def _volumes(replica: _Replica) -> list[Obj]:
    mounted = [replica.weights, *(each for _companion, each in replica.companions)]
    volumes: list[Obj] = [
        *(
            {"name": name, "persistentVolumeClaim": {"claimName": weights.claim, "readOnly": True}}
            for (name, _path), weights in zip(_mounts(len(mounted)), mounted, strict=True)
        ),
        {"name": "token", "secret": {"secretName": token_name(replica.service.metadata.name), "defaultMode": 0o440}},
        {"name": "tmp", "emptyDir": {}},
    ]
    if shared := _shared_memory(replica):
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": shared}})
    return volumes


def _shared_memory(replica: _Replica) -> str | None:
    """Return the limit of /dev/shm, or None if the container's own 64 MiB are enough."""
    if not (replica.choice.pod.shared_memory and replica.devices.number):
        return None
    return f"{replica.choice.vendor.shared_memory_mib * replica.devices.number}Mi"


def _serving(replica: _Replica) -> Serving:
    """Return the settings of the engine, with paths as they are in the container."""
    spec, companions = replica.service.spec, replica.companions
    files = [
        CompanionFile(companion.role, f"{folder}/{each.path}", companion.scale)
        for (companion, each), (_name, folder) in zip(companions, _mounts(len(companions) + 1)[1:], strict=True)
    ]
    return build_serving(
        replica.service.metadata.name,
        f"{MODELS_PATH}/{replica.weights.path}",
        spec,
        files,
        draft_max_tokens=spec.speculative.max_tokens if spec.speculative else None,
        gpu_layers=replica.choice.vendor.gpu_layers,
    )


def _container(replica: _Replica) -> Obj:
    service, choice, engine = replica.service, replica.choice, replica.choice.pod
    listen = Listen("0.0.0.0", PORT, f"{TOKEN_DIRECTORY}/{TOKEN_KEY}" if engine.key == "file" else None)
    serving = PodServing(_serving(replica), listen, choice.vendor, replica.devices.number, choice.cache_bytes)
    environment = _environment(replica, serving)
    return {
        "name": engine.container,
        "image": service.spec.image or engine.image(choice.accelerator, choice.vendor, choice.runtime),
        **({"command": list(engine.command)} if engine.command else {}),
        "args": engine.arguments(serving),
        **({"env": environment} if environment else {}),
        "ports": [{"name": PORT_NAME, "containerPort": PORT, "protocol": "TCP"}],
        "resources": _resources(replica),
        "startupProbe": _health(engine, period_seconds=1, failures=_loading_seconds(replica)),
        "readinessProbe": _health(engine, period_seconds=5, failures=2),
        "livenessProbe": _health(engine, period_seconds=10, failures=6),
        # Nodes send requests to a deleted pod until they have seen its endpoint go.
        "lifecycle": {"preStop": {"sleep": {"seconds": _WITHDRAWAL_SECONDS}}},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": CONTAINER_SECURITY | {"readOnlyRootFilesystem": engine.read_only_root},
        "volumeMounts": _volume_mounts(replica),
    }


def _environment(replica: _Replica, serving: PodServing) -> list[Obj]:
    """Return the variables of the engine and of the vendor, and the key if the engine takes it from a variable."""
    engine = replica.choice.pod
    values = dict(engine.environment(serving))
    if replica.devices.number:
        values = {**replica.choice.vendor.environment, **values}
    variables: list[Obj] = [{"name": name, "value": value} for name, value in sorted(values.items())]
    if engine.key == "environment":
        reference = {"name": token_name(replica.service.metadata.name), "key": TOKEN_KEY}
        variables.append({"name": engine.key_variable, "valueFrom": {"secretKeyRef": reference}})
    return variables


def _volume_mounts(replica: _Replica) -> list[Obj]:
    mounts: list[Obj] = [
        *({"name": name, "mountPath": path, "readOnly": True} for name, path in _mounts(len(replica.companions) + 1)),
        {"name": "token", "mountPath": TOKEN_DIRECTORY, "readOnly": True},
        {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 - the container's own, on an empty volume
    ]
    if _shared_memory(replica):
        mounts.append({"name": "shm", "mountPath": _SHM})
    return mounts


def _resources(replica: _Replica) -> Obj:
    asked, devices = replica.service.spec.resources, replica.devices
    requests = {"memory": str(replica.choice.memory)}
    if asked.cpu is not None:
        requests["cpu"] = str(asked.cpu)
    if devices.resource is None:
        return {"requests": requests}
    limited = {devices.resource: str(devices.number)}
    if pages := replica.choice.vendor.hugepages_mib * devices.number:
        # Kubernetes demands that requests and limits of pages are equal.
        limited["hugepages-2Mi"] = f"{pages}Mi"
    return {"requests": requests | limited, "limits": limited}


def _loading_seconds(replica: _Replica) -> int:
    """Return the time that loading may take: by the size of the weights, an hour at least."""
    weights = (replica.weights, *(each for _companion, each in replica.companions))
    size_bytes = sum(each.size_bytes or 0 for each in weights)
    return max(_LOADING_SECONDS, size_bytes // _LOADING_BYTES_PER_SECOND)


def _health(engine: EnginePod, *, period_seconds: int, failures: int) -> Obj:
    return {
        "httpGet": {"path": engine.health_path, "port": PORT_NAME},
        "periodSeconds": period_seconds,
        "failureThreshold": failures,
        "timeoutSeconds": 5,
    }
