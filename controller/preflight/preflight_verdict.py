"""The decision of preflight: whether a service may be written, by what the condition `Fits` would say of it.

Only a service is refused that certainly fits on no device class of the cluster as it is. What is unknown passes with a
warning, and so does every edit of a service that did not fit before: nobody is kept from repairing one.

The facts about a service that is not stored yet are found as the reconciler finds them, from the watch cache, but
nothing is kept of them and no queue follows them: whoever asks could else fill the controller's memory with names.
"""

from collections.abc import Callable, Sequence
from typing import Final, Literal, NamedTuple

import msgspec

from controller.placement.pool_table import read_pools
from controller.pod_settings import PodSettings
from controller.reconcile.plan import Snapshot
from controller.services.accelerator_choice import CHOICE_INDEPENDENT_FIELDS
from controller.services.candidates import check_candidate, list_candidates
from controller.services.checked_replica import check_replica, read_models
from controller.services.class_speeds import FindSpeeds, sort_speeds
from controller.services.preconditions import DEVICE_TOO_SMALL, ServiceProblem
from controller.services.serving_choice import choose_serving
from controller.services.speed_report import describe_fit
from crds.inferenceservice import InferenceService, wanted_replicas
from crds.placement import MOST_CLASSES, ClassSpeed
from crds.text import shorten_text
from kube.resources import ObjectKey

NO_CLASSES: Final = "it is not known what devices it may use: no node or host says what hardware it has"
LONGEST_REASON: Final = 1200
"""Characters of the reason in a refusal, so that the way out behind it is not cut off."""
UNKNOWN_DEVICES: Final = "it is not known whether it fits: some nodes or hosts do not say what devices they have"
NOT_COMPLETE: Final = "it is not known whether it fits: the controller is still reading the cluster"


class FitFacts(NamedTuple):
    """The facts about a service before anything of it exists."""

    classes: tuple[ClassSpeed, ...] = ()
    """On each device class of all accelerators that it may use, as in its status."""
    problems: Sequence[ServiceProblem] = ()
    """Why it can have no replica on some of these accelerators."""
    expects_nodes: bool = False
    """It states the memory of devices, which an autoscaler may add."""
    has_unknown_devices: bool = False
    """Some node or host has devices that it may use, and nobody says what they are."""
    least_tokens_per_second: float | None = None
    """The speed that it demands."""


class FitVerdict(NamedTuple):
    """The outcome for one spec."""

    state: Literal["fits", "unknown", "unfit"]
    message: str = ""


class PreflightAnswer(NamedTuple):
    """The answer to a write of a service."""

    refusal: str = ""
    """Why it is refused; empty: it is allowed."""
    warning: str = ""
    """A warning to its author; empty: none."""


ALLOWED: Final = PreflightAnswer()


def find_fit_facts(
    snapshot: Snapshot,
    service: InferenceService,
    settings: PodSettings,
    find_speeds: FindSpeeds,
    has_unknown_devices: Callable[[str], bool],
) -> FitFacts:
    """Return the facts by which it is judged whether a service fits, on all accelerators that it may use.

    Args:
        snapshot: the cluster.
        service: the service, which need not be stored.
        settings: options of the controller.
        find_speeds: returns the speed of a replica on the device classes of an accelerator. It must keep nothing in a
            cache, as the service may never exist.
        has_unknown_devices: returns whether nobody says of some devices of an accelerator what they are.
    """
    model, companions = read_models(snapshot, service)
    service = choose_serving(snapshot.store, service, model, companions, settings)
    hardware = service.spec.hardware
    least = service.spec.placement.min_tokens_per_second
    # It states the memory of devices, or demands on those that it claims: an autoscaler may add such devices.
    expects_nodes = hardware.memory is not None or hardware.device_selector is not None
    key = ObjectKey(service.metadata.namespace, service.metadata.name)
    table = read_pools(snapshot.store, settings.vendors)
    names = list_candidates(service, model, table, settings.vendors)

    # 1. It has no choice: one accelerator is checked, which the service, its Model or its pools name.
    if not names:
        replica = check_replica(snapshot.store, service, model, companions, settings)
        classes = find_speeds(key, service, replica.accelerator, replica.checked.served)
        # The reason why it can have no replica there, if there is one.
        problem = replica.checked.problem
        problems = [problem] if problem is not None else []
        has_unknown = problem is None and has_unknown_devices(replica.accelerator or "")
        return FitFacts(
            classes, problems, expects_nodes, has_unknown_devices=has_unknown, least_tokens_per_second=least
        )

    # 2. It may use several accelerators: each of these candidates is checked.
    checked = [
        check_candidate(snapshot.store, service, name, model, companions, settings=settings, find_speeds=find_speeds)
        for name in names
    ]
    has_unknown = any(candidate.problem is None and has_unknown_devices(candidate.accelerator) for candidate in checked)
    return FitFacts(
        classes=sort_speeds(speed for candidate in checked for speed in candidate.speeds),
        problems=[candidate.problem for candidate in checked if candidate.problem is not None],
        expects_nodes=expects_nodes,
        has_unknown_devices=has_unknown,
        least_tokens_per_second=least,
    )


def judge_service(
    service: InferenceService, before: InferenceService | None, find_fit: Callable[[InferenceService], FitFacts | None]
) -> PreflightAnswer:
    """Return the answer to a write of `service`.

    Args:
        service: the service as it is to be stored.
        before: the service as it is stored; None: it is being created.
        find_fit: returns the facts about a service; None: the controller has not read the cluster yet.
    """
    # 1. Allow a service without replicas, and one with replicas before and now that asks for the same.
    if not _wants_replicas(service):
        return ALLOWED
    # Demands: the fields that decide whether it fits.
    has_same_demands = before is not None and _list_demands(before) == _list_demands(service)
    if before is not None and has_same_demands and _wants_replicas(before):
        return ALLOWED

    # 2. Judge the rest by the cluster: what is not certain is only a warning.
    verdict = _judge(find_fit(service))
    if verdict.state == "fits":
        return ALLOWED
    if verdict.state == "unknown":
        return PreflightAnswer(warning=verdict.message)

    # 3. Refuse it. But nodes that have gone meanwhile do not hold up a service that is resumed or scaled, and one that
    # did not fit before may be edited.
    if has_same_demands or (before is not None and _judge(find_fit(before)).state == "unfit"):
        return PreflightAnswer(warning=verdict.message)
    name = f"InferenceService {service.metadata.namespace}/{service.metadata.name}"
    reason = shorten_text(verdict.message, LONGEST_REASON)
    return PreflightAnswer(
        f"{name} with Model {service.spec.model_ref} has no place in this cluster: {reason}; change what it asks for, "
        "or set spec.suspend to true until the cluster has such devices"
    )


def judge_fit(facts: FitFacts) -> FitVerdict:
    """Return whether a service fits on any device class; it is unfit only if that is certain, and else unknown.

    It is unknown while the answer may change: the fit on a class is not known; an accelerator has a problem that may
    pass; nobody says what some devices are; no class is known, nor that devices are too small, or the list is full, so
    some may be missing; an autoscaler may add devices; or a class is refused by an estimate that a measurement may
    correct.
    """
    # 1. What the condition Fits would say of the known device classes: True, Unknown or False.
    fit = describe_fit(facts.classes, 0) if facts.classes else None
    if fit is not None and fit["status"] == "True":
        return FitVerdict("fits")
    if fit is not None and fit["status"] == "Unknown":
        return FitVerdict("unknown", fit["message"])

    # 2. It fits on none of them. What is not known yet, or may pass, leaves the answer open.
    too_small = [problem for problem in facts.problems if problem.reason == DEVICE_TOO_SMALL]
    other_problems = [problem for problem in facts.problems if problem.reason != DEVICE_TOO_SMALL]
    # A problem that may pass leaves the fit open; one that has failed for good does not.
    if open_problem := next((problem for problem in other_problems if problem.phase != "Failed"), None):
        return FitVerdict("unknown", open_problem.message)
    if facts.has_unknown_devices:
        return FitVerdict("unknown", UNKNOWN_DEVICES)
    if fit is None and not too_small:
        return FitVerdict("unknown", other_problems[0].message if other_problems else NO_CLASSES)

    # 3. It is unfit only if no class that may be missing, no node that may be added and no measurement can change that.
    messages = [fit["message"]] if fit is not None else []
    messages += dict.fromkeys(problem.message for problem in too_small)
    message = "; ".join(messages)
    may_lack_classes = len(facts.classes) >= MOST_CLASSES
    may_get_devices = facts.expects_nodes and not too_small
    certainly_fails = all(_certainly_fails(speed, facts.least_tokens_per_second) for speed in facts.classes)
    if may_lack_classes or may_get_devices or not certainly_fails:
        return FitVerdict("unknown", message)
    return FitVerdict("unfit", message)


def _judge(facts: FitFacts | None) -> FitVerdict:
    """Return the verdict on facts, which are None while the controller reads the cluster."""
    return judge_fit(facts) if facts is not None else FitVerdict("unknown", NOT_COMPLETE)


def _wants_replicas(service: InferenceService) -> bool:
    """Return whether a service wants replicas: it is not suspended, scaled to zero or being deleted."""
    return wanted_replicas(service) > 0 and service.metadata.deletion_timestamp is None


def _list_demands(service: InferenceService) -> dict[str, object]:
    """Return the fields of a spec that decide whether a service fits: not replicas, suspend, priority and the like."""
    return {
        name: value
        for name, value in msgspec.structs.asdict(service.spec).items()
        if name not in CHOICE_INDEPENDENT_FIELDS
    }


def _certainly_fails(speed: ClassSpeed, least_tokens_per_second: float | None) -> bool:
    """Return whether it is certain that no replica can run on a device class.

    That is so if it does not fit into the memory, or fits less well than the service demands; or if it is slower than
    the service demands by a measurement, or even by the upper end of the estimate.
    """
    if speed.fit == "too_tight" or (speed.refusal == "TooSlow" and speed.source == "Measured"):
        return True
    if speed.refusal == "TooSlow":
        # A benchmark, of this model or of others, may find more than was estimated, but hardly more than its range.
        return speed.high is not None and float(speed.high) < (least_tokens_per_second or 0)
    # With fit None, it is not known how well it fits.
    return speed.refusal == "TooTight" and speed.fit is not None
