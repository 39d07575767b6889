"""The wait of a service for measurements before its first replica gets an accelerator.

If a service with accelerator `auto` could run on several device classes, and its model was not measured on some of
these, the choice waits while a Job on each measures it. The time at which the wait has begun is in the status of the
service, so no leader begins it anew. It ends with the last of these Jobs, and after `PROBE_SECONDS` in any case; what
was not measured by then is estimated.
"""

from collections.abc import Collection, Iterable
from datetime import datetime, timedelta
from typing import Final, NamedTuple, Protocol

from controller.placement.queue_places import parse_time
from crds.placement import ClassSpeed, SpeedBasis
from devices.device_class import find_single_class
from fitness.performance import MeasuredPerformance
from kube.resources import ObjectKey
from kube.time import rfc3339

PROBE_SECONDS: Final = 180.0
"""Longest wait."""


class ProbeSource(Protocol):
    """The Jobs that measure."""

    def request_probes(self, service: ObjectKey, classes: Collection[str], until: datetime) -> Collection[str] | None:
        """Return the device classes that are being measured for a service.

        The first call that names `classes` starts their measurement; later calls ignore them.
        None: it is not known yet on which. The service is enqueued when the answer changes.
        """

    def forget(self, service: ObjectKey) -> None:
        """Measure nothing more for a service."""

    def restart(self) -> None:
        """Forget what an earlier leadership knew."""


class ProbeWait(NamedTuple):
    """The wait of a service."""

    since: datetime
    classes: tuple[str, ...] = ()
    """Device classes on which its model is being measured; none: it is not known yet."""

    @property
    def until(self) -> datetime:
        """The latest end."""
        return self.since + timedelta(seconds=PROBE_SECONDS)

    @property
    def message(self) -> str:
        """The wait in words."""
        measured = f"measuring the speed on {', '.join(self.classes)}" if self.classes else "looking for idle devices"
        return f"{measured}; the accelerator is chosen by {rfc3339(self.until)} at the latest"


def list_unmeasured(speeds: Iterable[ClassSpeed], usable: Collection[str]) -> frozenset[str]:
    """Return the device classes that are worth a measurement: acceptable to the service, and not measured yet.

    Empty also if fewer than two classes are usable, because then there is nothing to choose between.

    Args:
        speeds: the speed of a replica by class.
        usable: classes of a single device that could run a replica if nothing else ran.
    """
    if len(usable) < 2:  # noqa: PLR2004 - a choice is between two
        return frozenset()
    able = [speed for speed in speeds if find_single_class(speed.device_class) in usable and speed.fit != "too_tight"]
    return frozenset(speed.device_class for speed in able if speed.refusal is None and speed.source != "Measured")


def wait_for_probes(
    service: ObjectKey, classes: Collection[str], began: str, now: datetime, probes: ProbeSource
) -> ProbeWait | None:
    """Return the wait of a service that has no replica and no choice yet; None: it need not wait, or no longer.

    It begins with the first call that names classes, and ends when no Job measures any more, or after `PROBE_SECONDS`.

    Args:
        service: the service.
        classes: the device classes that are worth a measurement.
        began: the time at which its wait has begun, by its status; empty: it has not.
        now: the time.
        probes: the Jobs that measure.
    """
    if not classes and not began:
        return None

    # The clock of another leader may be ahead.
    wait = ProbeWait(min(parse_time(began) or now, now))
    if now >= wait.until:
        return None

    # The first call that names classes starts the Jobs.
    measured_classes = probes.request_probes(service, classes, wait.until)
    if measured_classes is None:  # it is not known yet on which classes a Job can measure
        return wait
    # Empty: no Job measures any more.
    return wait._replace(classes=tuple(sorted(measured_classes))) if measured_classes else None


def find_basis(speed: ClassSpeed | None, record: MeasuredPerformance | None, began: str) -> SpeedBasis | None:
    """Return how the speed came to be known by which a replica was placed; None: the speed is unknown.

    "estimate": it was not measured. "probe": it was measured while this service waited for it. "cache": it had been
    measured before.

    Args:
        speed: the speed on the class of its place.
        record: the measurement there.
        began: the time at which the service has begun to wait for measurements; empty: it has not.
    """
    if speed is None or speed.source is None:
        return None
    if speed.source != "Measured":
        return "estimate"

    # It was measured: during the wait of this service, or before.
    waits_since, measured_at = parse_time(began), parse_time(record.measured_at) if record is not None else None
    if waits_since is not None and measured_at is not None and measured_at >= waits_since:
        return "probe"
    return "cache"
