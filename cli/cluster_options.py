"""Options by which a command for people finds the cluster, and its connection."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import click

from kube import credentials
from kube.client import Client, connect
from kube.credentials import Credentials
from kube.errors import ApiError, Forbidden, Unreachable
from kube.kubeconfig import CredentialsError

F = TypeVar("F", bound=Callable[..., Any])


class Cluster(NamedTuple):
    """A connection to the API server, and what it was opened with."""

    client: Client
    credentials: Credentials


def cluster_options(function: F) -> F:
    """Add `--kubeconfig` and `--context` to a command."""
    for option in (
        click.option("--context", help="Context of the kubeconfig. Default: the current one."),
        click.option(
            "--kubeconfig", type=click.Path(path_type=Path), help="Kubeconfig of the cluster. Default: as for kubectl."
        ),
    ):
        function = option(function)
    return function


@asynccontextmanager
async def open_cluster(kubeconfig: Path | None, context: str | None) -> AsyncIterator[Cluster]:
    """Connect as the user of a context. Raises click.ClickException for every way in which the cluster refuses."""
    try:
        granted = credentials.load(kubeconfig, context=context)
        async with connect(granted) as client:
            yield Cluster(client, granted)
    except CredentialsError as error:
        raise click.ClickException(str(error)) from error
    except Unreachable as error:
        raise click.ClickException(
            f"no answer from the API server: {error}: check --context and the network"
        ) from error
    except Forbidden as error:
        raise click.ClickException(f"this needs the rights of an administrator: {error}") from error
    except ApiError as error:
        raise click.ClickException(str(error)) from error
