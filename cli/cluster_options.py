"""Options of the commands that talk to a cluster: which cluster, as which user, and in which namespace."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click

from cli.completion import complete_namespaces
from cli.options import PATH, gather_options

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
        given = (("-n", namespace or self.namespace), ("--context", self.context), ("--kubeconfig", self.kubeconfig))
        return "".join(f" {option} {shlex.quote(str(value))}" for option, value in given if value)


_OPTIONS: Final = (
    click.option("--kubeconfig", type=PATH, help="Kubeconfig with the cluster and the user. Default: as for kubectl."),
    click.option("--context", metavar="NAME", help="Context of the kubeconfig. Default: the current one."),
)
_NAMESPACE: Final = click.option(
    "--namespace",
    "-n",
    metavar="NAME",
    help="Default: the namespace of the context.",
    shell_complete=complete_namespaces,
)
cluster_options: Final = gather_options("target", ClusterOptions, *_OPTIONS)
"""Adds `--kubeconfig` and `--context` to a command, which gets them as `target`."""
namespaced_cluster_options: Final = gather_options("target", ClusterOptions, *_OPTIONS, _NAMESPACE)
"""Adds `--kubeconfig`, `--context` and `--namespace` to a command, which gets them as `target`."""
