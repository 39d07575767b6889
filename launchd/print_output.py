"""Read the output of `launchctl print DOMAIN/LABEL`, whose form is no interface: an unknown line is passed over.

A line is `key = value`, or `key = {` with lines up to `}`; inside of an environment it is `KEY => value`.
"""

from typing import NamedTuple


class JobState(NamedTuple):
    """The state of a job of launchd; None for what is not printed."""

    state: str | None = None
    """running, not running, spawn scheduled, waiting, ..."""
    pid: int | None = None
    """Printed only while it runs."""
    runs: int | None = None
    last_exit: str | None = None
    """Such as `1`, `78: EX_CONFIG` or `(never exited)`; after a signal that one, such as `Killed: 9`."""

    @property
    def is_running(self) -> bool:
        """True while the job has a process."""
        return self.state == "running" and self.pid is not None


def read_job_state(output: str) -> JobState:
    """Return the state of the job; keys of nested blocks, such as the `state` of an endpoint, are not taken for it."""
    properties = dict[str, str]()
    # An excerpt without the job's own line begins inside of the job.
    depth = 0 if output.split("\n", 1)[0].endswith("= {") else 1
    for line in map(str.strip, output.splitlines()):
        if line == "}":
            depth -= 1
        elif line.endswith("= {"):
            depth += 1
        elif depth == 1:
            key, equals, value = line.partition(" = ")
            if equals:
                properties.setdefault(key, value)
    return JobState(
        state=properties.get("state"),
        pid=_read_number(properties.get("pid")),
        runs=_read_number(properties.get("runs")),
        last_exit=properties.get("last terminating signal", properties.get("last exit code")),
    )


def _read_number(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() else None
