"""Options of the owner's policy: the times at which this machine is needed for other things than models."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import click

from metal_agent.holds.owner_policy import FULL_PERCENT, OwnerPolicy
from metal_agent.holds.quiet_hours import EXAMPLE, QuietHours, parse_quiet_hours

F = TypeVar("F", bound=Callable[..., Any])


class QuietHoursParam(click.ParamType[QuietHours]):
    """Days, times of the day and a time zone."""

    name = "HOURS"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> QuietHours:
        """Read the hours."""
        if isinstance(value, QuietHours):
            return value
        try:
            return parse_quiet_hours(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


def owner_policy_options(command: F) -> F:
    """Add the options of the owner's policy to a command, which gets them as `owner_policy` and `keep_awake`."""
    options = (
        click.option(
            "--quiet-hours",
            type=QuietHoursParam(),
            multiple=True,
            help=f"Pause in these hours, such as '{EXAMPLE}'. May be repeated.",
        ),
        click.option(
            "--pause-when-active",
            type=click.IntRange(1, 1440),
            metavar="MINUTES",
            help="Pause while somebody works at this machine, until there was no input for MINUTES.",
        ),
        click.option(
            "--pause-on-battery",
            type=click.IntRange(1, FULL_PERCENT),
            is_flag=False,
            flag_value=FULL_PERCENT,
            metavar="[PERCENT]",
            help="Pause on battery, or only with less than PERCENT of charge.",
        ),
        click.option("--pause-when-hot", is_flag=True, help="Pause while this machine slows itself down for its heat."),
        click.option("--pause-critical", is_flag=True, help="Pause services of priority critical too."),
        click.option(
            "--keep-awake/--no-keep-awake",
            default=True,
            show_default=True,
            help="Keep a Mac awake while a model is loaded or loading.",
        ),
    )

    @functools.wraps(command)
    def with_policy(
        *arguments: object,
        quiet_hours: tuple[QuietHours, ...],
        pause_when_active: int | None,
        pause_on_battery: int | None,
        pause_when_hot: bool,
        pause_critical: bool,
        **others: object,
    ) -> None:
        policy = OwnerPolicy(quiet_hours, pause_when_active, pause_on_battery, pause_when_hot, pause_critical)
        command(*arguments, owner_policy=policy, **others)

    decorated: Any = with_policy
    for option in reversed(options):
        decorated = option(decorated)
    result: F = decorated
    return result


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
