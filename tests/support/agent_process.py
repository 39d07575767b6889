"""`pomona agent` under a memory pressure that a test sets: `python -m tests.support.agent_process FILE agent ...`.

FILE has the level ("unknown" for none); without FILE the host is healthy, even if the test machine is busy. The memory
of other programs counts as free, because they are other tests. FILE.owner has what the owner does, as `OwnerFacts`;
without it that is what the test machine reports. While FILE.shutdown exists, the machine shuts down. The waits are
shortened; the rest is the real agent.
"""

import sys
from pathlib import Path

import msgspec
import psutil

from cli.main import main
from devices import power, shutdown, thermal, user_input
from devices import pressure as host
from devices.thermal import ThermalLevel
from metal_agent.holds import owner_policy
from metal_agent.memory import pressure_policy

LEVELS: dict[str, host.PressureLevel] = {"normal": "normal", "warn": "warn", "critical": "critical"}


def _read_pressure_from(path: Path) -> None:
    """Replace the system's memory pressure by the level in the file `path`, and report all memory as available."""
    read = host.read

    def read_with_level() -> host.PressureReading:
        try:
            level = path.read_text().strip()
        except FileNotFoundError:
            level = "normal"
        return read()._replace(level=LEVELS.get(level), available_bytes=psutil.virtual_memory().total)

    host.read = read_with_level


class OwnerFacts(msgspec.Struct):
    """The owner's use of the machine; None is not known."""

    idle_seconds: float | None = None
    source: power.PowerSource | None = None
    battery_percent: int | None = None
    heat: ThermalLevel | None = None


def owner_path(level: Path) -> Path:
    """Return the path of the facts about the owner beside the file with the level."""
    return level.with_name(f"{level.name}.owner")


def shutdown_path(level: Path) -> Path:
    """Return the path of the file beside the one with the level, while which exists the machine shuts down."""
    return level.with_name(f"{level.name}.shutdown")


def _read_owner_from(path: Path) -> None:
    """Replace the probes of input, power and heat by the facts in the file `path`, once a test has written it."""
    probes = user_input.read_idle_seconds, power.read, thermal.read

    def facts() -> OwnerFacts | None:
        return msgspec.json.decode(path.read_bytes(), type=OwnerFacts) if path.exists() else None

    def read_idle_seconds() -> float | None:
        return owner_facts.idle_seconds if (owner_facts := facts()) else probes[0]()

    def read_power() -> power.Power:
        return power.Power(owner_facts.source, owner_facts.battery_percent) if (owner_facts := facts()) else probes[1]()

    def read_thermal() -> ThermalLevel | None:
        return owner_facts.heat if (owner_facts := facts()) else probes[2]()

    user_input.read_idle_seconds = read_idle_seconds
    power.read = read_power
    thermal.read = read_thermal


def _shorten_waits() -> None:
    owner_policy.SAMPLE_SECONDS = 0.5  # type: ignore[misc]  # a constant outside of tests
    for table in (owner_policy.BEGIN_SECONDS, owner_policy.END_SECONDS):
        table.update(dict.fromkeys(table, 1.0))
    for name, seconds in (
        ("WARN_SECONDS", 1.0),
        ("CRITICAL_SECONDS", 1.0),
        ("DISPLACE_AFTER_SECONDS", 2.0),
        ("CRITICAL_DISPLACEMENT_SECONDS", 2.0),
        ("SETTLE_SECONDS", 1.0),
        ("CALM_SECONDS", 3.0),
        ("RETURN_SECONDS", 1.0),
    ):
        assert hasattr(pressure_policy, name), name
        setattr(pressure_policy, name, seconds)


if __name__ == "__main__":
    level = Path(sys.argv.pop(1))
    _read_pressure_from(level)
    _read_owner_from(owner_path(level))
    shutdown.is_shutting_down = shutdown_path(level).exists
    _shorten_waits()
    main()
