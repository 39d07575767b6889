"""The cluster as the commands of this folder read it, with the rights of the user."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from cli.cluster_options import ClusterOptions

if TYPE_CHECKING:
    from cli.cluster_access import Cluster
    from console.density_prices import DensityPrices
    from console.density_snapshot import DensitySnapshot
    from console.fit_table import FitTable
    from controller.placement.cluster_view import ClusterView
    from devices.vendors import Vendors
    from kube.errors import Forbidden
    from kube.resources import Resource

T = TypeVar("T")


def answer_by_cluster(
    target: ClusterOptions, vendors: "Vendors", answer: Callable[["DensitySnapshot", "FitTable"], T]
) -> T:
    """Return what `answer` returns about the cluster as it is now; what may not be read is named on standard error.

    Raises:
        click.ClickException: the cluster cannot be read.
    """
    from cli.cluster_access import run_in_cluster  # noqa: PLC0415 - not needed for --help
    from controller.placement.cluster_view import ClusterView  # noqa: PLC0415 - same

    view = ClusterView(vendors)

    async def read(cluster: "Cluster") -> None:
        report_uncounted(await view.read_once(cluster.client))

    run_in_cluster(target, read)
    return answer_by_view(view, answer)


def report_uncounted(refusals: "Mapping[Resource, Forbidden]") -> None:
    """Name on standard error what the user may not read. Raises Forbidden: no answer is made without it."""
    from controller.placement.cluster_view import MACHINE_KINDS  # noqa: PLC0415 - not needed for --help
    from kube.resources import NODE_FITNESSES, NODES  # noqa: PLC0415 - same

    for resource in (NODE_FITNESSES, NODES):
        if resource in refusals:
            raise refusals[resource]
    for kind in MACHINE_KINDS:
        if kind.resource in refusals:
            print(f"not counted, since you may not read it: {refusals[kind.resource].call}", file=sys.stderr)


def answer_by_view(view: "ClusterView", answer: Callable[["DensitySnapshot", "FitTable"], T]) -> T:
    """Return what `answer` returns about a cluster that was read."""
    from console.density_snapshot import CONTEXT_LENGTH, SnapshotSource  # noqa: PLC0415 - not needed for --help
    from console.fit_table import FitTable  # noqa: PLC0415 - same

    return answer(SnapshotSource(view).take_snapshot(), FitTable(CONTEXT_LENGTH, view.measured))


def load_prices(path: Path | None) -> "DensityPrices":
    """Return the prices of a file; None: none are stated. Raises click.UsageError."""
    import msgspec  # noqa: PLC0415 - not needed for --help
    import yaml  # noqa: PLC0415 - same

    from console.density_prices import DensityPrices  # noqa: PLC0415 - same

    if path is None:
        return DensityPrices()
    try:
        return msgspec.convert(yaml.safe_load(path.read_text()) or {}, DensityPrices)
    except (OSError, UnicodeError, yaml.YAMLError, msgspec.ValidationError) as error:
        raise click.UsageError(f"--prices {path}: {error}") from error
