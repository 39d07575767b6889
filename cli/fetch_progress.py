"""The progress of a download on standard error: a bar on a terminal, lines elsewhere, with rate and time left."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from artifacts.transfer_rate import PROGRESS_SECONDS, TransferMeter, describe_transfer
from crds.size import size_text
from crds.text import escape_controls

ReportBytes = Callable[[int, int | None], None]
"""Gets the bytes so far, at first those of an earlier download, and all bytes; None: their number is not known."""


@contextlib.contextmanager
def show_fetch_progress(name: str) -> Iterator[ReportBytes]:
    """Yield a function that shows the progress of the download of `name`."""
    if not sys.stderr.isatty():
        yield ProgressLines(name, time.monotonic).show
        return
    from rich.console import Console  # noqa: PLC0415  only a terminal pays for it
    from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn  # noqa: PLC0415
    from rich.table import Column  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    meter = TransferMeter()

    class RateColumn(ProgressColumn):
        """The bytes, the rate and the time left at the time of each drawing, so that a stall shows."""

        def render(self, task: Task) -> Text:  # noqa: ARG002
            """Return the text of the column."""
            return Text(describe_transfer(meter.read(time.monotonic())), no_wrap=True)

    # The bar takes what the texts leave of the width.
    name_column = TextColumn("{task.description}", markup=False, table_column=Column(overflow="fold"))
    bar_column = BarColumn(bar_width=None, table_column=Column(ratio=1))
    with Progress(name_column, bar_column, RateColumn(), console=Console(stderr=True), expand=True) as bar:
        task: TaskID | None = None

        def show(done: int, total: int | None) -> None:
            """Show how many bytes are there; those of the first call do not count for the rate."""
            nonlocal task
            if task is None:
                if is_resumed(done, total):
                    bar.console.print(describe_resumption(name, done), markup=False)
                task = bar.add_task(escape_controls(name), total=total, completed=done)
            meter.note(done, total, time.monotonic())
            bar.update(task, completed=done, total=total)

        yield show


def is_resumed(first: int, total: int | None) -> bool:
    """Return whether a download whose first report is `first` bytes continues an earlier one."""
    return first > 0 and first != total


def describe_resumption(name: str, first: int) -> str:
    """Return the line about a download that continues an earlier one."""
    return f"{escape_controls(name)}: resumed at {size_text(first)}"


class ProgressLines:
    """Progress as lines of text, one every ten seconds; a shorter download prints none, unless it was resumed."""

    def __init__(self, name: str, clock: Callable[[], float]) -> None:
        self._name, self._clock = name, clock
        self._has_begun = False
        self._next_line_at = clock() + PROGRESS_SECONDS
        self._meter = TransferMeter()

    def show(self, done: int, total: int | None) -> None:
        """Print how many bytes are there, the rate and the time left, if the last line is old enough."""
        now = self._clock()
        if not self._has_begun and is_resumed(done, total):
            print(describe_resumption(self._name, done), file=sys.stderr, flush=True)
        self._has_begun = True
        self._meter.note(done, total, now)
        if now < self._next_line_at:
            return
        self._next_line_at = now + PROGRESS_SECONDS
        progress = describe_transfer(self._meter.read(now))
        print(escape_controls(f"{self._name}: {progress}"), file=sys.stderr, flush=True)
