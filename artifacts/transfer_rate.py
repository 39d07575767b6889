"""The rate of a transfer and the time that it still takes, and the words for both, wherever progress is shown.

The rate is a moving mean over the bytes that came in this run. The bytes that an earlier run has left, and files that
are there already, are progress and no rate: with them a resumed download would seem to end at once.
"""

from collections import deque
from typing import Final, NamedTuple

from crds.size import share_text, size_text
from crds.text import countdown_text

PROGRESS_SECONDS: Final = 10.0
"""Interval between two lines of progress of the same transfer, where lines stay."""
_WINDOW_SECONDS: Final = 10.0
"""Time over which the mean is taken. A longer pause without any bytes begins a new transfer."""
_SAMPLE_SECONDS: Final = 1.0
_LEAST_SECONDS: Final = 1.0
"""Time of a transfer before which its rate would be an accident."""
_FOUND_BYTES: Final = 16 << 20
_FOUND_BYTES_PER_SECOND: Final = 10**10
"""More bytes at once than a block has, and faster than networks are, were found on this host."""


class TransferProgress(NamedTuple):
    """The progress of a transfer at one moment."""

    bytes: int
    """Bytes that are there, also those of an earlier run."""
    total_bytes: int | None = None
    """None: the source does not state its size."""
    bytes_per_second: float | None = None
    """Mean over the last seconds of this run; 0 if nothing comes; None: it is too early to say."""
    seconds_left: float | None = None
    """Time until all bytes are there; None: it is not known."""


class _Sample(NamedTuple):
    """The bytes at a time of a monotonic clock, in seconds."""

    at: float
    bytes: int


class TransferMeter:
    """Measures one transfer after the other. Bytes that become fewer, or another total, begin a new one."""

    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque()
        """Samples of the window, and the last one before it."""
        self._last = _Sample(0.0, 0)
        self._total_bytes: int | None = None

    def note(self, done_bytes: int, total_bytes: int | None, now: float) -> bool:
        """Note that so many bytes are there now; it may be called for each block.

        Return True about once a second, when that is worth a report.
        """
        has_other_total = None not in {total_bytes, self._total_bytes} and total_bytes != self._total_bytes
        is_new = done_bytes < self._last.bytes or has_other_total or now - self._last.at > _WINDOW_SECONDS
        if is_new or not self._samples:
            self._samples.clear()
        else:
            self._leave_out_found(done_bytes - self._last.bytes, now - self._last.at)
        self._last, self._total_bytes = _Sample(now, done_bytes), total_bytes

        if self._samples and now - self._samples[-1].at < _SAMPLE_SECONDS:
            return False
        self._samples.append(self._last)
        while len(self._samples) > 1 and self._samples[1].at <= now - _WINDOW_SECONDS:
            self._samples.popleft()
        return True

    def _leave_out_found(self, more_bytes: int, seconds: float) -> None:
        """Count bytes that no network brings so fast as if they had been there from the beginning."""
        if more_bytes > max(_FOUND_BYTES, _FOUND_BYTES_PER_SECOND * seconds):
            self._samples = deque(_Sample(sample.at, sample.bytes + more_bytes) for sample in self._samples)

    def read(self, now: float) -> TransferProgress:
        """Return the progress; if nothing comes, the rate becomes less with the time."""
        done_bytes, total_bytes = self._last.bytes, self._total_bytes
        if not self._samples:
            return TransferProgress(done_bytes, total_bytes)

        # The last sample before the window, or the first one of a transfer that is younger.
        before = [sample for sample in self._samples if sample.at <= now - _WINDOW_SECONDS]
        base = before[-1] if before else self._samples[0]
        seconds = now - base.at
        if seconds < _LEAST_SECONDS:
            return TransferProgress(done_bytes, total_bytes)
        rate = (done_bytes - base.bytes) / seconds
        left_bytes = None if total_bytes is None else max(0, total_bytes - done_bytes)
        seconds_left = left_bytes / rate if left_bytes is not None and rate > 0 else None
        return TransferProgress(done_bytes, total_bytes, rate, seconds_left)


def describe_transfer(progress: TransferProgress) -> str:
    """Return the progress in words: `1.0 GiB of 4.0 GiB, 25 %, 31.2 MiB/s, 1:38 left`, as far as it is known."""
    texts = [share_text(progress.bytes, progress.total_bytes)]
    if progress.bytes_per_second:
        texts.append(f"{size_text(round(progress.bytes_per_second))}/s")
    elif progress.bytes_per_second is not None and progress.bytes != progress.total_bytes:
        texts.append("nothing comes at present")
    if progress.seconds_left:
        texts.append(f"{countdown_text(progress.seconds_left)} left")
    return ", ".join(texts)
