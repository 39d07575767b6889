"""Options of the owner's policy: the times at which this machine is needed for other things than models."""

from typing import Final

import click

from cli.options import Parsed, gather_options
from metal_agent.holds.owner_policy import FULL_PERCENT, OwnerPolicy
from metal_agent.holds.quiet_hours import EXAMPLE, parse_quiet_hours

owner_policy_options: Final = gather_options(
    "owner_policy",
    OwnerPolicy,
    click.option(
        "--quiet-hours",
        type=Parsed("HOURS", parse_quiet_hours),
        multiple=True,
        help=f"Pause in these hours, such as '{EXAMPLE}'. May be repeated.",
    ),
    click.option(
        "--pause-when-active",
        "idle_minutes",
        type=click.IntRange(1, 1440),
        metavar="MINUTES",
        help="Pause while somebody works at this machine, until there was no input for MINUTES.",
    ),
    click.option(
        "--pause-on-battery",
        "battery_percent",
        type=click.IntRange(1, FULL_PERCENT),
        is_flag=False,
        flag_value=FULL_PERCENT,
        metavar="[PERCENT]",
        help="Pause on battery, or only with less than PERCENT of charge.",
    ),
    click.option("--pause-when-hot", "when_hot", is_flag=True, help="Pause while heat slows this machine down."),
    click.option("--pause-critical", "pauses_critical", is_flag=True, help="Pause services of priority critical too."),
    click.option(
        "--keep-awake/--no-keep-awake",
        default=True,
        show_default=True,
        help="Keep a Mac awake while a model is loaded or loading.",
    ),
)
"""Adds these options to a command, which gets the policy as `owner_policy`, and `keep_awake`."""


def render_owner_policy(policy: OwnerPolicy, *, keep_awake: bool) -> list[str]:
    """Return the options that give this policy, for a command line."""
    words = [word for hours in policy.quiet_hours for word in ("--quiet-hours", hours.text)]
    if policy.idle_minutes is not None:
        words.append(f"--pause-when-active={policy.idle_minutes}")
    if policy.battery_percent is not None:
        words.append(f"--pause-on-battery={policy.battery_percent}")
    flags = {
        "--pause-when-hot": policy.when_hot,
        "--pause-critical": policy.pauses_critical,
        "--no-keep-awake": not keep_awake,
    }
    return [*words, *(flag for flag, is_given in flags.items() if is_given)]
