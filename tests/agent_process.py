"""`pomona agent` on a host whose memory pressure a test decides: `python -m tests.agent_process FILE agent ...`.

FILE has the level ("unknown" for none); without it the host is healthy, however busy the machine of the tests is. The
waits are short ones, all else is the real agent.
"""

import sys
from pathlib import Path

from cli.main import main
from devices import pressure as host
from metal_agent import pressure

LEVELS: dict[str, host.Level] = {"normal": "normal", "warn": "warn", "critical": "critical"}


def _told(path: Path) -> None:
    """Have the system's reading say the level in `path`."""
    read = host.read

    def told() -> host.Reading:
        try:
            level = path.read_text().strip()
        except FileNotFoundError:
            level = "normal"
        return read()._replace(level=LEVELS.get(level))

    host.read = told


def _hasten() -> None:
    for name, seconds in (
        ("WARN_SECONDS", 1.0),
        ("CRITICAL_SECONDS", 1.0),
        ("MOVE_SECONDS", 2.0),
        ("CRITICAL_PLACE_SECONDS", 2.0),
        ("SETTLE_SECONDS", 1.0),
        ("CALM_SECONDS", 3.0),
        ("RETURN_SECONDS", 1.0),
    ):
        assert hasattr(pressure, name), name
        setattr(pressure, name, seconds)


if __name__ == "__main__":
    _told(Path(sys.argv.pop(1)))
    _hasten()
    main()
