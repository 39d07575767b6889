"""The speed and fit of one replica on each device class, as `status.speeds` lists them and the queue uses them.

What was measured on a class is preferred to an estimate. A class on which the service does not accept its replicas is
listed with the reason, and the queue places none there.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from controller.models.served import Served
from controller.reconcile.indexes import discard_from_index
from controller.services.pods.devices import NO_DEVICES, request_devices
from controller.services.replica_memory import describe_workload, is_memory_stated
from crds.inferenceservice import InferenceService
from crds.placement import MOST_CLASSES, ClassSpeed, PlacementDemands, SpeedRefusal, SpeedSource
from crds.rate import format_rate
from devices.device_class import scale_class
from devices.vendors import Vendors
from fitness.correction_table import ALL_NAMESPACES, CorrectionGroup
from fitness.corrections import NO_CORRECTIONS, Corrections
from fitness.fit import FIT_LEVELS, Fit, assess_fit
from fitness.performance import MeasuredPerformance, hash_model
from fitness.performance_store import PerformanceTable
from fitness.serving_devices import ServingDevices
from fitness.speed import SpeedMethod, find_active_share
from kube.resources import ObjectKey

_LONGEST_SHORTFALL: Final = 512
_SOURCES: Final[Mapping[SpeedMethod, SpeedSource]] = {
    "measured": "Measured",
    "corrected": "Corrected",
    "roofline": "Estimated",
}


def assess_classes(
    service: InferenceService,
    served: Served,
    number: int,
    classes: Iterable[ServingDevices],
    measured: Mapping[str, MeasuredPerformance],
    *,
    corrections: Corrections = NO_CORRECTIONS,
) -> tuple[ClassSpeed, ...]:
    """Return the speed and fit of a replica on each device class; a measured speed is preferred to an estimate.

    Args:
        service: the service.
        served: its Models.
        number: devices of one replica, so that a class of one device, such as nvidia-l4x1, becomes one of that many;
            0 on hosts and processors, whose classes stay.
        classes: one device of each class.
        measured: measurements of the Model with this engine and these options, by device class.
        corrections: how far measurements of other models differed from their estimates, as far as the namespace of
            the service may know.
    """
    workload = describe_workload(served)
    if is_memory_stated(served):
        workload = workload._replace(stated_bytes=served.model.spec.stated_bytes)
    active_share = find_active_share(served.model)  # the part of its parameters that one token uses

    # Assess each class with as many devices as one replica has.
    speeds = []
    for serving_devices in classes:
        devices = serving_devices._replace(
            device_class=scale_class(serving_devices.device_class, number), device_count=max(1, number)
        )
        fit = assess_fit(workload, service.spec, devices, corrections, active_share=active_share)
        # Measurements are made without companions.
        record = measured.get(devices.device_class) if not served.companions else None
        speeds.append(_describe_class(devices.device_class, fit, record, service.spec.placement))
    return sort_speeds(speeds)


def sort_speeds(speeds: Iterable[ClassSpeed]) -> tuple[ClassSpeed, ...]:
    """Return the speeds as they are listed: the fastest first, equal ones by the name of the class."""
    by_name = sorted(speeds, key=lambda speed: speed.device_class)
    return tuple(sorted(by_name, key=lambda speed: float(speed.tokens_per_second or 0), reverse=True))


def cut_speeds(speeds: Iterable[ClassSpeed]) -> tuple[ClassSpeed, ...]:
    """Return the speeds that fit into the status, where the queue reads them; refused classes are left out first."""
    accepted_first = sorted(sort_speeds(speeds), key=lambda speed: speed.refusal is not None)
    return sort_speeds(accepted_first[:MOST_CLASSES])


def describe_refusal(speed: ClassSpeed) -> str:
    """Return in words why no replica is placed on a device class, or does not fit there any more."""
    if speed.shortfall:
        return speed.shortfall
    if speed.refusal == "TooSlow":
        return f"{speed.tokens_per_second} tokens/s are fewer than spec.placement.minTokensPerSecond"
    if speed.refusal == "SpeedUnknown":
        return "its speed is unknown, and spec.placement.minTokensPerSecond is stated"
    return f"the fit is {speed.fit or 'unknown'}, less than spec.placement.minFit"


def _describe_class(
    device_class: str, fit: Fit | None, record: MeasuredPerformance | None, demands: PlacementDemands
) -> ClassSpeed:
    """Return the speed and fit of a replica on a device class, and why the service does not accept the class.

    Args:
        device_class: the class, with the number of devices of a replica.
        fit: the estimated memory and speed; None: unknown.
        record: a measured speed, which is preferred to the estimate.
        demands: spec.placement of the service: its least speed and fit.
    """
    # The fit counts all memory of the devices, not only what is free now; the speed is that of the estimate.
    level = fit.level_if_idle if fit is not None else None
    estimated = fit.speed if fit is not None else None

    # The speed: as measured, else as estimated, with its range; None: unknown.
    speed, low, high = None, None, None
    source: SpeedSource | None = None
    measurements: int | None = None
    if record is not None:  # _SOURCES has the word of the status for each method
        speed, source = record.tokens_per_second, _SOURCES["measured"]
    elif estimated is not None:
        low, speed, high = estimated.generation  # tokens a second
        source, measurements = _SOURCES[estimated.method], estimated.measurements or None

    # Why the service does not accept the class: first the speed, then the fit.
    least = demands.min_tokens_per_second
    refusal: SpeedRefusal | None = None
    if least is not None and (speed is None or speed < least):
        refusal = "SpeedUnknown" if speed is None else "TooSlow"

    # The default "marginal" refuses no class: a replica fits wherever enough memory is free.
    if demands.min_fit != "marginal":
        is_too_tight = level is None or FIT_LEVELS.index(level) > FIT_LEVELS.index(demands.min_fit)
        if is_too_tight and refusal is None:
            refusal = "TooTight"

    return ClassSpeed(
        device_class=device_class,
        tokens_per_second=_format(speed),
        low=_format(low),
        high=_format(high),
        source=source,
        measurements=measurements,
        fit=level,
        shortfall=fit.shortfall[:_LONGEST_SHORTFALL] if fit is not None and level == "too_tight" else "",
        refusal=refusal,
    )


def _format(tokens_per_second: float | None) -> str | None:
    return format_rate(tokens_per_second) if tokens_per_second else None


FindSpeeds = Callable[[ObjectKey, InferenceService, str | None, Served | None], tuple[ClassSpeed, ...]]
"""`SpeedAssessor.assess`."""


def find_no_speeds(
    _key: ObjectKey, _service: InferenceService, _accelerator: str | None, _served: Served | None
) -> tuple[ClassSpeed, ...]:
    """Return no speed: the controller knows no node and no host."""
    return ()


class _Engine(NamedTuple):
    vendor: str
    runtime: str


class _Assessment(NamedTuple):
    engine: _Engine
    inputs: tuple[object, ...]
    """All that the speeds follow from."""
    speeds: tuple[ClassSpeed, ...]


class SpeedAssessor:
    """The speeds of all services by device class, each computed once until something changes from which it follows.

    Args:
        list_classes: returns one device of each device class of an accelerator.
        measured: the stored measurements.
        vendors: the table of accelerators.
    """

    def __init__(
        self, list_classes: Callable[[str], Sequence[ServingDevices]], measured: PerformanceTable, vendors: Vendors
    ) -> None:
        self._list_classes, self._measured, self._vendors = list_classes, measured, vendors
        self._assessed: dict[ObjectKey, dict[str, _Assessment]] = {}
        """By service and accelerator."""
        self._services_of: defaultdict[_Engine, set[ObjectKey]] = defaultdict(set)
        """The services that were assessed with each engine of a vendor."""

    def assess(
        self, key: ObjectKey, service: InferenceService, accelerator: str | None, served: Served | None
    ) -> tuple[ClassSpeed, ...]:
        """Return the speed of a replica on each device class of one accelerator; computed anew after an input changed.

        Empty: it cannot be there, it requests a partition of a device, or no device of the accelerator is known.

        Args:
            key: the service.
            service: the service, as if it stated the accelerator.
            accelerator: the accelerator.
            served: its Models; None: it cannot be there.
        """
        vendor = self._vendors.get(accelerator or "")
        if accelerator is None or vendor is None or served is None:
            return ()

        # The devices that one replica requests.
        request = request_devices(service, vendor) if vendor.in_pods else NO_DEVICES
        # A request without a resource asks for no device, or claims devices.
        if request.resource not in {None, vendor.resource, vendor.shared_resource}:
            return ()  # a partition of a device: the classes are those of whole devices

        # All that the speeds follow from.
        model_hash = hash_model(served.model, served.runtime, service.spec)
        records = self._measured.list_classes(model_hash, key.namespace)
        classes = self._list_classes(accelerator)
        corrections = self._measured.corrections.select(key.namespace)
        # For each class, how far measurements of other models differed from their estimates.
        class_corrections = tuple(
            corrections.find(devices.vendor, scale_class(devices.device_class, request.number), served.runtime)
            for devices in classes
        )
        inputs = (served, service.spec, request.number, classes, records, class_corrections)

        # _assessed has the last inputs and the speeds that followed, by service and then by accelerator.
        assessed = self._assessed.setdefault(key, {})
        last = assessed.get(accelerator)
        if last is None or last.inputs != inputs:
            if last is not None:
                discard_from_index(self._services_of, last.engine, key)
            speeds = assess_classes(service, served, request.number, classes, records, corrections=corrections)
            last = assessed[accelerator] = _Assessment(_Engine(accelerator, served.runtime), inputs, speeds)
            self._services_of[last.engine].add(key)
        return last.speeds

    def list_corrected(self, groups: Iterable[CorrectionGroup]) -> Sequence[ObjectKey]:
        """Return the services whose estimates are of any of these groups, in the order of their names."""
        return sorted(
            {
                key
                for group in groups
                for key in self._services_of.get(_Engine(group.vendor, group.runtime), ())
                if group.namespace in {ALL_NAMESPACES, key.namespace}
            }
        )

    def forget(self, key: ObjectKey) -> None:
        """Forget a service that is gone."""
        for assessment in self._assessed.pop(key, {}).values():
            discard_from_index(self._services_of, assessment.engine, key)
