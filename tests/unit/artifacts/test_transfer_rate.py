"""The rate of a transfer is that of the last seconds of this run, and the time left follows from it."""

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from artifacts.transfer_rate import TransferMeter, TransferProgress, describe_transfer
from crds.size import GIB, MIB


def measure(samples: Iterable[tuple[float, int]], total_bytes: int | None = None) -> TransferMeter:
    """Return a meter that has seen so many bytes at these times."""
    meter = TransferMeter()
    for at, done_bytes in samples:
        meter.note(done_bytes, total_bytes, at)
    return meter


def stream(start: float, seconds: float, first_bytes: int, rate: int) -> list[tuple[float, int]]:
    """Return what a transfer of `rate` bytes a second reports, a hundred times a second."""
    return [(start + tick / 100, first_bytes + rate * tick // 100) for tick in range(int(seconds * 100) + 1)]


def test_time_left_follows_from_the_rate() -> None:
    progress = measure(stream(100.0, 20.0, 0, 10 * MIB), 400 * MIB).read(120.0)
    assert progress == TransferProgress(200 * MIB, 400 * MIB, 10.0 * MIB, 20.0)
    assert describe_transfer(progress) == "200.0 MiB of 400.0 MiB, 50 %, 10.0 MiB/s, 20 s left"


def test_resumed_bytes_are_progress_and_no_rate() -> None:
    meter = measure(stream(100.0, 4.0, 3 * GIB, MIB), 4 * GIB)
    assert meter.read(104.0).bytes_per_second == MIB
    assert meter.read(104.0).seconds_left == 1020.0


def test_file_that_is_there_already_is_no_rate() -> None:
    """One of several files may be there, or continued, while others come."""
    running = stream(100.0, 5.0, 0, MIB)
    after = stream(105.01, 5.0, 5 * MIB + 2 * GIB, MIB)
    assert measure(running + after, 4 * GIB).read(110.01).bytes_per_second == pytest.approx(MIB, rel=0.01)


def test_rate_is_that_of_the_last_seconds() -> None:
    slow = stream(100.0, 60.0, 0, MIB)
    fast = stream(160.0, 12.0, 60 * MIB, 8 * MIB)
    assert measure(slow + fast).read(172.0).bytes_per_second == pytest.approx(8 * MIB, rel=0.01)


def test_rate_is_not_known_in_the_first_second() -> None:
    progress = measure(stream(100.0, 0.9, 0, MIB), GIB).read(100.9)
    assert (progress.bytes_per_second, progress.seconds_left) == (None, None)
    assert describe_transfer(progress) == "921.6 KiB of 1.0 GiB, 0 %"


def test_stalled_transfer_becomes_slower_until_nothing_comes() -> None:
    meter = measure(stream(100.0, 20.0, 0, MIB), GIB)
    rates = [meter.read(120.0 + seconds).bytes_per_second for seconds in (0, 5, 11)]
    assert rates == [MIB, pytest.approx(MIB / 2, rel=0.1), 0.0]
    assert meter.read(131.0).seconds_left is None
    assert describe_transfer(meter.read(131.0)) == "20.0 MiB of 1.0 GiB, 1 %, nothing comes at present"


def test_transfer_after_a_long_pause_has_a_rate_of_its_own() -> None:
    meter = measure(stream(100.0, 20.0, 0, MIB) + stream(500.0, 3.0, 20 * MIB, 4 * MIB))
    assert meter.read(503.0).bytes_per_second == 4 * MIB


@pytest.mark.parametrize("total", [GIB, 2 * GIB], ids=["restarted", "next file"])
def test_next_file_begins_anew(total: int) -> None:
    meter = measure(stream(100.0, 5.0, 0, 100 * MIB), GIB)
    for at, done_bytes in stream(105.5, 2.0, 1, MIB):
        meter.note(done_bytes, total, at)
    assert meter.read(107.5) == TransferProgress(2 * MIB + 1, total, MIB, (total - 2 * MIB - 1) / MIB)


def test_size_that_is_not_known_leaves_the_time_open() -> None:
    assert describe_transfer(measure(stream(100.0, 5.0, 0, MIB)).read(105.0)) == "5.0 MiB, 1.0 MiB/s"


def test_complete_transfer_has_no_time_left() -> None:
    progress = measure(stream(100.0, 5.0, 0, MIB), 5 * MIB).read(130.0)
    assert describe_transfer(progress) == "5.0 MiB of 5.0 MiB, 100 %"


def test_nothing_is_measured_before_the_first_bytes() -> None:
    assert TransferMeter().read(5.0) == TransferProgress(0)


@given(st.lists(st.tuples(st.floats(0, 20), st.integers(0, 1 << 40)), max_size=60), st.none() | st.integers(1, 1 << 40))
def test_no_rate_and_no_time_is_negative(steps: list[tuple[float, int]], total: int | None) -> None:
    meter, now = TransferMeter(), 0.0
    for pause, done_bytes in steps:
        now += pause
        meter.note(done_bytes, total, now)
        assert len(meter._samples) < 25
        progress = meter.read(now + pause)
        assert (progress.bytes_per_second or 0) >= 0
        assert (progress.seconds_left or 0) >= 0
        assert describe_transfer(progress)
