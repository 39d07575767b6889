"""The options of the controller that decide about the queue: as its Deployment states them, or as the user does."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, get_args

import click

from cli.cluster_access import Cluster
from cli.options import DURATION, gather_options
from crds.meta import CONTROLLER_NAMESPACE, DefaultSchedulingMode
from devices.vendors import Vendors
from kube.errors import ApiError, Forbidden, NotFound
from kube.resources import CONFIG_MAPS, DEPLOYMENTS

if TYPE_CHECKING:
    from controller.placement.cluster_copy import QueueSettings

DEPLOYMENT: Final = "pomona-controller"
VENDORS_MAP: Final = "pomona-vendors"


@dataclass(frozen=True, slots=True)
class StatedSettings:
    """The options as the user states them; None: as the Deployment of the controller does."""

    min_run_seconds: float | None = None
    scheduling_mode: DefaultSchedulingMode | None = None


controller_options: Final = gather_options(
    "stated",
    StatedSettings,
    click.option(
        "--min-run",
        "min_run_seconds",
        type=DURATION,
        help="Value of the controller's option --min-run. Default: as in its Deployment.",
    ),
    click.option(
        "--scheduling-mode",
        type=click.Choice(get_args(DefaultSchedulingMode)),
        help="Value of the controller's option --scheduling-mode. Default: as in its Deployment.",
    ),
)
"""Adds `--min-run` and `--scheduling-mode` to a command, which gets them as `stated`."""


async def read_settings(cluster: Cluster, stated: StatedSettings) -> "tuple[QueueSettings, str]":
    """Return the options of the controller that decide the queue, and a line that names those that are assumed.

    They are read from the arguments in the controller's Deployment. If that may not be read or does not exist, they are
    what the user states, else defaults; the line is empty if nothing is assumed.

    Args:
        cluster: the cluster.
        stated: options that the user states, which count more than the controller's.

    Raises:
        click.ClickException: the controller has a table of accelerators that cannot be read.
        ApiError: the API server refuses.
        Unreachable: the API server does not answer.
    """
    from controller.placement.cluster_copy import QueueSettings  # noqa: PLC0415 - not needed for --help

    # 1. Without the Deployment: what the user states, else defaults.
    default = QueueSettings()
    try:
        deployment = await cluster.client.get(DEPLOYMENTS, DEPLOYMENT, CONTROLLER_NAMESPACE)
    except (Forbidden, NotFound) as error:
        settings = merge_settings([], default.pods.vendors, stated)
        # With both options stated, nothing is assumed.
        if stated.min_run_seconds is not None and stated.scheduling_mode is not None:
            return settings, ""
        state = "cannot be read" if isinstance(error, Forbidden) else "does not exist"
        assumed = f"--min-run {settings.min_run_seconds:g}s --scheduling-mode {settings.pods.scheduling_mode}"
        return settings, f"Deployment {DEPLOYMENT} in {CONTROLLER_NAMESPACE} {state}: assuming {assumed}"

    # 2. With it: the arguments of the container `controller`.
    containers = deployment["spec"]["template"]["spec"]["containers"]
    arguments = next((container.get("args") or [] for container in containers if container["name"] == "controller"), [])
    # With --vendors, the controller has a file of accelerators instead of the built-in table.
    has_vendors = find_option(arguments, "--vendors") is not None
    vendors = await _read_vendors(cluster) if has_vendors else default.pods.vendors
    return merge_settings(arguments, vendors, stated), ""


async def _read_vendors(cluster: Cluster) -> Vendors:
    """Return the accelerators of the controller's file.

    Raises:
        click.ClickException: the file cannot be read.
        Unreachable: the API server does not answer.
    """
    from devices.vendor_file import VendorFileError, parse_vendors  # noqa: PLC0415 - not needed for --help
    from runtimes.registry import list_pod_engines  # noqa: PLC0415 - same

    try:
        config_map = await cluster.client.get(CONFIG_MAPS, VENDORS_MAP, CONTROLLER_NAMESPACE)
        return parse_vendors(config_map["data"]["vendors.yaml"], list_pod_engines())
    except (ApiError, VendorFileError, KeyError) as error:
        raise click.ClickException(
            f"the controller has a table of accelerators of its own, ConfigMap {VENDORS_MAP} in "
            f"{CONTROLLER_NAMESPACE}, which cannot be read ({error}): ask an administrator of the cluster"
        ) from error


def merge_settings(arguments: Sequence[str], vendors: Vendors, stated: StatedSettings) -> "QueueSettings":
    """Return the settings of the queue: what the user states, else the arguments of the controller, else defaults."""
    from controller.placement.cluster_copy import QueueSettings  # noqa: PLC0415 - not needed for --help
    from controller.pod_settings import PodSettings  # noqa: PLC0415 - same

    # find_option returns the value of an option, None if it is not given.
    default = QueueSettings()

    # 1. How long a replica runs before it may be evicted.
    min_run_text = find_option(arguments, "--min-run")
    min_run_seconds = stated.min_run_seconds
    if min_run_seconds is None:
        min_run_seconds = DURATION.convert(min_run_text, None, None) if min_run_text else default.min_run_seconds

    # 2. Who places pods: our queue, or Kubernetes' scheduler (Native). A controller of some namespaces has no queue.
    mode = find_option(arguments, "--scheduling-mode")
    is_native = mode == "Native" or (mode is None and find_option(arguments, "--namespace") is not None)
    default_mode: DefaultSchedulingMode = "Native" if is_native else default.pods.scheduling_mode

    # 3. The settings of pods.
    pods = PodSettings(
        image=find_option(arguments, "--image") or default.pods.image,
        image_pull_secrets=tuple(list_values(arguments, "--image-pull-secret")),
        vendors=vendors,
        scheduling_mode=stated.scheduling_mode or default_mode,
    )
    return QueueSettings(pods, min_run_seconds)


def find_option(arguments: Sequence[str], name: str) -> str | None:
    """Return the first value of an option among the arguments of a program; None if there is none."""
    values = list_values(arguments, name)
    return values[0] if values else None


def list_values(arguments: Sequence[str], name: str) -> list[str]:
    """Return the values of an option among the arguments of a program, as `--name=value` or `--name value`."""
    values: list[str] = []
    for number, argument in enumerate(arguments):
        option, equals, value = argument.partition("=")
        if option == name:
            # Without an equals sign, the value is the next argument, if there is one.
            values += [value] if equals else arguments[number + 1 : number + 2]
    return values
