"""The cluster as the commands of this folder read it, with the rights of the user."""

import sys
from collections.abc import Mapping
from pathlib import Path

import click
import msgspec
import yaml

from cli.cluster_access import Cluster, run_in_cluster
from cli.cluster_options import ClusterOptions
from console.density_prices import DensityPrices
from console.density_snapshot import CONTEXT_LENGTH, DensitySnapshot, SnapshotSource
from console.fit_table import FitTable
from controller.placement.cluster_view import MACHINE_KINDS, ClusterView
from devices.vendors import Vendors
from kube.errors import Forbidden
from kube.resources import NODE_FITNESSES, NODES, Resource


def read_density(target: ClusterOptions, vendors: Vendors) -> tuple[DensitySnapshot, FitTable]:
    """Return the cluster as it is now, and the table that computes how models fit on it as they are asked for.

    Nodes, NodeFitnesses and what runs on them are read with the user's rights; of the latter, what may not be read is
    named on standard error, and not counted.

    Raises:
        click.ClickException: the cluster cannot be read.
    """
    view = ClusterView(vendors)

    async def read(cluster: Cluster) -> None:
        """Fill the view, and name what may not be read."""
        report_uncounted(await view.read_once(cluster.client))

    run_in_cluster(target, read)
    return open_density(view)


def report_uncounted(refusals: Mapping[Resource, Forbidden]) -> None:
    """Name on standard error the kinds that the user may not read, so that the answer does not count their objects.

    Raises Forbidden: among them are Nodes or NodeFitnesses, without which there is no answer.
    """
    for resource in (NODE_FITNESSES, NODES):
        if resource in refusals:
            raise refusals[resource]
    for kind in MACHINE_KINDS:
        if kind.resource in refusals:
            print(f"not counted, since you may not read it: {refusals[kind.resource].call}", file=sys.stderr)


def open_density(view: ClusterView) -> tuple[DensitySnapshot, FitTable]:
    """Return the models and machines of a cluster that was read, and the table that computes how these fit there."""
    return SnapshotSource(view).take_snapshot(), FitTable(CONTEXT_LENGTH, view.measured)


def load_prices(path: Path | None) -> DensityPrices:
    """Return the prices of a file; None: none are stated. Raises click.UsageError."""
    if path is None:
        return DensityPrices()
    try:
        return msgspec.convert(yaml.safe_load(path.read_text()) or {}, DensityPrices)
    except (OSError, UnicodeError, yaml.YAMLError, msgspec.ValidationError) as error:
        raise click.UsageError(f"--prices {path}: {error}") from error
