"""The options of the owner's policy, as `pomona agent` reads them."""

import click
import pytest
from click.testing import CliRunner, Result

from cli.agent.owner_policy import owner_policy_options
from cli.main import main
from metal_agent.holds.owner_policy import OwnerPolicy


def read(*words: str) -> tuple[OwnerPolicy, bool]:
    parsed: list[tuple[OwnerPolicy, bool]] = []

    @click.command()
    @owner_policy_options
    def command(owner_policy: OwnerPolicy, *, keep_awake: bool) -> None:
        parsed.append((owner_policy, keep_awake))

    said = CliRunner().invoke(command, words)
    assert said.exit_code == 0, said.output
    return parsed[0]


def test_nothing_pauses_by_default_and_the_machine_is_kept_awake() -> None:
    assert read() == (OwnerPolicy(), True)
    assert read("--no-keep-awake") == (OwnerPolicy(), False)


@pytest.mark.parametrize(
    ("words", "percent"),
    [((), None), (("--pause-on-battery",), 100), (("--pause-on-battery=30",), 30), (("--pause-on-battery", "30"), 30)],
)
def test_battery_counts_at_any_charge_or_below_a_limit(words: tuple[str, ...], percent: int | None) -> None:
    assert read(*words)[0].battery_percent == percent


def test_policy_has_all_that_the_owner_gives() -> None:
    policy, _ = read(
        "--quiet-hours=Mon-Fri 09:00-17:00 Europe/Berlin",
        "--quiet-hours=Sat 10:00-12:00 UTC",
        "--pause-when-active=10",
        "--pause-on-battery",
        "--pause-when-hot",
        "--pause-critical",
    )
    assert [hour.text for hour in policy.quiet_hours] == ["Mon-Fri 09:00-17:00 Europe/Berlin", "Sat 10:00-12:00 UTC"]
    assert (policy.idle_minutes, policy.when_hot, policy.pauses_critical) == (10, True, True)
    assert policy.sources == ("schedule", "activity", "battery", "heat")


def refuse(*words: str) -> Result:
    said = CliRunner().invoke(main, ["agent", "--name=studio-1", *words])
    assert said.exit_code == 2
    return said


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("--quiet-hours=9 to 5", "give hours such as"),
        ("--quiet-hours=Mon 09:00-17:00 Berlin", "time zone 'Berlin' is not known"),
        ("--pause-when-active=0", "1<=x<=1440"),
        ("--pause-on-battery=101", "1<=x<=100"),
    ],
)
def test_value_that_makes_no_sense_is_refused_with_the_way_out(option: str, says: str) -> None:
    assert says in refuse(option).output
