"""The options of `pomona controller` about the replacement of replicas whose speed has fallen."""

from typing import Final

import click

from cli.options import DURATION, duration_between, gather_options
from controller.placement.replacement import ReplacementRules

_DEFAULTS: Final = ReplacementRules()

replacement_options: Final = gather_options(
    "replacement",
    ReplacementRules,
    click.option(
        "--replace-degraded",
        "is_on",
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
        "check_seconds",
        type=duration_between(1.0, 600.0, "give a time such as 30s; a replica is replaced after ten checks"),
        default=f"{_DEFAULTS.check_seconds:.0f}s",
        show_default=True,
        help="A tenth of the time over which the speed of a replica is measured, 1s to 10m.",
    ),
    click.option(
        "--degrade-cool-down",
        "cool_down_seconds",
        type=DURATION,
        default=f"{_DEFAULTS.cool_down_seconds:.0f}s",
        show_default=True,
        help="Time after a replacement in which its namespace has no other one, for --replace-degraded.",
    ),
)
"""Adds these options to a command, which gets them as `replacement`."""
