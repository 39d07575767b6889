"""The replicas of a service that a user names: by number, in the order of their names, or by name."""

from collections.abc import Sequence

import click

from cli.api_objects import Obj


def choose_replicas(name: str, replicas: Sequence[Obj], wanted: str | None) -> list[Obj]:
    """Return the wanted replica, or all.

    Args:
        name: the service.
        replicas: its pods and MetalProcesses.
        wanted: number or name of one; None: all.

    Raises:
        click.ClickException: there is none such.
    """
    if wanted is None:
        return list(replicas)
    matching = [
        replica for number, replica in enumerate(replicas) if wanted in {str(number), replica["metadata"]["name"]}
    ]
    if not matching:
        there = ", ".join(f"{number} ({replica['metadata']['name']})" for number, replica in enumerate(replicas))
        raise click.ClickException(f"{name} has no replica {wanted}: choose {there}")
    return matching


def may_be_on_hosts(service: Obj) -> bool:
    """Return whether replicas of a service may be processes on hosts; pods are those of all other accelerators.

    A service that may use several accelerators may still have processes on hosts that it is about to leave.
    """
    status = service.get("status", {})
    return "choice" in status or status.get("accelerator") in {None, "", "metal"}
