"""The options of `pomona controller` about the replacement of replicas whose speed has fallen."""

import functools
from collections.abc import Callable
from typing import Any, Final

import click

from cli.options import Duration
from controller.placement.replacement import ReplacementRules

LEAST_CHECK_SECONDS: Final = 1.0
MOST_CHECK_SECONDS: Final = 600.0
_DEFAULTS: Final = ReplacementRules()


def _read_check_interval(_context: click.Context, parameter: click.Parameter, seconds: float) -> float:
    """Return the time between two checks. Raises click.BadParameter: it is too short or too long."""
    if not LEAST_CHECK_SECONDS <= seconds <= MOST_CHECK_SECONDS:
        message = (
            f"{seconds:g}s is not between {LEAST_CHECK_SECONDS:.0f}s and {MOST_CHECK_SECONDS:.0f}s: give a time such "
            "as 30s; a replica is replaced after ten checks"
        )
        raise click.BadParameter(message, param=parameter)
    return seconds


_OPTIONS: Final = (
    click.option(
        "--replace-degraded",
        is_flag=True,
        help="Replace a replica in a pod that is slower than expected over ten check intervals, or does not fit its "
        "device any more, by one in a better place, if one is free: the new one is ready before the old one ends. "
        "Without effect with --namespace.",
    ),
    click.option(
        "--degrade-threshold",
        type=click.FloatRange(0.05, 0.95),
        default=_DEFAULTS.degrade_threshold,
        show_default=True,
        help="Share of the expected speed that a slow replica lacks at the least.",
    ),
    click.option(
        "--degrade-check-interval",
        type=Duration(),
        callback=_read_check_interval,
        default=f"{_DEFAULTS.check_seconds:.0f}s",
        show_default=True,
        help="A tenth of the time over which the speed of a replica is measured, 1s to 10m.",
    ),
    click.option(
        "--degrade-cool-down",
        type=Duration(),
        default=f"{_DEFAULTS.cool_down_seconds:.0f}s",
        show_default=True,
        help="Time after a replacement in which its namespace has no other one, for --replace-degraded.",
    ),
)


def replacement_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command these options; it gets `replacement`, the rules."""

    @functools.wraps(command)
    def call(
        *arguments: Any,
        replace_degraded: bool,
        degrade_threshold: float,
        degrade_check_interval: float,
        degrade_cool_down: float,
        **options: Any,
    ) -> None:
        rules = ReplacementRules(degrade_threshold, degrade_check_interval, degrade_cool_down, replace_degraded)
        command(*arguments, replacement=rules, **options)

    decorated: Callable[..., None] = call
    for option in reversed(_OPTIONS):
        decorated = option(decorated)
    return decorated
