"""`pomona plan drain` and `pomona plan add`: what one machine less or more does to the replicas.

Of a host or node that is drained, where its replicas would go; of a further one, which replicas it would start.
"""

from pathlib import Path
from typing import Final

import click
import yaml

from cli.api_objects import Obj
from cli.cluster_access import Cluster, run_in_cluster
from cli.cluster_options import ClusterOptions, cluster_options
from cli.completion import complete_cells
from cli.options import EXISTING_FILE
from cli.output import facts_option
from cli.queue.controller_settings import StatedSettings, controller_options
from crds.quantity import quantity_bytes
from devices.vendors import Vendors


@click.command("drain")
@click.argument("name", metavar="HOST|NODE", shell_complete=complete_cells)
@facts_option("table", "wide")
@controller_options
@cluster_options
def drain(name: str, *, target: ClusterOptions, stated: StatedSettings, output_format: str) -> None:
    """Show where the replicas of a host or node would go if it were drained, and which would wait.

    Write host/NAME or node/NAME if both have the name. Nothing is drained: `pomona host drain` and `kubectl drain` do
    that. A process on a host that fits nowhere else would serve on.

    \b
    Examples:
      pomona plan drain studio-1
      pomona plan drain node/gpu-3 -o json
    """
    from cli.queue.plan_output import print_plan  # noqa: PLC0415 - not needed for --help
    from cli.queue.planning import plan_drain  # noqa: PLC0415 - same

    # cell: the name with the kind, such as host/studio-1
    cell, plan = run_in_cluster(target, lambda cluster: plan_drain(cluster, name, stated))
    print_plan(plan, output_format, {"drained": cell}, empty=f"no replica is on {cell}")


_NAME: Final = "new"
_METAL: Final = "metal"
_CPU: Final = "1000"
_PODS: Final = "110"
_READY: Final[Obj] = {
    "type": "Ready",
    "status": "True",
    "reason": "Planned",
    "message": "",
    "lastTransitionTime": "2026-01-01T00:00:00Z",
}


@click.command("add")
@click.option("--accelerator", metavar="NAME", help="Accelerator of the node, such as nvidia; or metal: a host.")
@click.option("--devices", type=click.IntRange(min=1), help="Devices of the node.")
@click.option("--memory", metavar="QUANTITY", help="Memory of the node, or for models on the host, such as 512Gi.")
@click.option("--label", "labels", multiple=True, metavar="KEY=VALUE", help="Label of the node. Repeatable.")
@click.option(
    "--file", "-f", "path", type=EXISTING_FILE, help="YAML of a Node or MetalHost instead, such as that of one like it."
)
@facts_option("table", "wide")
@controller_options
@cluster_options
def add(
    *,
    target: ClusterOptions,
    stated: StatedSettings,
    accelerator: str | None,
    devices: int | None,
    memory: str | None,
    labels: tuple[str, ...],
    path: Path | None,
    output_format: str,
) -> None:
    """Show which replicas of the queue would start if a node or host were added.

    Services that select nodes by labels, such as by the product of their devices, need them as --label, or the YAML of
    a node like the new one. Its name there does not matter.

    \b
    Examples:
      pomona plan add --accelerator nvidia --devices 8 --memory 512Gi
      pomona plan add --accelerator metal --memory 96Gi
      kubectl get node gpu-3 -o yaml > node.yaml && pomona plan add -f node.yaml
    """
    # 1. The machine is described by options or by a file, not by both.
    stated_options = any((accelerator, devices, memory, labels))
    if path is None and (accelerator is None or memory is None):
        raise click.UsageError("nothing to add: give --accelerator and --memory, and --devices of a node, or --file")
    if path is not None and stated_options:
        raise click.UsageError("--file takes no options of a node: write them into the file")

    from cli.queue.plan_output import QueuePlan, print_plan  # noqa: PLC0415 - not needed for --help
    from cli.queue.planning import copy_cluster, copy_for_plan, plan_addition  # noqa: PLC0415 - same

    # 2. Plan its addition.
    async def plan(cluster: Cluster) -> QueuePlan:
        """Return the effect of the machine of the file or of the options, over a copy of the cluster.

        `path` is the file of the machine; None: `accelerator`, `devices`, `memory` and `labels` describe it.
        """
        copied = await copy_for_plan(cluster, copy_cluster(cluster, stated))
        if path is not None:
            added = load_machine(path)
        else:
            added = build_machine(accelerator or "", devices, memory or "", labels, copied.settings.pods.vendors)
        return plan_addition(copied, added)

    print_plan(run_in_cluster(target, plan), output_format, {}, empty="no replica would start on it")


def build_machine(accelerator: str, devices: int | None, memory: str, labels: tuple[str, ...], vendors: Vendors) -> Obj:
    """Return the Node or MetalHost of the options, as if it had just joined.

    Args:
        accelerator: the vendor of its devices; or metal: it is a host.
        devices: their number; None: not stated, as for a host, which has none to count.
        memory: a quantity such as 512Gi.
        labels: labels of the node, each KEY=VALUE.
        vendors: the accelerators that the controller knows.

    Raises:
        click.UsageError: they contradict each other, or there is no such accelerator.
    """
    from runtimes.registry import RUNTIMES  # noqa: PLC0415 - not needed for --help

    try:
        size_bytes = quantity_bytes(memory)
    except ValueError as error:
        raise click.UsageError(f"--memory: {error}") from error
    label_values = {key: value for key, _, value in (label.partition("=") for label in labels)}

    # 1. A host.
    if accelerator == _METAL:
        if devices is not None:
            raise click.UsageError("--devices: a host has none to count, only --memory for models")
        status: Obj = {"availableBytes": size_bytes, "budgetBytes": size_bytes, "runtimes": sorted(RUNTIMES)}
        return prepare_machine({"kind": "MetalHost", "metadata": {"labels": label_values}, "status": status})

    # 2. A node.
    vendor = vendors.get(accelerator)
    if vendor is None or vendor.resource is None:
        choices = ", ".join(sorted([_METAL, *(name for name, entry in vendors.items() if entry.resource)]))
        raise click.UsageError(f"--accelerator {accelerator} has no devices: use one of {choices}")
    if devices is None:
        raise click.UsageError("--devices is missing: a node has at least one")
    # _CPU: so many cores that they limit nothing; _PODS: as many pods as Kubernetes allows by default
    amounts = {"cpu": _CPU, "memory": memory, "pods": _PODS, vendor.resource: str(devices)}
    return prepare_machine({"kind": "Node", "metadata": {"labels": label_values}, "status": {"allocatable": amounts}})


def load_machine(path: Path) -> Obj:
    """Return the Node or MetalHost of a file.

    Raises:
        click.UsageError: the file has none.
    """
    try:
        document = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeError) as error:
        raise click.UsageError(f"--file {path} is no YAML: {error}") from error
    if not isinstance(document, dict) or document.get("kind") not in {"Node", "MetalHost"}:
        raise click.UsageError(f"--file {path} has no Node and no MetalHost: give one of them, alone")
    return prepare_machine(document)


def prepare_machine(obj: Obj) -> Obj:
    """Return a Node or MetalHost as if it had just joined: empty, ready and open for replicas."""
    stated_metadata, status, spec = obj.get("metadata") or {}, dict(obj.get("status") or {}), obj.get("spec") or {}
    # _NAME: the name of the planned machine; _READY: the condition of one that is ready
    metadata = {"name": _NAME, "uid": f"planned-{_NAME}", "resourceVersion": "1", "generation": 1}
    metadata["labels"] = stated_metadata.get("labels") or {}
    status["conditions"] = [dict(_READY)]

    # Drop what says that the machine of the file is in use or closed.
    if obj["kind"] == "Node":
        status["allocatable"] = status.get("allocatable") or status.get("capacity") or {}
        # Taints that Kubernetes sets itself come and go with the state of a node, such as cordoned.
        taints = [taint for taint in spec.get("taints") or () if not taint["key"].startswith("node.kubernetes.io/")]
        spec = {"taints": taints}
    else:
        status["processes"] = []
        status["availableBytes"] = status.get("budgetBytes") or status.get("availableBytes") or 0
        spec = {name: value for name, value in spec.items() if name not in {"unschedulable", "drain"}}
    return {"kind": obj["kind"], "metadata": metadata, "spec": spec, "status": status}
