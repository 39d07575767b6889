"""`pomona controller`: the in-cluster controller."""

import gc
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final, get_args

import click
import uvloop
from msgspec import structs

from artifacts.repositories.address_policy import NETWORKS_VARIABLE, Networks, networks_text
from cli import log
from cli.options import (
    DURATION,
    EXISTING_FILE,
    PATH,
    SIZE,
    SOURCE_VARIABLES,
    Parsed,
    allow_private_sources,
    gather_options,
    kubeconfig_option,
    load_hosts_ca,
    metric_prefix_option,
    name_type,
    read_vendors,
    verbose_option,
)
from cli.replacement_options import replacement_options
from cli.stop_signals import serve_until_stopped
from controller.controller_options import ControllerOptions
from controller.http_endpoints import BindAddress, ControllerHealth, metrics_routes, parse_bind_address, serve
from controller.metrics import ControllerMetrics
from controller.placement.planner import MIN_RUN_SECONDS
from controller.pod_settings import CONTROL_PLANE_TAINTS, DEFAULT_IMAGE, PodSettings, TenantLimits
from controller.run import Controller
from controller.services.pods.beside_pods import parse_monitor_labels
from crds.meta import LABEL_PATTERN, LONGEST_LABEL, LONGEST_NAME, NAME_PATTERN, DefaultSchedulingMode
from devices.limits import raise_descriptor_limit
from kube import credentials
from kube.client import connect
from kube.kubeconfig import CredentialsError

_BIND_ADDRESS: Final = Parsed("ADDRESS", parse_bind_address)
GC_THRESHOLD: Final = 10_000
"""New objects after which garbage is collected: at Python's default of 700 that takes a tenth of a burst's time."""


def _read_monitor_labels(_context: click.Context, param: click.Parameter, texts: tuple[str, ...]) -> Mapping[str, str]:
    """Return the labels of --monitor-label. Raises click.BadParameter."""
    try:
        return parse_monitor_labels(texts)
    except ValueError as error:
        raise click.BadParameter(str(error), param=param) from error


def _list_source_variables(allowed_networks: Networks) -> dict[str, str]:
    """Return the environment variables for Jobs that read sources of weights: mirrors, and private networks allowed."""
    environment = {name: os.environ[name] for name in SOURCE_VARIABLES if name in os.environ}
    return environment | ({NETWORKS_VARIABLE: networks_text(allowed_networks)} if allowed_networks else {})


@click.command()
@kubeconfig_option
@click.option(
    "--namespace",
    "namespaces",
    multiple=True,
    metavar="NAME",
    type=name_type(
        LABEL_PATTERN,
        LONGEST_LABEL,
        "is not a name of a namespace: give one such as team-a, of lower case letters, digits and -, at most "
        f"{LONGEST_LABEL} of them, and repeat the option for several",
    ),
    help="Read and write objects of this namespace only, in which roles are bound to the controller; repeatable. "
    "Services then run in pods, and on no Macs, which belong to the whole cluster. Default: all namespaces, and Macs.",
)
@click.option(
    "--image",
    default=DEFAULT_IMAGE,
    show_default=True,
    help="Image for the Jobs that inspect and download weights, and for the proxy of each pod; its entry point is "
    "pomona. Empty: no Jobs and no pods; public Models that only Macs serve need none.",
)
@click.option(
    "--image-pull-secret",
    "image_pull_secrets",
    multiple=True,
    metavar="NAME",
    type=name_type(
        NAME_PATTERN,
        LONGEST_NAME,
        "is not a name of a Secret: give one such as pomona-registry, of lower case letters, digits, - and ., at most "
        f"{LONGEST_NAME} of them",
    ),
    help="Secret with which nodes pull --image from a private registry. You create it in each namespace of Models, or "
    "give these namespaces' default ServiceAccount its pull secret instead of this option. Repeatable.",
)
@click.option(
    "--hosts-ca",
    type=PATH,
    help="File of certificate authorities, in PEM form, for hosts that serve https. Default: the system's authorities.",
)
@allow_private_sources
@click.option(
    "--leader-elect/--no-leader-elect",
    "elects",
    default=True,
    show_default=True,
    help="Compete for leadership. Turn it off only for a controller that runs alone: two of them would both write.",
)
@click.option(
    "--metrics-bind-address",
    "metrics_address",
    default=":8080",
    show_default=True,
    type=_BIND_ADDRESS,
    help="Address of the metrics, HOST:PORT or :PORT; 0 turns them off.",
)
@metric_prefix_option
@click.option(
    "--health-probe-bind-address",
    "health_address",
    default=":8081",
    show_default=True,
    type=_BIND_ADDRESS,
    help="Address of /healthz and /readyz, HOST:PORT or :PORT; 0 turns them off.",
)
@click.option(
    "--preflight-bind-address",
    "preflight",
    default="0",
    show_default=True,
    type=_BIND_ADDRESS,
    help="Address of the preflight webhook, HOST:PORT or :PORT, over HTTPS: API servers ask it before an "
    "InferenceService is written that fits on no device of the cluster. Its Secret and its configuration come with "
    "the chart. 0: off.",
)
@click.option(
    "--preflight-certificate",
    "preflight_folder",
    default="/etc/pomona/preflight",
    show_default=True,
    type=PATH,
    help="Folder with tls.crt and tls.key of the preflight webhook, and `path`, the last segment of its path.",
)
@click.option(
    "--allowed-image-prefix",
    "image_prefixes",
    multiple=True,
    help="Beginning of the images that an InferenceService may name, such as registry.example/llm/; may be repeated. "
    "Default: all images.",
)
@click.option(
    "--allow-control-plane-tolerations",
    "control_plane",
    is_flag=True,
    help="Accept InferenceServices that tolerate the taints of control-plane nodes: those whose key is "
    f"{', '.join(CONTROL_PLANE_TAINTS)}.",
)
@click.option(
    "--system-taint",
    "system_taints",
    multiple=True,
    help="Key of a taint that no InferenceService may tolerate, such as node-role.kubernetes.io/infra; may be "
    "repeated. One that ends with / stands for all keys that begin with it.",
)
@click.option(
    "--vendors",
    callback=read_vendors,
    type=EXISTING_FILE,
    help="YAML file of accelerators: images, labels and resources that differ from the built-in ones, or new vendors.",
)
@click.option(
    "--network-policies",
    is_flag=True,
    help="Give each service in pods a NetworkPolicy: requests come from pods labelled "
    "inference.pomona.dev/client=true, from namespace pomona-system and from the monitoring; engines reach DNS only.",
)
@click.option(
    "--monitoring-namespace",
    default="monitoring",
    show_default=True,
    help="Namespace that may read the metrics of engines through a NetworkPolicy.",
)
@click.option(
    "--monitor-label",
    "monitor_labels",
    multiple=True,
    metavar="KEY=VALUE",
    callback=_read_monitor_labels,
    help="Label of the PodMonitors, such as release=prometheus, by which a Prometheus selects them; may be repeated. "
    "Default: none.",
)
@click.option(
    "--node-cache-size",
    "node_cache_bytes",
    type=SIZE,
    help="Size of the copies of weights that may stay on each node for Models with spec.cache.scope node, such as "
    "500Gi: beyond it, the copies that were not in use for the longest time are deleted. Default: no limit.",
)
@click.option(
    "--scheduling-mode",
    "mode",
    type=click.Choice(get_args(DefaultSchedulingMode)),
    help="Mode of services whose pods request devices and that state no spec.scheduling.mode. Queue: they wait for the "
    "controller's queue, by priority. Native: Kubernetes' scheduler places them. Default: Queue, or Native with "
    "--namespace, since the queue belongs to the whole cluster.",
)
@click.option(
    "--min-run",
    "min_run_seconds",
    type=DURATION,
    default=f"{MIN_RUN_SECONDS:.0f}s",
    show_default=True,
    help="Time for which a replica runs before it may be evicted for a service of higher priority.",
)
@click.option(
    "--benchmarks",
    is_flag=True,
    help="Measure the speed of models by Jobs on devices that are idle, at the lowest priority: they end when anything "
    "waits for such a device. Without effect with --namespace.",
)
@click.option(
    "--flexinfer-export",
    is_flag=True,
    help="Also write measured speeds into ConfigMap pomona-system/flexinfer-benchmarks, with the names of FlexInfer. "
    "Without effect with --namespace.",
)
@click.option(
    "--gateway",
    is_flag=True,
    help="The cluster has a gateway: make the keys of GatewayKeys, and copy the tokens of all services into Secrets "
    "pomona-gateway-0 to -7 of namespace pomona-system, which the gateway reads. Only without --namespace.",
)
@replacement_options
@verbose_option
@gather_options("limits", TenantLimits)
@gather_options("pods", PodSettings)
@gather_options("options", ControllerOptions)
def command(
    kubeconfig: Path | None,
    *,
    options: ControllerOptions,
    mode: DefaultSchedulingMode | None,
    allowed_networks: Networks,
    hosts_ca: Path | None,
    metrics_address: BindAddress | None,
    health_address: BindAddress | None,
    metric_prefix: str,
    verbose: bool,
) -> None:
    """Run the controller of Models and InferenceServices.

    \b
    Examples:
      pomona controller                                             (in a pod, as its ServiceAccount)
      pomona controller --kubeconfig controller.kubeconfig --image registry.example/pomona:dev
      pomona controller --namespace team-a --namespace team-b       (these namespaces only, without Macs)
    """
    # 1. Which namespaces: empty for all, that is, for the whole cluster.
    namespaces = tuple(dict.fromkeys(options.namespaces))  # each once, in the order that was given
    if namespaces:
        _refuse_cluster_options(mode, options)

    # 2. Prepare the process.
    log.configure(verbose=verbose)
    gc.set_threshold(GC_THRESHOLD, 10, 10)  # collect garbage less often than by default
    raise_descriptor_limit()  # each namespace has several watches

    # 3. Complete the settings of pods, and of the whole, by what follows from several options.
    pods = structs.replace(
        options.pods,
        environment=_list_source_variables(allowed_networks),
        limits=options.pods.limits._replace(hosts=not namespaces),  # hosts belong to the whole cluster
        image_pull_secrets=tuple(dict.fromkeys(options.pods.image_pull_secrets)),
        scheduling_mode=mode or ("Native" if namespaces else "Queue"),
    )
    trust = load_hosts_ca(hosts_ca) if hosts_ca else None
    options = options._replace(pods=pods, trust=trust, namespaces=namespaces)

    # 4. Run until a signal; metrics and health are served beside the controller, if they are not turned off.
    metrics, health = ControllerMetrics(metric_prefix), ControllerHealth()
    try:
        with (
            serve("--metrics-bind-address", metrics_address, metrics_routes(metrics.render)),
            serve("--health-probe-bind-address", health_address, health.routes),
        ):
            uvloop.run(serve_until_stopped(_run(kubeconfig, options, metrics, health)))
    except CredentialsError as error:
        raise click.ClickException(str(error)) from error


def _refuse_cluster_options(mode: DefaultSchedulingMode | None, options: ControllerOptions) -> None:
    """Refuse what a controller of some namespaces cannot do. Raises click.BadParameter."""
    if mode == "Queue":
        message = "Queue needs the whole cluster: leave it out, or leave --namespace out"
        raise click.BadParameter(message, param_hint="'--scheduling-mode'")
    if options.preflight is not None:
        message = "the preflight webhook needs the whole cluster: leave it out, or leave --namespace out"
        raise click.BadParameter(message, param_hint="'--preflight-bind-address'")
    if options.gateway:
        message = "the gateway serves the whole cluster: leave it out, or leave --namespace out"
        raise click.BadParameter(message, param_hint="'--gateway'")


async def _run(
    kubeconfig: Path | None, options: ControllerOptions, metrics: ControllerMetrics, health: ControllerHealth
) -> None:
    """Run the controller until this is cancelled; then it releases leadership, so that another takes over at once."""
    async with (
        connect(credentials.load(kubeconfig), metrics.count_call) as client,
        # After an outage all watches list at once, and the renewal of leadership must not wait for a connection.
        connect(credentials.load(kubeconfig), metrics.count_call) as election,
    ):
        await Controller(
            client, lambda: credentials.load(kubeconfig), options, metrics, health, election=election
        ).run()
