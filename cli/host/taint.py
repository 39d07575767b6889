"""`pomona host taint`: keep services off a host that do not tolerate its taints, as kubectl does with a node."""

import re
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import click
import msgspec

from cli.api_objects import Obj
from cli.cluster_access import Cluster, read_object, run_in_cluster
from cli.cluster_options import ClusterOptions, cluster_options
from cli.completion import complete_hosts
from crds.meta import CLI_FIELD_MANAGER
from crds.metalhost import HostTaint
from kube.errors import Conflict
from kube.resources import METAL_HOSTS

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
def command(name: str, changes: tuple[str, ...], *, target: ClusterOptions) -> None:
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
