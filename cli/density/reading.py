"""The cluster as the commands of this folder read it, with the rights of the user."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from cli.cluster_options import ClusterOptions

if TYPE_CHECKING:
    from cli.cluster_access import Cluster
    from console.density_feed import DensityFeed
    from console.density_prices import DensityPrices
    from console.density_snapshot import DensitySnapshot
    from console.fit_table import FitTable
    from devices.vendors import Vendors

T = TypeVar("T")


def answer_by_cluster(
    target: ClusterOptions, vendors: "Vendors", answer: Callable[["DensitySnapshot", "FitTable"], T]
) -> T:
    """Return what `answer` returns about the cluster as it is now; what may not be read is named on standard error.

    Raises:
        click.ClickException: the cluster cannot be read.
    """
    from cli.cluster_access import run_in_cluster  # noqa: PLC0415 - not needed for --help

    async def read(cluster: "Cluster") -> "DensityFeed":
        return await read_feed(cluster, vendors)

    feed = run_in_cluster(target, read)
    return answer(feed.take_snapshot(), build_table(feed))


async def read_feed(cluster: "Cluster", vendors: "Vendors") -> "DensityFeed":
    """Return the cluster as it is now; what may not be read is named on standard error.

    Raises:
        ApiError: the API server refuses what is needed.
        Unreachable: the API server does not answer.
    """
    from console.density_feed import DensityFeed  # noqa: PLC0415 - not needed for --help

    feed = DensityFeed(vendors)
    for refused in await feed.read_once(cluster.client):
        print(f"not counted, since you may not read it: {refused.call}", file=sys.stderr)
    return feed


def build_table(feed: "DensityFeed") -> "FitTable":
    """Return the table of fits of a cluster."""
    from console.density_feed import CONTEXT_LENGTH  # noqa: PLC0415 - not needed for --help
    from console.fit_table import FitTable  # noqa: PLC0415 - same

    return FitTable(CONTEXT_LENGTH, feed.measured)


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
