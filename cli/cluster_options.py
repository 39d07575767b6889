"""Options of the commands that talk to a cluster: which cluster, as which user, and in which namespace."""

import functools
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click

from cli.completion import complete_namespaces

DEFAULT_NAMESPACE: Final = "default"


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """The cluster that the user means."""

    kubeconfig: Path | None = None
    """None: as for kubectl."""
    context: str | None = None
    """None: the current context."""
    namespace: str | None = None
    """None: the namespace of the context."""

    def render(self, *, namespace: str | None = None) -> str:
        """Return what was given as options that follow a command, such as ` -n team-a`, also one of kubectl.

        Args:
            namespace: the namespace of the command, instead of the one that was given.
        """
        given = (
            ("-n", namespace or self.namespace),
            ("--context", self.context),
            ("--kubeconfig", self.kubeconfig),
        )
        return "".join(f" {option} {shlex.quote(str(value))}" for option, value in given if value)


def cluster_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--kubeconfig` and `--context`, as the argument `target`."""
    return _add_options(function, is_namespaced=False)


def namespaced_cluster_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--kubeconfig`, `--context` and `--namespace`, as the argument `target`."""
    return _add_options(function, is_namespaced=True)


def _add_options(function: Callable[..., Any], *, is_namespaced: bool) -> Callable[..., Any]:
    @functools.wraps(function)
    def with_target(
        *args: Any, kubeconfig: Path | None, context: str | None, namespace: str | None = None, **more: Any
    ) -> Any:
        return function(*args, target=ClusterOptions(kubeconfig, context, namespace), **more)

    options = [
        click.option(
            "--kubeconfig",
            type=click.Path(path_type=Path),
            help="Kubeconfig with the cluster and the user. Default: as for kubectl.",
        ),
        click.option("--context", metavar="NAME", help="Context of the kubeconfig. Default: the current one."),
    ]
    if is_namespaced:
        options.append(
            click.option(
                *("--namespace", "-n"),
                metavar="NAME",
                help="Default: the namespace of the context.",
                shell_complete=complete_namespaces,
            )
        )
    decorated: Callable[..., Any] = with_target
    for option in reversed(options):
        decorated = option(decorated)
    return decorated
