"""Settings of the administrator that concern pods: those of Jobs, and those that serve."""

from collections.abc import Mapping
from importlib.metadata import version
from typing import Final

import msgspec

from controller.tenant_limits import UNLIMITED, TenantLimits
from crds.meta import DefaultSchedulingMode
from devices.vendors import VENDORS, Vendors

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
