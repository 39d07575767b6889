"""`pomona host cordon`, `uncordon`, `drain` and `taint`: say what a host takes, as kubectl does with a node."""

import contextlib
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import click
import msgspec

from cli.api_objects import Obj, find_condition
from cli.cluster_access import INTERRUPTED_EXIT, Cluster, read_object, run_in_cluster, watch_object
from cli.cluster_options import ClusterOptions, cluster_options
from cli.completion import complete_hosts
from cli.lazy import program_name
from cli.options import timeout_option
from cli.output import progress_width, wrap_text
from crds.meta import CLI_FIELD_MANAGER, DRAINED
from crds.metalhost import HostTaint
from kube.errors import Conflict
from kube.resources import METAL_HOSTS


@click.command("cordon")
@click.argument("name", shell_complete=complete_hosts)
@cluster_options
def cordon(name: str, *, target: ClusterOptions) -> None:
    """Place no more processes on the host NAME. Those that run there stay.

    \b
    Example:
      pomona host cordon studio-1
    """
    _edit(target, name, {"unschedulable": True})
    print(f"cordoned {name}; `{program_name()} host uncordon {name}{target.render()}` takes it back")


@click.command("uncordon")
@click.argument("name", shell_complete=complete_hosts)
@cluster_options
def uncordon(name: str, *, target: ClusterOptions) -> None:
    """Place processes on the host NAME again, also after it was drained.

    \b
    Example:
      pomona host uncordon studio-1
    """
    _edit(target, name, {"unschedulable": None, "drain": None})
    print(f"uncordoned {name}")


@click.command("drain")
@click.argument("name", shell_complete=complete_hosts)
@click.option("--no-wait", is_flag=True, help="Return at once.")
@timeout_option
@cluster_options
def drain(name: str, *, target: ClusterOptions, no_wait: bool, timeout: float | None) -> None:
    """Cordon the host NAME, and move all its processes to other hosts.

    A process ends when its replacement answers. One that fits on no other host serves on and is named: free memory
    elsewhere, or suspend its service. The command waits until none is left, or until the drain is taken back; Ctrl-C
    ends the wait only.

    \b
    Example:
      pomona host drain studio-1
    """
    host = _edit(target, name, {"unschedulable": True, "drain": True})
    print(f"draining {name}; `{program_name()} host uncordon {name}{target.render()}` takes it back")
    if no_wait:
        return

    # However the wait ends, the drain goes on.
    try:
        run_in_cluster(target, lambda cluster: wait_until_drained(cluster, host), timeout=timeout)
    except TimeoutError as error:
        raise click.ClickException(f"{name} is not drained yet, and goes on draining") from error
    except KeyboardInterrupt:
        print(f"\n{name} goes on draining", file=sys.stderr)
        sys.exit(INTERRUPTED_EXIT)
    print(f"drained {name}: no process is left on it")


def _edit(target: ClusterOptions, name: str, spec: Obj) -> Obj:
    """Merge fields into the spec of a host, and return the host as it is then."""

    async def merge(cluster: Cluster) -> Obj:
        """Patch the host; read it before, for the message with similar names if there is none of this name."""
        await read_object(cluster.client, METAL_HOSTS, name)
        patch = {"spec": spec}
        return await cluster.client.patch_merge(METAL_HOSTS, name, None, patch, field_manager=CLI_FIELD_MANAGER)

    return run_in_cluster(target, merge)


async def wait_until_drained(cluster: Cluster, host: Obj) -> None:
    """Print how far the drain of a host is, after each change, until the controller says that nothing is left on it.

    Args:
        cluster: the cluster.
        host: the host, as the API server returned it with `spec.drain`.

    Raises:
        click.ClickException: the drain was taken back, or the host was removed.
        ApiError: the API server refuses.
        Unreachable: the API server does not answer.
    """
    metadata, printed_message = host["metadata"], ""
    # states: the host as it is now and after each change; None: there is no host of this name
    states = watch_object(cluster.client, METAL_HOSTS, metadata["name"])
    async with contextlib.aclosing(states):
        async for current in states:
            # Another uid: it was removed, and another host of this name has joined.
            if current is None or current["metadata"]["uid"] != metadata["uid"]:
                raise click.ClickException(f"MetalHost {metadata['name']} was removed while it was drained")
            if not current["spec"].get("drain"):
                raise click.ClickException(
                    f"the drain of {metadata['name']} was taken back (spec.drain is not true): what is left there stays"
                )

            # drained: the condition in which the controller reports this drain, once it has seen it
            drained = find_condition(current, DRAINED)
            if drained.get("observedGeneration", 0) < metadata["generation"]:
                continue  # the controller has not seen this drain yet
            if drained["status"] == "True":
                return
            if drained["message"] != printed_message:
                printed_message = drained["message"]
                print("\n".join(wrap_text(printed_message, progress_width())), flush=True)


_CHANGE: Final = re.compile(r"(?P<key>[^=:]+?)(=(?P<value>[^=:]*))?(:(?P<effect>[A-Za-z]+))?(?P<removes>-)?")
_EFFECTS: Final = ("NoSchedule", "NoExecute")
_TRIES: Final = 5
"""Tries against others who edit the same host."""


class TaintChange(NamedTuple):
    """A taint that is set, or taken away: then of each effect if it names none."""

    key: str
    value: str
    effect: str
    removes: bool


@click.command("taint")
@click.argument("name", shell_complete=complete_hosts)
@click.argument("changes", metavar="TAINT...", nargs=-1, required=True)
@cluster_options
def taint(name: str, changes: tuple[str, ...], *, target: ClusterOptions) -> None:
    """Set or remove taints of the host NAME: KEY=VALUE:EFFECT, KEY:EFFECT, or KEY- to remove one.

    Only services run there whose spec.tolerations tolerate all of them. With effect NoSchedule, what runs there stays;
    with NoExecute, it moves to other hosts, each process once its replacement answers.

    \b
    Examples:
      pomona host taint studio-1 dedicated=research:NoSchedule
      pomona host taint studio-1 dedicated-
    """
    wanted = [parse_change(change) for change in changes]

    async def edit(cluster: Cluster) -> list[Obj]:
        """Change the taints of the host, and return them; repeat it if others edit the host at the same time.

        `name` is the host, and `wanted` the changes to its taints.
        """
        # The last of `_TRIES` tries raises the conflict.
        for tries in range(_TRIES):
            # 1. Change the taints that the host has now.
            host = await read_object(cluster.client, METAL_HOSTS, name)
            before = host.get("spec", {}).get("taints") or []
            taints = apply_changes(before, wanted)
            if taints == before:
                return taints

            # 2. Write the list; its version has the API server refuse it if others have edited the host meanwhile.
            version = {"resourceVersion": host["metadata"]["resourceVersion"]}
            patch = {"metadata": version, "spec": {"taints": taints}}
            try:
                await cluster.client.patch_merge(METAL_HOSTS, name, None, patch, field_manager=CLI_FIELD_MANAGER)
            except Conflict:
                if tries == _TRIES - 1:
                    raise
            else:
                return taints
        raise AssertionError  # the last try returns or raises

    taints = run_in_cluster(target, edit)
    texts = ", ".join(msgspec.convert(taint, HostTaint).text for taint in taints)
    print(f"taints of {name}: {texts}" if texts else f"{name} has no taints")


def parse_change(text: str) -> TaintChange:
    """Return a change as a user writes it. Raises click.UsageError."""
    # _CHANGE: a key, then =VALUE, :EFFECT and -, each of which may be missing
    match = _CHANGE.fullmatch(text)
    # Without an effect, KEY- removes the taint with each effect.
    effect = (match["effect"] or "") if match else ""
    if match is None or (not match["removes"] and not effect) or (effect and effect not in _EFFECTS):
        raise click.UsageError(
            f"{text} is no taint: write KEY=VALUE:EFFECT or KEY:EFFECT with effect {' or '.join(_EFFECTS)}, or KEY- to "
            "remove one"
        )
    return TaintChange(key=match["key"], value=match["value"] or "", effect=effect, removes=bool(match["removes"]))


def apply_changes(taints: Sequence[Obj], changes: Iterable[TaintChange]) -> list[Obj]:
    """Return the taints of a host after changes; setting a taint again replaces its value."""
    by_key = {(taint["key"], taint["effect"]): taint for taint in taints}
    for change in changes:
        if change.removes:
            # _EFFECTS: all that a taint of a host may have
            effects = [change.effect] if change.effect else _EFFECTS
            for effect in effects:
                by_key.pop((change.key, effect), None)
        else:
            value = {"value": change.value} if change.value else {}
            by_key[change.key, change.effect] = {"key": change.key, "effect": change.effect, **value}
    return list(by_key.values())
