"""The pod of a service: its engine's container, with the vendor's devices, verified weights and the service's token.

A pod runs the engine's own image under the restricted Pod Security Standard. It reads weights that the Model's Job has
verified, from a read-only volume, and only requests with the service's token are answered.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from controller.models.jobs import CONTAINER_SECURITY, POD_SECURITY, keep_literal
from controller.models.served import Companion
from controller.models.volume import MODELS_PATH
from controller.pod_settings import DEFAULT_SETTINGS, PodSettings
from controller.services.pods.claim_templates import CLAIM_NAME
from controller.services.pods.devices import DeviceRequest, request_devices
from controller.services.pods.one_node import FIRST_MARK, keep_on_one_node
from controller.services.pods.pod_options import add_options, pin_to_node
from controller.services.pods.pod_proxy import END_SECONDS, WITHDRAWAL_SECONDS, ProxyContainer, keep_compiled_code
from controller.services.tokens import token_name
from crds.inferenceservice import InferenceService
from crds.meta import Accelerator
from crds.pods import ContainerOptions
from crds.quantity import parse_quantity, write_quantity
from crds.serving import RuntimeName
from crds.size import GIB
from crds.weights_header import Layout
from devices.sockets import LOOPBACK
from devices.vendors import Vendor
from kube.client import Obj
from runtimes.pod import EnginePod, PodServing
from runtimes.registry import RUNTIMES
from runtimes.serving import CompanionFile, Listen, Serving

_LOADING_SECONDS: Final = 3600
"""Time for loading weights, after which the kubelet restarts the container, unless they are very large."""
_LOADING_BYTES_PER_SECOND: Final = 25 * 1000 * 1000
"""Slow network storage."""
_PRIORITY_CLASSES: Final = "pomona-"
"""Prefix of the PriorityClasses in deploy/chart/templates/priority-classes.yaml."""
_SHM: Final = "/dev/shm"  # noqa: S108 - the container's own
_STORE_SLACK_BYTES: Final = GIB
"""Room beside the weights in the folder of an engine that keeps a copy of them."""


class MountedWeights(NamedTuple):
    """Verified weights on a volume, or a model that the engine brings by itself."""

    claim: str | None
    """PersistentVolumeClaim that holds them; None: the engine fetches them from its own library."""
    path: str
    """The file or folder, relative to the root of the volume; without a volume the source, such as ollama://NAME:TAG."""
    size_bytes: int | None = None
    image: str = ""
    """Image that the node mounts instead of a claim; the service's image pull secrets open its registry."""
    node: str = ""
    """The one node that has the claim's volume; empty: any node that the scheduler finds for the volume."""
    has_one_node: bool = False
    """True if the claim's volume can be attached to one node only, wherever that is."""
    is_ours: bool = True
    """False for an image, and a claim of the user: nothing else is kept there."""
    mark: str = FIRST_MARK
    """Value of the label by which pods with such a volume find its node."""

    def volume(self) -> Obj:
        """Return the source of the pod's volume."""
        if self.image:
            return {"image": {"reference": self.image, "pullPolicy": "IfNotPresent"}}
        return {"persistentVolumeClaim": {"claimName": self.claim, "readOnly": True}}


class EngineChoice(NamedTuple):
    """The engine of a service in pods, and the hardware that it runs on."""

    runtime: RuntimeName
    accelerator: Accelerator
    vendor: Vendor
    memory: int | str
    """Memory of the node that each pod requests, as a Kubernetes quantity."""
    cache_bytes: int | None = None
    """KV cache in that memory, for an engine that takes its size as an argument; None: unknown."""
    layout: Layout | None = None
    """Layout of the weights; None: unknown."""
    container: ContainerOptions | None = None
    """The container that the service states, for an engine that Pomona does not know."""
    is_estimate: bool = False
    """True if `memory` is estimated, and stated by no user."""
    unfit: tuple[str, ...] = ()
    """Architectures of the accelerator on which the engine cannot serve the weights."""
    chat_format: str = ""
    """Form of the model's chat template, as its header states it; empty: unknown."""

    @property
    def pod(self) -> EnginePod:
        """The engine's description. Raises ValueError: it does not run in pods."""
        pod = RUNTIMES[self.runtime].pod
        if pod is None:
            raise ValueError(f"runtime {self.runtime} does not run in pods")
        return pod.from_container(self.container) if pod.from_container and self.container else pod


class _Replica(NamedTuple):
    """All that one pod is made of."""

    service: InferenceService
    choice: EngineChoice
    weights: MountedWeights
    companions: Sequence[tuple[Companion, MountedWeights]]
    devices: DeviceRequest
    cpu: int | str | None
    """CPU that the engine requests, and that its threads take, since there is no limit; None: it decides by itself."""


def build_pod(
    service: InferenceService,
    choice: EngineChoice,
    weights: MountedWeights,
    companions: Sequence[tuple[Companion, MountedWeights]] = (),
    *,
    settings: PodSettings = DEFAULT_SETTINGS,
) -> Obj:
    """Return the spec of a pod.

    Args:
        service: the service.
        choice: its engine and accelerator.
        weights: the weights of its Model.
        companions: its companions with their weights.
        settings: the administrator's settings, of which the image of the proxy is one, and its pull secrets.
    """
    vendor = choice.vendor
    spec, chosen = service.spec, service.status.serving
    cpu = spec.resources.cpu if spec.resources.cpu is not None or chosen is None else chosen.cpu or None
    replica = _Replica(service, choice, weights, companions, request_devices(service, vendor), cpu)
    pod: Obj = {
        "automountServiceAccountToken": False,
        # Else a Service named llama-arg-... in the namespace would set llama-server's options by its environment.
        "enableServiceLinks": False,
        "securityContext": _build_security(replica),
        "priorityClassName": f"{_PRIORITY_CLASSES}{spec.priority}",
        # What happens before the stop is a part of this time: the withdrawal, and the end of the running answers.
        "terminationGracePeriodSeconds": WITHDRAWAL_SECONDS + spec.drain_seconds + END_SECONDS,
        "containers": [_build_container(replica)],
        "volumes": _build_volumes(replica),
    }

    # Where the pod may run.
    if tolerations := [*vendor.tolerations, *spec.tolerations]:
        pod["tolerations"] = msgspec.to_builtins(tolerations)
    if selected := choice.pod.select_nodes(_choose_image(replica)) | spec.node_selector:
        pod["nodeSelector"] = selected

    # The options of the user, and the node of its weights.
    pod = add_options(pod, service, vendor, choice.unfit)
    if weights.node:
        pod = pin_to_node(pod, weights.node)
    if weights.claim and weights.has_one_node:
        pod = keep_on_one_node(pod, weights.claim, weights.mark)

    # The proxy in front of the engine.
    proxy = ProxyContainer(
        image=settings.image,
        runtime=choice.runtime,
        engine=choice.pod,
        environment=settings.environment,
        loading_seconds=_find_loading_seconds(replica),
        pulse_path=RUNTIMES[choice.runtime].pulse,
        image_pull_secrets=settings.image_pull_secrets,
    )
    pod = proxy.put_before_engine(pod, service.metadata, _build_serving(replica))
    return keep_compiled_code(pod) if choice.pod.compiles and weights.is_ours else pod


def _build_security(replica: _Replica) -> Obj:
    groups = replica.choice.vendor.supplemental_groups if replica.devices.number else ()
    return POD_SECURITY | ({"supplementalGroups": list(groups)} if groups else {})


def _list_mounts(replica: _Replica) -> list[tuple[MountedWeights, str, str]]:
    """Return the weights with name and mount path of their volume; the first are those of the main Model."""
    main = (replica.weights, "models", replica.choice.pod.models_path or MODELS_PATH)
    # The companions, such as a draft model, have a volume each.
    parts = [
        (weights, f"part-{number}", f"/parts/{number}")
        for number, (_companion, weights) in enumerate(replica.companions, start=1)
    ]
    return [main, *parts]


def _build_volumes(replica: _Replica) -> list[Obj]:
    """Return the volumes of the pod: weights, token, temporary files, and what the engine needs beside."""
    volumes: list[Obj] = [
        *(
            {"name": name, **weights.volume()}
            for weights, name, _path in _list_mounts(replica)
            if weights.claim is not None
        ),
        {"name": "token", "secret": {"secretName": token_name(replica.service.metadata.name), "defaultMode": 0o440}},
        {"name": "tmp", "emptyDir": {}},
    ]

    if shared := _find_shared_memory(replica):
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": shared}})
    if replica.choice.pod.store:
        limit = {"sizeLimit": str(size)} if (size := _find_store_bytes(replica)) else {}
        volumes.append({"name": "store", "emptyDir": limit})
    return volumes


def _find_store_bytes(replica: _Replica) -> int | None:
    """Return the size of the folder for the engine's own copy of the weights; None if their size is unknown."""
    size_bytes = replica.weights.size_bytes
    if not size_bytes:
        return None
    return size_bytes + size_bytes // 10 + _STORE_SLACK_BYTES  # a tenth more, and a GiB


def _find_shared_memory(replica: _Replica) -> str | None:
    """Return the limit of /dev/shm, or None if the container's own 64 MiB are enough."""
    if not replica.choice.pod.shared_memory:
        return None
    # An engine without devices uses shared memory, too, as much as with one: vLLM's guide gives it 4 GiB.
    return f"{replica.choice.vendor.shared_memory_mib * max(1, replica.devices.number)}Mi"


def _build_serving(replica: _Replica) -> Serving:
    """Return the settings of the engine, with paths as they are in the container."""
    spec, (main, *parts) = replica.service.spec, _list_mounts(replica)
    files = [
        CompanionFile(companion.role, f"{folder}/{weights.path}", companion.scale, companion.request_name)
        for (companion, _weights), (weights, _name, folder) in zip(replica.companions, parts, strict=True)
    ]

    weights, _name, folder = main
    return Serving(
        service=replica.service.metadata.name,
        model=weights.path if weights.claim is None else f"{folder}/{weights.path}",  # without a volume: the source
        options=spec,
        companions=files,
        draft_max_tokens=spec.speculative.max_tokens if spec.speculative else None,
        layout=replica.choice.layout,
        on_device=replica.choice.vendor.has_devices,
        threads=None if replica.cpu is None else max(1, round(parse_quantity(replica.cpu) or 0)),
    )


def _build_container(replica: _Replica) -> Obj:
    """Return the engine's container: image, arguments, resources and mounts; `put_before_engine` adds its probe."""
    choice, engine = replica.choice, replica.choice.pod
    listen, image = Listen(LOOPBACK, engine.port), _choose_image(replica)
    chat_format = choice.chat_format if engine.is_of_version(image) else ""
    serving = PodServing(
        _build_serving(replica), listen, choice.vendor, replica.devices.number, choice.cache_bytes, chat_format
    )
    environment = _build_environment(replica, serving)

    return {
        "name": engine.container,
        "image": image,
        **({"command": list(engine.command)} if engine.command else {}),
        # Only a container that the service states may refer to variables, which are its own.
        "args": engine.arguments(serving) if engine.from_container else keep_literal(engine.arguments(serving)),
        **({"env": environment} if environment else {}),
        "resources": _build_resources(replica),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": CONTAINER_SECURITY | {"readOnlyRootFilesystem": engine.read_only_root},
        "volumeMounts": _build_mounts(replica),
    }


def _choose_image(replica: _Replica) -> str | None:
    choice = replica.choice
    return replica.service.spec.image or choice.pod.find_image(choice.accelerator, choice.vendor, choice.runtime)


def _build_environment(replica: _Replica, serving: PodServing) -> list[Obj]:
    """Return the variables of the engine and of the vendor."""
    values = dict(replica.choice.pod.environment(serving))
    if replica.devices.number:  # the variables of the engine win
        values = {**replica.choice.vendor.environment, **values}
    return [{"name": name, "value": value} for name, value in sorted(values.items())]


def _build_mounts(replica: _Replica) -> list[Obj]:
    """Return the mounts of the engine's container, which gets no token."""
    mounts: list[Obj] = [
        *(
            {"name": name, "mountPath": path, "readOnly": True}
            for weights, name, path in _list_mounts(replica)
            if weights.claim is not None
        ),
        {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 - the container's own, on an empty volume
    ]
    if _find_shared_memory(replica):
        mounts.append({"name": "shm", "mountPath": _SHM})
    if store := replica.choice.pod.store:
        mounts.append({"name": "store", "mountPath": store})
    return mounts


def _build_resources(replica: _Replica) -> Obj:
    """Return what the engine's container requests, and its limits; devices and huge pages are in both."""
    asked, devices = replica.service.spec.resources, replica.devices
    requests = {"memory": write_quantity(replica.choice.memory)}
    if replica.choice.pod.store and (size := _find_store_bytes(replica)):
        requests["ephemeral-storage"] = str(size)
    if replica.cpu is not None:
        requests["cpu"] = write_quantity(replica.cpu)

    limits = {} if asked.memory_limit is None else {"memory": write_quantity(asked.memory_limit)}
    # Kubernetes demands that requests and limits of devices and huge pages are equal; without devices there are none.
    in_both = {devices.resource: str(devices.number)} if devices.number and devices.resource is not None else {}
    if pages := replica.choice.vendor.hugepages_mib * devices.number:
        in_both["hugepages-2Mi"] = f"{pages}Mi"
    limits |= in_both

    claims = {"claims": [{"name": CLAIM_NAME}]} if devices.need is not None else {}
    return {"requests": requests | in_both, **({"limits": limits} if limits else {}), **claims}


def _find_loading_seconds(replica: _Replica) -> int:
    """Return the time that loading may take by the size of the weights: an hour at least."""
    size_bytes = sum(weights.size_bytes or 0 for weights, _name, _path in _list_mounts(replica))
    return max(_LOADING_SECONDS, size_bytes // _LOADING_BYTES_PER_SECOND)
