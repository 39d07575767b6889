"""All that a service shows of its speed: on each device class, of its replicas, and the place that follows from it.

`status.placement` is the place of its last replica, with the score and the best other places.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from msgspec.structs import replace

from controller.placement.alternatives import NO_ROOM, Alternative
from controller.placement.placement_notes import PlacementNote, PlacementNotes
from controller.placement.units import NOT_FASTER, SPEED_UNKNOWN, TOO_SLOW, TOO_TIGHT
from controller.reconcile.conditions import condition
from controller.reconcile.plan import Snapshot
from controller.services.class_speeds import FindSpeeds, SpeedAssessor, cut_speeds, describe_refusal, find_no_speeds
from controller.services.device_classes import find_replica_class
from controller.services.performance_source import BenchmarkProblem, PerformanceSource
from controller.services.probe_wait import ProbeSource, find_basis
from controller.services.speed_replacer import ReplacementReport, SpeedReplacer
from controller.services.status import ServiceView
from crds.inferenceservice import ServicePerformance
from crds.meta import without_defaults
from crds.placement import (
    MOST_NODE_SPEEDS,
    ClassSpeed,
    NodeSpeed,
    PlacementAlternative,
    PlacementStatus,
    SpeedBasis,
)
from crds.rate import format_rate, is_notable_change, read_rate
from devices.device_class import find_single_class
from devices.vendors import Vendors
from fitness.performance import hash_model
from kube.client import Obj
from kube.resources import ObjectKey

_REFUSALS = {
    NO_ROOM: "too little is free there",
    TOO_SLOW: "slower than spec.placement.minTokensPerSecond",
    SPEED_UNKNOWN: "its speed is unknown, and spec.placement.minTokensPerSecond is stated",
    TOO_TIGHT: "fits less well than spec.placement.minFit",
    NOT_FASTER: "not known to be faster than the slow replica that was replaced",
}


def report_placement(
    note: PlacementNote | None, last: PlacementStatus | None, speeds: Iterable[ClassSpeed], nodes: Collection[str]
) -> PlacementStatus | None:
    """Return `status.placement`, the place of the last placed replica; None: no replica runs there any more.

    Args:
        note: the place that this leader has chosen, with the others that it compared; None: it has chosen none, so the
            last report stays while a replica is there. Without a score, others were evicted for the replica.
        last: the last report. Its place is `node/NAME` or `host/NAME`, and so is `note.cell`: a cell is a node or host
            as the queue sees it.
        speeds: the speed by device class.
        nodes: names of the nodes and hosts with a replica.
    """
    # Without a replica at the place, there is nothing to report. A place is `node/NAME` or `host/NAME`.
    if note is None:
        return last if last is not None and last.place.partition("/")[2] in nodes else None
    if note.cell.partition("/")[2] not in nodes:
        return None

    # The queue places by the class of one device, and a replica may have several.
    by_class = {find_single_class(speed.device_class): speed for speed in speeds}
    speed = by_class.get(note.device_class)

    return PlacementStatus(
        place=note.cell,
        device_class=speed.device_class if speed is not None else note.device_class,
        score=note.score.points if note.score is not None else None,
        tokens_per_second=speed.tokens_per_second if speed is not None else None,
        source=speed.source if speed is not None else None,
        fit=speed.fit if speed is not None else None,
        reason=note.score.explain() if note.score is not None else "others ended to make room for it there",
        others=[_describe_alternative(other, by_class.get(other.device_class)) for other in note.others],
    )


def _describe_alternative(other: Alternative, speed: ClassSpeed | None) -> PlacementAlternative:
    """Return a place that was not chosen as the status has it, with its score, or the reason why it was refused.

    Its speed is the one that its score was computed from, else that of its device class.
    """
    score = other.score
    tokens_per_second = speed.tokens_per_second if speed is not None else None
    if score is not None and score.tokens_per_second:
        tokens_per_second = format_rate(score.tokens_per_second)

    return PlacementAlternative(
        place=other.cell,
        device_class=speed.device_class if speed is not None else other.device_class,
        score=score.points if score is not None else None,
        tokens_per_second=tokens_per_second,
        reason=score.explain() if score is not None else _REFUSALS.get(other.refusal, other.refusal),
    )


def report_node_speeds(
    last: Sequence[NodeSpeed], classes: Sequence[ClassSpeed], nodes: Collection[str], class_by_node: Mapping[str, str]
) -> Sequence[NodeSpeed]:
    """Return `status.nodeSpeeds`: the speed on each node and host with a replica, if they differ notably; else none.

    Each change of it moves conversations of the gateway to other replicas. So the last report stays as long as it has
    the same nodes and each speed is about the same, and a node whose speed cannot be told now keeps the last one.

    Args:
        last: the last report.
        classes: the speed by device class; empty while the service cannot be served as its spec states.
        nodes: names of the nodes and hosts with a replica.
        class_by_node: the device class of these, as far as it is known.
    """
    by_class = {speed.device_class: speed.tokens_per_second for speed in classes}
    found = [
        NodeSpeed(node=node, tokens_per_second=rate)
        for node, device_class in sorted(class_by_node.items())
        if (rate := by_class.get(device_class))
    ]
    # A node whose speed cannot be told now keeps the last one.
    told = {speed.node for speed in found}
    found += [speed for speed in last if speed.node in nodes and speed.node not in told]
    del found[MOST_NODE_SPEEDS:]
    rates, last_rates = (
        {speed.node: read_rate(speed.tokens_per_second) or 0.0 for speed in speeds} for speeds in (found, last)
    )
    has_same_nodes = rates.keys() == last_rates.keys()
    if has_same_nodes and not any(is_notable_change(last_rates[node], rate) for node, rate in rates.items()):
        return last
    return found if rates and is_notable_change(min(rates.values()), max(rates.values())) else ()


FITS: Final = "Fits"
"""Condition of a service: whether any device class of the cluster could run a replica as it is demanded."""
BENCHMARKED: Final = "Benchmarked"
"""Condition of a service whose model could not be measured."""


class SpeedReport(NamedTuple):
    """The speed of a service."""

    classes: tuple[ClassSpeed, ...] = ()
    """On each device class."""
    placement: PlacementStatus | None = None
    """Place of the last replica that was placed; None: unknown."""
    performance: ServicePerformance | None = None
    """Measured on the hardware of the replicas; None: it is unknown."""
    problem: BenchmarkProblem | None = None
    """Why the last benchmark has measured nothing."""
    replacement: ReplacementReport | None = None
    """The replacement of a replica that is slow; None: it was not looked at."""
    nodes: Sequence[NodeSpeed] = ()
    """On each node and host with a replica; empty: they are about equally fast, or it is unknown."""

    def add_to(self, status: Obj, generation: int) -> Obj:
        """Return a status with the speed, and with a condition if it could not be measured."""
        reported = dict(status)
        if self.classes:
            reported["speeds"] = [without_defaults(speed) for speed in cut_speeds(self.classes)]
        if self.nodes:
            reported["nodeSpeeds"] = [without_defaults(speed) for speed in self.nodes]
        if self.placement is not None:
            reported["placement"] = without_defaults(self.placement)
        if self.performance is not None:
            reported["performance"] = without_defaults(self.performance)

        further = [describe_fit(self.classes, generation)] if self.classes else []
        if self.problem is not None:
            reason, message = self.problem
            further.append(condition(BENCHMARKED, true=False, reason=reason, message=message, generation=generation))
        return {**reported, "conditions": [*status["conditions"], *further]}


class SpeedSources(NamedTuple):
    """The sources of what is known of speeds; None: the controller has no such source."""

    measured: PerformanceSource | None = None
    assessor: SpeedAssessor | None = None
    notes: PlacementNotes | None = None
    probes: ProbeSource | None = None
    replacer: SpeedReplacer | None = None
    """Replaces replicas that are slow."""

    @property
    def find_speeds(self) -> FindSpeeds:
        """The function that returns the speed of a service on each device class of an accelerator."""
        return self.assessor.assess if self.assessor is not None else find_no_speeds

    def report(self, snapshot: Snapshot, key: ObjectKey, view: ServiceView, vendors: Vendors) -> SpeedReport:
        """Return all that the status shows of the speed of a service; begin the replacement of a replica if it is due.

        From now on, if it can be served and has no companions, a changed measurement of its Model enqueues it.
        """
        # 1. The speed on each device class; a choice of accelerators has it already.
        if view.accelerator_choice is not None:
            classes = view.accelerator_choice.speeds
        else:
            classes = self.find_speeds(key, view.service, view.accelerator, view.served)

        # 2. The key of its measurements, which are made without companions; empty: it has none.
        model_hash = ""
        if view.served is not None and not view.served.companions:
            model_hash = hash_model(view.served.model, view.served.runtime, view.service.spec)

        # 3. The last place of a replica, by the note of the queue; None: this leader has placed none.
        note = self.notes.find(key) if self.notes is not None else None
        placement = report_placement(note, view.service.status.placement, classes, view.replicas.nodes)
        if placement is not None and note is not None:
            placement = replace(placement, basis=self._find_basis(key, view, classes, placement.device_class))

        # 4. The speed on each node and host with a replica.
        class_by_node = _find_node_classes(snapshot, view, vendors)
        nodes = report_node_speeds(view.service.status.node_speeds, classes, view.replicas.nodes, class_by_node)

        # 5. The measured speed where replicas are, or why there is none.
        performance = problem = None
        if self.measured is not None:
            problem = self.measured.find_problem(key)
            if model_hash:
                performance = self.measured.find_performance(key, model_hash, set(class_by_node.values()))
            else:
                self.measured.forget(key)  # it shows no measured speed

        # 6. The replacement of a slow replica.
        replacement = self.replacer.report(snapshot, key, view, classes) if self.replacer is not None else None
        return SpeedReport(classes, placement, performance, problem, replacement, nodes)

    def _find_basis(
        self, key: ObjectKey, view: ServiceView, classes: Sequence[ClassSpeed], device_class: str
    ) -> SpeedBasis | None:
        """Return how the speed by which the last replica was placed came to be known, as `find_basis`; None: unknown.

        `device_class` is that of its place.
        """
        speed = next((class_speed for class_speed in classes if class_speed.device_class == device_class), None)
        record = None
        if self.measured is not None and view.served is not None:
            model_hash = hash_model(view.served.model, view.served.runtime, view.service.spec)
            record = self.measured.table.find(model_hash, device_class, key.namespace)
        probing_since = view.accelerator_choice.probing_since if view.accelerator_choice is not None else ""
        return find_basis(speed, record, probing_since)

    def forget(self, key: ObjectKey) -> None:
        """Forget a service that is gone."""
        for source in self:
            if source is not None:
                source.forget(key)

    def restart(self) -> None:
        """Forget what an earlier leadership knew."""
        for source in (self.notes, self.probes, self.replacer):
            if source is not None:
                source.restart()


def describe_fit(classes: Sequence[ClassSpeed], generation: int) -> Obj:
    """Return the condition Fits: whether a replica fits on any device class, and what is missing if not.

    It looks at what devices have in all; what is free on them now is the matter of the queue.
    """
    fitting = [speed for speed in classes if speed.refusal is None and speed.fit not in {None, "too_tight"}]
    unknown = [speed for speed in classes if speed.refusal is None and speed.fit is None]

    true: bool | None = False  # None: the condition is Unknown
    if fitting:
        best = fitting[0]  # the classes are sorted, the fastest first
        rate = f", {best.tokens_per_second} tokens/s" if best.tokens_per_second else ""
        number = f"{len(fitting)} of {len(classes)} device classes"
        true, reason = True, "Fits"
        message = f"fits on {number}, best on {best.device_class} ({best.fit}{rate})"
    elif unknown:
        true, reason = None, "Unknown"
        message = f"the memory of a replica on {unknown[0].device_class} is unknown: see the conditions of the Model"
    else:
        # The reason of the first class that the service refuses, or too little memory everywhere.
        reason = next((speed.refusal for speed in classes if speed.refusal is not None), None) or "TooTight"
        reasons = "; ".join(f"{speed.device_class}: {describe_refusal(speed)}" for speed in classes)
        message = f"fits on no device class; {reasons}"
    return condition(FITS, true=true, reason=reason, message=message, generation=generation)


def _find_node_classes(snapshot: Snapshot, view: ServiceView, vendors: Vendors) -> dict[str, str]:
    """Return the device class of a replica on each node and host that runs one, as far as known, of the first ones."""
    # A choice has its accelerators in one text, with commas.
    stated = view.accelerator if view.accelerator_choice is None else view.accelerator_choice.accelerator
    accelerators = (stated or "").split(",")
    return {
        node: device_class
        for node in sorted(view.replicas.nodes)[:MOST_NODE_SPEEDS]
        if (device_class := find_replica_class(snapshot, view.service, accelerators, node, vendors)) is not None
    }
