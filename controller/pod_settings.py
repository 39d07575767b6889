"""Settings of the administrator about pods, of Jobs and those that serve, and the limits of what tenants may state.

Whoever may create InferenceServices creates pods. By the image of its engine a pod could become something else than an
engine, and by its tolerations it could run beside the control plane: so the platform team limits images, taints and
hosts.
"""

from collections.abc import Iterable, Mapping
from importlib.metadata import version
from typing import Final, NamedTuple

import msgspec

from crds.inferenceservice import InferenceService
from crds.meta import DefaultSchedulingMode, Toleration
from devices.vendors import VENDORS, Vendors

CONTROL_PLANE_TAINTS: Final = (
    "node-role.kubernetes.io/control-plane",
    "node-role.kubernetes.io/controlplane",
    "node-role.kubernetes.io/master",
    "node-role.kubernetes.io/etcd",
    "CriticalAddonsOnly",
)
"""Keys of the taints by which distributions keep pods off the nodes of their control plane."""


class TenantLimits(NamedTuple):
    """Options of the controller that limit what an InferenceService may state."""

    image_prefixes: tuple[str, ...] = ()
    """Beginnings of the images that services may name, and Models that nodes mount; none: all images."""
    control_plane: bool = False
    """True if spec.tolerations may tolerate the taints of control-plane nodes."""
    system_taints: tuple[str, ...] = ()
    """Keys of further taints that spec.tolerations may not tolerate; one that ends with / stands for all behind it."""
    hosts: bool = True
    """True if services may run on hosts and use the queue, which a controller of some namespaces does not manage."""


UNLIMITED: Final = TenantLimits(control_plane=True)


class ExceededLimit(NamedTuple):
    """A field that exceeds the limits."""

    reason: str
    message: str


CHOICE_OUT_OF_SCOPE: Final = ExceededLimit(
    "QueueOutOfScope",
    "the queue chooses among several accelerators and belongs to the whole cluster, but this controller serves only "
    "the namespaces of its options --namespace: name one accelerator in spec.hardware.accelerator, or have an "
    "administrator install the controller for the whole cluster",
)


def check_limits(service: InferenceService, limits: TenantLimits) -> ExceededLimit | None:
    """Return the first field of a service that exceeds the limits, with the way out, or None."""
    image = service.spec.image
    if image is not None and not is_image_allowed(image, limits):
        message = (
            f"spec.image {image} is not allowed: images begin with {' or '.join(limits.image_prefixes)} here; use one "
            "of those, leave spec.image out for the default, or ask the platform team for another "
            "--allowed-image-prefix"
        )
        return ExceededLimit("ImageNotAllowed", message)
    for number, toleration in enumerate(service.spec.tolerations):
        if not _is_allowed(toleration, limits):
            key = f"with key {toleration.key}" if toleration.key else "without a key"
            message = f"spec.tolerations[{number}] {key} would tolerate {_name_nodes(toleration, limits)}"
            return ExceededLimit("TolerationNotAllowed", message)
    return None


def refuse_hosts(accelerator: str, vendors: Vendors, limits: TenantLimits) -> ExceededLimit | None:
    """Return why a service may not run on hosts, with the way out; None if it may, or runs in pods.

    `limits.hosts` is True of a controller of the whole cluster, to which all hosts belong.
    """
    vendor = vendors.get(accelerator)
    if limits.hosts or vendor is None or vendor.in_pods:
        return None
    in_pods = ", ".join(sorted(name for name, candidate in vendors.items() if candidate.in_pods))
    message = (
        f"accelerator {accelerator} runs on hosts, which belong to the whole cluster, and this controller serves only "
        f"the namespaces of its options --namespace: set hardware.accelerator to one of {in_pods}, or have an "
        "administrator install the controller for the whole cluster"
    )
    return ExceededLimit("HostsOutOfScope", message)


def refuse_queue(service: InferenceService, limits: TenantLimits) -> ExceededLimit | None:
    """Return why the pods of a service may not wait for the queue, with the way out; None if they may, or need not.

    `limits.hosts` is True of a controller of the whole cluster, which has a queue.
    """
    scheduling = service.spec.scheduling
    if limits.hosts or not (scheduling.mode == "Queue" or scheduling.pools):
        return None
    stated = "spec.scheduling.mode is Queue" if scheduling.mode == "Queue" else "spec.scheduling.pools is stated"
    message = (
        f"{stated}, and the queue belongs to the whole cluster, but this controller serves only "
        "the namespaces of its options --namespace: remove it, or have an administrator install the controller for "
        "the whole cluster"
    )
    return ExceededLimit("QueueOutOfScope", message)


def is_image_allowed(image: str, limits: TenantLimits) -> bool:
    """Return whether nodes may pull an image for a tenant."""
    return not limits.image_prefixes or any(_begins_with(image, prefix) for prefix in limits.image_prefixes)


def allowed_tolerations(tolerations: Iterable[Toleration], limits: TenantLimits) -> list[Toleration]:
    """Return the tolerations that are within the limits."""
    return [toleration for toleration in tolerations if _is_allowed(toleration, limits)]


def _is_allowed(toleration: Toleration, limits: TenantLimits) -> bool:
    """Return whether a service may state a toleration: it tolerates no taint that is refused to tenants."""
    refused_taints = (*(() if limits.control_plane else CONTROL_PLANE_TAINTS), *limits.system_taints)
    # An empty key, which the API takes with the operator Exists only, tolerates every taint.
    tolerates_all = toleration.key == "" and bool(refused_taints)
    return not tolerates_all and not any(_matches_taint(toleration.key, taint) for taint in refused_taints)


def _matches_taint(key: str, taint: str) -> bool:
    return key == taint or (taint.endswith("/") and key.startswith(taint))


def _name_nodes(toleration: Toleration, limits: TenantLimits) -> str:
    """Return the nodes that a toleration is refused for, with the way out."""
    if any(_matches_taint(toleration.key, taint) for taint in limits.system_taints):
        return "nodes that the platform team keeps for itself (--system-taint): name the keys of other taints"
    if limits.control_plane:  # they are allowed, so it is refused for its empty key alone
        return "every node, also those of --system-taint: name the keys of taints"
    return (
        "control-plane nodes: name the keys of other taints, or ask the platform team for "
        "--allow-control-plane-tolerations"
    )


def _begins_with(image: str, prefix: str) -> bool:
    """Return whether an image begins with a prefix of whole names: `a.example` allows no `a.example.com/b`."""
    if not image.startswith(prefix):
        return False
    next_character = image[len(prefix) : len(prefix) + 1]  # empty if the image is the prefix
    return prefix[-1:] in "/:@" or next_character in {"", "/", ":", "@"}


DEFAULT_IMAGE: Final = f"ghcr.io/pomona-dev/pomona:{version('pomona')}"


class PodSettings(msgspec.Struct, frozen=True):
    """Options of the controller that reach pods."""

    image: str = DEFAULT_IMAGE
    """Image with `pomona` as its entry point, for Jobs and for the proxy of each pod; empty: there is none."""
    environment: Mapping[str, str] = {}
    """Variables of the Jobs; the proxy of a pod gets the one with the private networks that sources may lead to."""
    limits: TenantLimits = UNLIMITED
    vendors: Vendors = VENDORS
    network_policies: bool = False
    """True if each service in pods gets a NetworkPolicy."""
    monitoring_namespace: str = "monitoring"
    """Namespace whose pods may read metrics through a NetworkPolicy."""
    node_cache_bytes: int | None = None
    """Size up to which unused copies of weights stay on a node; None: while there is space."""
    monitor_labels: Mapping[str, str] = {}
    """Further labels of PodMonitors, by which a Prometheus selects them."""
    image_pull_secrets: tuple[str, ...] = ()
    """Secrets in each namespace of Models with which nodes pull `image`, for the pods that run it."""
    scheduling_mode: DefaultSchedulingMode = "Queue"
    """Mode of the services that state none and whose pods request devices."""


DEFAULT_SETTINGS: Final = PodSettings()
