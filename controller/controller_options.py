"""Options of the controller, as its command line states them."""

import ssl
from pathlib import Path
from typing import NamedTuple

from controller.http_endpoints import BindAddress
from controller.placement.planner import MIN_RUN_SECONDS
from controller.placement.replacement import ReplacementRules
from controller.pod_settings import PodSettings


class ControllerOptions(NamedTuple):
    """Options of the command line."""

    pods: PodSettings
    """Settings of all pods: those of Jobs, and those that serve."""
    trust: ssl.SSLContext | None = None
    """Trust for the certificates of hosts; None: the system's roots."""
    elects: bool = True
    """Compete for leadership; else lead at once, which is only for a controller that runs alone."""
    namespaces: tuple[str, ...] = ()
    """The only namespaces that it reads and writes, without hosts; none: the whole cluster."""
    min_run_seconds: float = MIN_RUN_SECONDS
    """Time for which an admitted replica is not evicted for another one."""
    benchmarks: bool = False
    """Measure the speed of models on idle devices."""
    gateway: bool = False
    """The cluster has a gateway: make its keys, and copy the tokens of services to it. Only for the whole cluster."""
    flexinfer_export: bool = False
    """Write measured speeds for programs of FlexInfer, too."""
    replacement: ReplacementRules = ReplacementRules()
    """Rules for the replacement of replicas that are slow or do not fit."""
    preflight: BindAddress | None = None
    """Address of the preflight webhook; None: it is off. Only for the whole cluster."""
    preflight_folder: Path = Path("/etc/pomona/preflight")
    """Folder with the certificate of the preflight webhook, its key and its path."""
