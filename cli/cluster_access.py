"""Run the work of a command on a cluster, and report each failure as one line with the way out."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from difflib import get_close_matches
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, TypeVar

import click

from cli.api_objects import Obj
from cli.cluster_errors import describe_api_error, describe_unreachable, is_unknown_kind
from cli.cluster_options import DEFAULT_NAMESPACE, ClusterOptions
from cli.output import print_asked
from kube.errors import ApiError, Gone, NotFound, Unreachable
from kube.kubeconfig import CredentialsError
from kube.resources import Resource

if TYPE_CHECKING:
    from kube.client import Client
    from kube.credentials import Credentials

INTERRUPTED_EXIT: Final = 130
"""Exit code of a command that Ctrl-C ended, as shells have it."""
_MOST_NAMED: Final = 8
_OUTAGE_SECONDS: Final = 30.0
_RETRY_SECONDS: Final = 1.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Cluster:
    """An open cluster."""

    client: "Client"
    credentials: "Credentials"
    namespace: str
    """Namespace of the command."""
    target: ClusterOptions
    """The options that the user gave, which each command in a hint needs, too."""

    def say_asked(self) -> None:
        """Say on standard error that this cluster was asked, for commands that ask a `pomona up` in preference."""
        print_asked(f"cluster {self.credentials.context or self.credentials.server}")


def run_in_cluster(
    target: ClusterOptions,
    work: Callable[[Cluster], Awaitable[T]],
    *,
    timeout: float | None = None,
    instead: str = "",
) -> T:
    """Run `work` with the cluster that the user means, for `timeout` seconds at most, and return its result.

    Args:
        target: the options that choose cluster and namespace.
        work: gets the open cluster.
        timeout: None: no limit.
        instead: the way out of a user without a cluster, for the message that there is none.

    Raises:
        TimeoutError: it takes longer.
        click.ClickException: it failed; the message is one line with the way out.
        KeyboardInterrupt: Ctrl-C.
    """
    import structlog  # noqa: PLC0415 - not needed for --help

    from kube import credentials  # noqa: PLC0415 - same

    try:
        loaded = credentials.load(target.kubeconfig, context=target.context)
    except CredentialsError as error:
        raise click.ClickException(f"{error}{instead}") from error

    # Log nothing meanwhile: what a library would log is said in the message, and standard output is for the result.
    settings = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        return asyncio.run(asyncio.wait_for(_run(loaded, target, work), timeout))
    except ApiError as error:
        raise click.ClickException(describe_api_error(error, loaded.server)) from error
    except Unreachable as error:
        raise click.ClickException(describe_unreachable(error, loaded.server)) from error
    finally:
        structlog.configure(**settings)


async def _run(loaded: "Credentials", target: ClusterOptions, work: Callable[[Cluster], Awaitable[T]]) -> T:
    """Connect to the API server and run `work`, in the namespace of the options, else of the context."""
    from kube.client import connect  # noqa: PLC0415 - not needed for --help

    async with connect(loaded) as client:
        return await work(Cluster(client, loaded, target.namespace or loaded.namespace or DEFAULT_NAMESPACE, target))


async def read_object(client: "Client", resource: Resource, name: str, namespace: str | None = None) -> Obj:
    """Read an object that the user has named; without a namespace, its kind belongs to the whole cluster.

    Raises:
        click.ClickException: it does not exist; the message has similar names.
    """
    # KIND/NAME, as kubectl takes it, is no name.
    if "/" in name:
        alone = name.rpartition("/")[2] or "NAME"
        raise click.ClickException(f"{name} is not a name: give the name of the {resource.kind} alone, {alone}")

    try:
        return await client.get(resource, name, namespace)
    except NotFound as error:
        # Not the object is missing, but its kind: Pomona is not installed.
        if is_unknown_kind(error):
            raise

        names = [item["metadata"]["name"] for item in (await client.list_metadata(resource, namespace)).items]
        raise click.ClickException(describe_missing(resource, name, namespace, names)) from error


def describe_missing(resource: Resource, name: str, namespace: str | None, names: list[str]) -> str:
    """Return the message that an object does not exist, with names that the user may have meant."""
    place = f" in namespace {namespace}" if namespace else ""
    missing = f"{resource.kind} {name} does not exist{place}"
    if near := get_close_matches(name, names, n=1):
        return f"{missing}: did you mean {near[0]}?"
    if not names:
        return f"{missing}: there is none" + (": another namespace is chosen with -n" if namespace else "")
    shown = ", ".join(sorted(names)[:_MOST_NAMED]) + (", ..." if len(names) > _MOST_NAMED else "")
    return f"{missing}: there {'is' if len(names) == 1 else 'are'} {shown}"


async def watch_object(
    client: "Client", resource: Resource, name: str, namespace: str | None = None
) -> AsyncGenerator[Obj | None, None]:
    """Yield an object as it is and after each change, without end; None if there is no such object.

    An outage of the API server is survived for half a minute.

    Raises:
        ApiError: the server refuses.
        Unreachable: the server does not answer.
    """
    clock = asyncio.get_running_loop().time
    selector = f"metadata.name={name}"
    failing_since: float | None = None  # the time of the first failure of an outage; None: there is none now
    while True:
        try:
            # 1. The object as it is now.
            listed = await client.list(resource, namespace, field_selector=selector)
            failing_since = None
            yield listed.items[0] if listed.items else None

            # 2. Its changes, until the server ends the watch.
            version = listed.resource_version
            events = client.watch(resource, namespace, resource_version=version, field_selector=selector)
            async with contextlib.aclosing(events):
                async for event in events:
                    if event.type != "BOOKMARK":  # a bookmark is no change
                        yield None if event.type == "DELETED" else event.object
            # A server that ends each watch at once must not be asked without a pause.
            await asyncio.sleep(_RETRY_SECONDS)
        except Gone:
            # The server no longer knows the version from which the watch went on: list again at once.
            continue
        except (ApiError, Unreachable) as error:
            # A watch may be quiet for long before it is cut: only the time since the first failure is an outage.
            failing_since = clock() if failing_since is None else failing_since
            if not _is_transient(error) or clock() - failing_since > _OUTAGE_SECONDS:
                raise
            await asyncio.sleep(_RETRY_SECONDS)


def _is_transient(error: ApiError | Unreachable) -> bool:
    """Decide whether a failure may end by itself."""
    return (
        isinstance(error, Unreachable)
        or error.status == HTTPStatus.TOO_MANY_REQUESTS
        or error.status >= HTTPStatus.INTERNAL_SERVER_ERROR
    )
