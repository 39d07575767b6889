"""Corrections of speed estimates, learned from measurements by device class and engine.

An estimate follows from bandwidth and bytes, and every engine and device has habits that neither states. The ratio of
measured to estimated speed tells them: its median corrects the next estimate of the same class and engine, and its
spread is the width of the range. Few measurements say little, so a correction shrinks towards that of its vendor, and
that of a vendor towards 1.
"""

import math
import statistics
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

_CLASS_WEIGHT: Final = 2.0
"""Measurements of a class that count as much as the correction of its vendor."""
_VENDOR_WEIGHT: Final = 1.0
"""Device classes of a vendor that count as much as no correction."""
_LARGEST_PLAUSIBLE_RATIO: Final = 20.0
"""A ratio beyond this or its inverse is a damaged or forged record, and is not learned from."""
_LARGEST_FACTOR: Final = 3.0
"""No correction is above this or below its inverse: a larger one is a damaged record, or a wrong fact of a device."""
_MAD_TO_DEVIATION: Final = 1.4826
"""Standard deviation of a normal distribution, divided by its median absolute deviation."""
_CLASS_SPREAD: Final = 0.2
"""Least spread between different models on one device class (standard deviation of the logarithm)."""
_VENDOR_SPREAD: Final = 0.3
"""Least spread between devices of a vendor, of which another one was never measured."""
_UNMEASURED: Final = 0.4
"""Spread of estimates of which nothing was ever measured."""


class SpeedRatio(NamedTuple):
    """One measurement beside the estimate without corrections."""

    vendor: str
    device_class: str
    runtime: str
    measured: float
    """Tokens a second."""
    estimated: float
    """Tokens a second."""


class Correction(NamedTuple):
    """The factor from estimate to expectation, and how far measurements lie from it."""

    ratio: float
    spread: float
    """Standard deviation of the logarithm of measured by expected."""
    measurements: int
    """Number of measurements from which it was learned; 0: none."""


_NO_CORRECTION: Final = Correction(ratio=1.0, spread=_UNMEASURED, measurements=0)


class Corrections(NamedTuple):
    """All that was learned."""

    by_class: Mapping[tuple[str, str], Correction]
    """By device class and engine."""
    by_vendor: Mapping[tuple[str, str], Correction]
    """By vendor and engine, for classes that were never measured."""

    def find(self, vendor: str, device_class: str, runtime: str) -> Correction:
        """Return the correction of a device class, else that of its vendor, else the ratio 1 with a wide spread."""
        of_class = self.by_class.get((device_class, runtime))
        return of_class or self.by_vendor.get((vendor, runtime), _NO_CORRECTION)


NO_CORRECTIONS: Final = Corrections({}, {})


def learn_corrections(measurements: Iterable[SpeedRatio]) -> Corrections:
    """Learn the correction, a factor for estimated speeds, of each device class and vendor, with each engine.

    1. Take the logarithm of measured by estimated speed, so that twice as fast and half as fast weigh the same. Ratios
       that are implausible are left out.
    2. Learn each vendor's correction from the medians of its device classes.
    3. Learn each class's correction, which starts from that of its vendor: few measurements move it only a little.
    """
    # 1. Collect the logarithms of the ratios, by vendor, device class and engine.
    logs: dict[tuple[str, str, str], list[float]] = {}
    for measurement in measurements:
        if measurement.measured <= 0 or measurement.estimated <= 0:
            continue
        logarithm = math.log(measurement.measured / measurement.estimated)
        if abs(logarithm) < math.log(_LARGEST_PLAUSIBLE_RATIO):
            key = measurement.vendor, measurement.device_class, measurement.runtime
            logs.setdefault(key, []).append(logarithm)

    # 2. Learn each vendor's correction; an entry is a vendor with an engine, and has one list for each device class.
    classes_by_vendor: dict[tuple[str, str], list[list[float]]] = {}
    for (vendor, _, runtime), class_logs in sorted(logs.items()):
        classes_by_vendor.setdefault((vendor, runtime), []).append(class_logs)
    by_vendor = {vendor_key: _learn_vendor(classes) for vendor_key, classes in classes_by_vendor.items()}

    # 3. Learn each class's correction.
    by_class = {
        (device_class, runtime): _learn_class(class_logs, by_vendor[vendor, runtime])
        for (vendor, device_class, runtime), class_logs in logs.items()
    }
    return Corrections(by_class, by_vendor)


def _learn_vendor(classes: list[list[float]]) -> Correction:
    """Return the correction of a vendor, which counts for its device classes that were never measured.

    Each class counts by its median, so that a device that was measured often counts no more than another. The fewer
    classes there are, the closer the ratio is to 1. The spread combines how far classes differ from each other and how
    far measurements of one class do, as independent deviations.

    Args:
        classes: for each device class, the logarithms of measured by estimated speed.
    """
    medians = [statistics.median(logs) for logs in classes]
    # _VENDOR_WEIGHT: number of classes that count as much as the ratio 1.
    measured_weight = len(medians) / (len(medians) + _VENDOR_WEIGHT)

    between_classes = _estimate_deviation(medians, assumed=_VENDOR_SPREAD)
    within_class = statistics.median(_estimate_deviation(logs, assumed=_CLASS_SPREAD) for logs in classes)

    # The other part of the weight belongs to the ratio 1, whose logarithm is 0.
    ratio = _limit_factor(measured_weight * statistics.median(medians))
    spread = max(_VENDOR_SPREAD, math.hypot(between_classes, within_class))
    return Correction(ratio, spread, measurements=sum(map(len, classes)))


def _learn_class(logs: list[float], vendor: Correction) -> Correction:
    """Return the correction of a device class: a mean of its own measurements and of its vendor's correction.

    Its own measurements weigh the more, the more there are.

    Args:
        logs: the logarithms of measured by estimated speed on this class.
        vendor: the correction of its vendor.
    """
    own_weight = len(logs) / (len(logs) + _CLASS_WEIGHT)
    logarithm = own_weight * statistics.median(logs) + (1 - own_weight) * math.log(vendor.ratio)
    spread = own_weight * _estimate_deviation(logs, assumed=_CLASS_SPREAD) + (1 - own_weight) * vendor.spread
    return Correction(ratio=_limit_factor(logarithm), spread=max(_CLASS_SPREAD, spread), measurements=len(logs))


def _limit_factor(logarithm: float) -> float:
    """Return the factor that has this logarithm, but at most `_LARGEST_FACTOR` and at least its inverse."""
    return min(_LARGEST_FACTOR, max(1 / _LARGEST_FACTOR, math.exp(logarithm)))


def _estimate_deviation(numbers: list[float], assumed: float) -> float:
    """Return the standard deviation of the numbers; the fewer there are, the closer it is to `assumed`.

    It follows from the median absolute deviation, which a few outliers hardly change. One number alone says nothing
    about a deviation, so it has no weight.
    """
    median = statistics.median(numbers)
    # _MAD_TO_DEVIATION: factor from a median absolute deviation to a standard deviation.
    measured = _MAD_TO_DEVIATION * statistics.median(abs(number - median) for number in numbers)
    measured_weight = (len(numbers) - 1) / (len(numbers) + 1)
    return measured_weight * measured + (1 - measured_weight) * assumed
