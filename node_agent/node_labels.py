"""Labels of a Node that state its hardware: which ones are wanted, and which of them this agent may write.

Names after the prefix and values are those of FlexInfer, so that its selectors work with `--label-prefix flexinfer.ai`.
A label that another manager has written is left as it is: each label has one owner.
"""

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec

from crds.nodefitness import NodeFitnessStatus
from kube.client import Obj

FIELD_MANAGER: Final = "pomona-node-agent"
"""Owner of the labels, and of the status of a NodeFitness."""
_MIB: Final = 2**20
_MOST_GIB: Final = 9999
"""The policy pomona-node-agents accepts four digits."""
_ARCHITECTURE: Final = re.compile(r"[a-z0-9]([a-z0-9_.-]{0,30}[a-z0-9])?")


class _NodeMetadata(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    name: str
    uid: str
    resource_version: str
    labels: dict[str, str] = {}
    managed_fields: list[dict[str, Any]] = []


class _NodeMetadataOnly(msgspec.Struct, frozen=True):
    metadata: _NodeMetadata


def read_node_metadata(raw: msgspec.Raw) -> Obj:
    """Decode the part of a Node that this agent needs: a Node has some 10 KiB of images, and changes often."""
    node: Obj = msgspec.to_builtins(msgspec.json.decode(raw, type=_NodeMetadataOnly))
    return node


class LabelConflict(NamedTuple):
    """A wanted label that somebody else owns."""

    name: str
    wanted: str
    present: str
    owner: str
    """The field manager that owns it; empty: it is not recorded."""

    @property
    def sentence(self) -> str:
        """The conflict in words, with the way out."""
        owner = self.owner or "another labeller"
        return (
            f"label {self.name} is {self.present!r} by {owner}, not {self.wanted!r}: remove the label, or let {owner} "
            "leave it out"
        )


class LabelPlan(NamedTuple):
    """The labels that this agent applies to its Node."""

    applied: Mapping[str, str]
    """All labels that it owns afterwards; those that it owned and that are not here are removed."""
    conflicts: tuple[LabelConflict, ...]
    is_due: bool
    """Applying them changes the Node."""


def build_labels(hardware: NodeFitnessStatus, prefix: str) -> dict[str, str]:
    """Return the labels that state this hardware. A fact that is unknown has no label."""
    labels = _build_device_labels(hardware) if hardware.devices else {}
    if hardware.cpu_features:
        has_avx512 = any(feature.startswith("avx512") for feature in hardware.cpu_features)
        labels["cpu.avx512"] = str(has_avx512).lower()
    return {f"{prefix}/{name}": value for name, value in labels.items()}


def _build_device_labels(hardware: NodeFitnessStatus) -> dict[str, str]:
    """Return the labels about devices, without the prefix; a fact that is unknown has none.

    The memory is that of the device with the least; unequal architectures have no label.
    """
    labels = {"gpu.vendor": hardware.vendor.upper(), "gpu.count": str(len(hardware.devices))}

    sizes = [device.memory_bytes for device in hardware.devices]
    reported = [size for size in sizes if size is not None]
    # A pod may get any of the devices, so the label states what the least has. MiB are floored, as by FlexInfer.
    if reported and len(reported) == len(sizes):
        labels["gpu.vram"] = f"{min(min(reported) // _MIB // 1024, _MOST_GIB)}Gi"

    architectures = {device.architecture.lower() for device in hardware.devices}
    if len(architectures) == 1 and _ARCHITECTURE.fullmatch(architecture := architectures.pop()):
        labels["gpu.arch"] = architecture

    if hardware.int4 is not None:
        labels["gpu.int4"] = str(hardware.int4).lower()
    return labels


def plan_labels(wanted: Mapping[str, str], node: Obj) -> LabelPlan:
    """Decide which wanted labels to apply to `node`, which has at least its labels and managedFields.

    A label is applied if it is missing, if this agent alone owns it, or if it shares it with others and wants the value
    that it has. Any other label that has another value is a conflict, and stays.
    """
    labels: Mapping[str, str] = node["metadata"].get("labels") or {}
    owners = _list_owners(node)

    # owners: the field managers of each label; FIELD_MANAGER is this agent.
    own_labels = {name for name, managers in owners.items() if FIELD_MANAGER in managers}

    applied, conflicts = dict[str, str](), list[LabelConflict]()
    for name, value in wanted.items():
        present = labels.get(name)
        other_owners = owners.get(name, set()) - {FIELD_MANAGER}
        # Server-side apply lets several managers own a label if all of them want the same value.
        may_write = not other_owners or present == value
        if present is None or (name in own_labels and may_write):
            applied[name] = value
        elif present != value:
            conflicts.append(LabelConflict(name, wanted=value, present=present, owner=min(other_owners, default="")))

    # Is a write needed?
    changes_values = any(labels.get(name) != value for name, value in applied.items())
    # To apply fewer labels than this agent owns removes the others.
    removes_labels = bool(own_labels - applied.keys())
    return LabelPlan(applied, tuple(conflicts), is_due=changes_values or removes_labels)


def _list_owners(node: Obj) -> dict[str, set[str]]:
    """Return the field managers of each label, by its name, from the managedFields of a Node.

    A label that was written under this agent's name by an Update, and not by its server-side apply, counts as another
    manager's: an apply could not remove it.
    """
    owners: dict[str, set[str]] = {}
    for entry in node["metadata"].get("managedFields") or ():
        labels: Mapping[str, Any] = entry.get("fieldsV1", {}).get("f:metadata", {}).get("f:labels", {})
        manager = str(entry.get("manager", ""))
        if manager == FIELD_MANAGER and entry.get("operation") != "Apply":
            manager = f"{manager} ({entry.get('operation')})"
        for field in labels:
            if field.startswith("f:"):  # managedFields write f:NAME for a field
                owners.setdefault(field[2:], set()).add(manager)
    return owners
