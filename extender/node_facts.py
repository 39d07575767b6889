"""The facts of a node by which it is scored, from its NodeFitness, its labels and its annotations.

Nodes with equal facts have equal scores for every model, so facts are coarse: thousands of nodes are of few kinds.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

from controller.placement.cell_costs import read_number
from crds.meta import GROUP
from crds.nodefitness import NodeFitnessStatus
from crds.size import GIB
from devices.vendors import Vendors
from fitness.stated_hardware import DeviceHardware, describe_node

DEFAULT_ANNOTATION_PREFIX: Final = GROUP
_PERCENT: Final = 100
_UTILIZATION_STEPS: Final = 20


class ScoringFacts(NamedTuple):
    """Everything by which a node is scored."""

    hardware: DeviceHardware = DeviceHardware()
    utilization: float | None = None
    """From 0 to 1, in steps of a twentieth."""
    cost: float | None = None
    """In whatever unit all nodes have it."""
    free_gib: tuple[int | None, ...] = ()
    """Free memory of each device that pods share, in whole GiB; empty: unknown, or no device is shared."""


class NodeReading(NamedTuple):
    """The facts of a node, and the annotations that could not be read, with their values."""

    facts: ScoringFacts
    ignored: tuple[tuple[str, str], ...] = ()


def read_node(
    labels: Mapping[str, str],
    annotations: Mapping[str, str],
    fitness: NodeFitnessStatus | None,
    vendors: Vendors,
    annotation_prefix: str = DEFAULT_ANNOTATION_PREFIX,
) -> NodeReading:
    """Return the facts by which a node is scored, and the annotations that state no valid number.

    Facts are rounded, so that many nodes have equal ones and are scored together. Utilization is that of the
    annotation, else the mean of the devices that the agent reports. Free memory matters only where pods share devices.

    Args:
        labels: labels of the Node.
        annotations: annotations of the Node.
        fitness: what its node agent reports; None: nothing, or it is stale.
        vendors: the table of vendors.
        annotation_prefix: prefix of the annotations with utilization and cost.
    """
    hardware = describe_node(labels, fitness, vendors).round_down()

    # 1. The annotations; `read_number` returns None for a text that is no number from 0, such as "".
    util_name, cost_name = f"{annotation_prefix}/gpu.util", f"{annotation_prefix}/cost"
    util = read_number(annotations.get(util_name, ""))
    util = util if util is not None and util <= 1 else None  # more than 1 is no utilization
    cost = read_number(annotations.get(cost_name, ""))
    # unread also has the annotations that are missing; only those that are there are ignored with a warning.
    unread = [name for name, number in ((util_name, util), (cost_name, cost)) if number is None]
    ignored = tuple((name, annotations[name][:64]) for name in unread if name in annotations)

    # 2. The utilization that the agent reports, if no annotation states a valid one: the mean of the devices.
    if util is None and fitness is not None:
        percents = [device.utilization_percent for device in fitness.devices if device.utilization_percent is not None]
        util = sum(percents) / len(percents) / _PERCENT if percents else None
    # _UTILIZATION_STEPS: the utilization is rounded to a twentieth
    rounded_util = None if util is None else round(util * _UTILIZATION_STEPS) / _UTILIZATION_STEPS

    # 3. The free memory of each device, where pods share devices.
    free_gib: tuple[int | None, ...] = ()
    if hardware.is_shared and fitness is not None:
        free_gib = tuple(None if device.free_bytes is None else device.free_bytes // GIB for device in fitness.devices)
    return NodeReading(ScoringFacts(hardware, utilization=rounded_util, cost=cost, free_gib=free_gib), ignored)
