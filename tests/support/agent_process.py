"""`pomona agent` under a memory pressure that a test sets: `python -m tests.support.agent_process FILE agent ...`.

FILE has the level ("unknown" for none); without FILE the host is healthy, even if the test machine is busy. The memory
of other programs counts as free, because they are other tests. The waits are shortened; the rest is the real agent.
"""

import sys
from pathlib import Path

import psutil

from cli.main import main
from devices import pressure as host
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


def _shorten_waits() -> None:
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
    _read_pressure_from(Path(sys.argv.pop(1)))
    _shorten_waits()
    main()
