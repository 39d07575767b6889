"""The cluster as the commands of this folder read it, with the rights of the user."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from cli.cluster_options import ClusterOptions

if TYPE_CHECKING:
    from cli.cluster_access import Cluster
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
    from console.density_feed import CONTEXT_LENGTH, DensityFeed  # noqa: PLC0415 - same
    from console.fit_table import FitTable  # noqa: PLC0415 - same

    async def read(cluster: "Cluster") -> DensityFeed:
        feed = DensityFeed(vendors)
        for refused in await feed.read_once(cluster.client):
            print(f"not counted, since you may not read it: {refused.call}", file=sys.stderr)
        return feed

    feed = run_in_cluster(target, read)
    return answer(feed.take_snapshot(), FitTable(CONTEXT_LENGTH, feed.measured))


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
