"""The owner's policy: the times at which the owner needs the host for other things than models.

Each source of a hold says of a sample that it holds, that it is free, or neither; it must say the same for some time,
so that a moment changes nothing. A sample without the fact, because a tool is missing or prints nothing, neither begins
a hold nor ends it.
"""

from collections.abc import Mapping
from datetime import datetime
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from devices.power import Power
from devices.thermal import ThermalLevel
from metal_agent.holds.quiet_hours import QuietHours

SAMPLE_SECONDS: Final = 10.0
LONGEST_STEP_SECONDS: Final = 30.0
"""The most time that counts between two samples: a machine that slept took none."""
RECENT_INPUT_SECONDS: Final = 30.0
"""Input within this time means that somebody is at the machine."""
FULL_PERCENT: Final = 100
_MARGIN_PERCENT: Final = 5
"""Charge above the owner's limit at which a hold ends on battery: a charge may rise by a percent under less load."""

OwnerSource = Literal["schedule", "activity", "battery", "heat"]
REASONS: Final[Mapping[OwnerSource, str]] = MappingProxyType(
    {"schedule": "QuietHours", "activity": "OwnerActive", "battery": "OnBattery", "heat": "TooHot"}
)
"""Reason of the condition Paused for each source, the first one that holds first."""
BEGIN_SECONDS: Final[dict[OwnerSource, float]] = {"schedule": 0.0, "activity": 45.0, "battery": 30.0, "heat": 30.0}
"""Time for which a source must say that it holds. activity: a touch of the mouse is no work."""
END_SECONDS: Final[dict[OwnerSource, float]] = {"schedule": 0.0, "activity": 0.0, "battery": 60.0, "heat": 300.0}
"""Time for which a source must say that it is free. heat: engines heat a machine up again that has just cooled down."""

Signal = Literal["hold", "free", "between"]


class OwnerPolicy(msgspec.Struct, frozen=True):
    """The owner's options; by default nothing pauses the host."""

    quiet_hours: tuple[QuietHours, ...] = ()
    idle_minutes: int | None = None
    """Pause while the owner is active, until there was no input for so long."""
    battery_percent: int | None = None
    """Pause on battery with a charge below this; 100: with any charge."""
    when_hot: bool = False
    pauses_critical: bool = False
    """Pause services of priority critical too."""

    @property
    def sources(self) -> tuple[OwnerSource, ...]:
        """The sources that the owner has turned on."""
        given: dict[OwnerSource, bool] = {
            "schedule": bool(self.quiet_hours),
            "activity": self.idle_minutes is not None,
            "battery": self.battery_percent is not None,
            "heat": self.when_hot,
        }
        return tuple(source for source, is_on in given.items() if is_on)

    def describe(self, source: OwnerSource) -> str:
        """Return why `source` holds, in words that stay the same as long as it does."""
        match source:
            case "schedule":
                return f"quiet hours are {', '.join(hour.text for hour in self.quiet_hours)}"
            case "activity":
                return f"somebody works at it, until there is no input for {self.idle_minutes} minutes"
            case "battery" if self.battery_percent == FULL_PERCENT:
                return "it runs on battery"
            case "battery":
                return f"it runs on battery, with less than {self.battery_percent} % of charge"
            case "heat":
                return "it is hot and slows itself down"


NO_POLICY: Final = OwnerPolicy()


class OwnerSample(NamedTuple):
    """The facts by which the sources decide; one that could not be read is None."""

    moment: datetime
    idle_seconds: float | None = None
    """Time since the last input of keyboard, mouse or touch."""
    power: Power = Power()
    thermal: ThermalLevel | None = None


def judge_sample(policy: OwnerPolicy, source: OwnerSource, sample: OwnerSample) -> Signal | None:
    """Decide what a sample says about a source of holds, such as quiet hours or heat.

    hold: the owner needs the machine. free: not. between: neither, so that a value near a limit changes nothing. None:
    the fact is not known.
    """
    match source:
        case "schedule":
            return "hold" if any(hour.contains(sample.moment) for hour in policy.quiet_hours) else "free"
        case "activity":
            return _judge_input(sample.idle_seconds, (policy.idle_minutes or 0) * 60.0)
        case "battery":
            return _judge_power(sample.power, policy.battery_percent or 0)
        case "heat" if sample.thermal is None:
            return None
        case "heat" if sample.thermal == "nominal":
            return "free"
        case "heat":
            return "between" if sample.thermal == "moderate" else "hold"


def _judge_input(idle_seconds: float | None, needed_seconds: float) -> Signal | None:
    """Decide by the time since the last input whether the owner is active; None if that time is not known."""
    if idle_seconds is None:
        return None
    if idle_seconds >= needed_seconds:
        return "free"
    return "hold" if idle_seconds < RECENT_INPUT_SECONDS else "between"


def _judge_power(power: Power, limit_percent: int) -> Signal | None:
    """Decide by power source and charge whether the battery has to be spared; None if they are not known."""
    if power.source is None:
        return None
    if power.source == "ac":
        return "free"
    if limit_percent == FULL_PERCENT:
        return "hold"
    if power.battery_percent is None:
        return None
    if power.battery_percent < limit_percent:
        return "hold"
    return "free" if power.battery_percent >= limit_percent + _MARGIN_PERCENT else "between"


class SourceState(msgspec.Struct, frozen=True):
    """The state of one source: whether it holds, and for how long it has said the opposite."""

    holds: bool = False
    contradicted_seconds: float | None = None
    """Sampled time for which each signal in a row was against `holds`; None if the last one was not."""


def step_source(state: SourceState, signal: Signal | None, seconds: float, source: OwnerSource) -> SourceState:
    """Return the next state of a source after a sample, with the `seconds` since the sample before.

    A source begins or ceases to hold only once each sample has contradicted its state for long enough, so that a moment
    changes nothing. A sample that agrees, or says neither (`between`), starts the count again; an unknown one (None)
    changes nothing.
    """
    if signal is None:
        return state

    # contradicted_seconds: for how long all samples have contradicted the state; None: the last one did not
    opposite_signal = "free" if state.holds else "hold"
    if signal != opposite_signal:
        return replace(state, contradicted_seconds=None)

    contradicted = 0.0 if state.contradicted_seconds is None else state.contradicted_seconds + seconds
    needed = END_SECONDS[source] if state.holds else BEGIN_SECONDS[source]
    if contradicted >= needed:
        return SourceState(holds=not state.holds)
    return replace(state, contradicted_seconds=contradicted)
