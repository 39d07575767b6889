"""The log lines of the proxy's process: their form, their order, and a disk that is full."""

import asyncio
import json
import logging
import os
from pathlib import Path

import pytest

from gateway import event_log
from gateway.event_log import EventLog, EventRecord


class Ended(EventRecord, kw_only=True, omit_defaults=True, tag="ended"):
    number: int
    error: str = ""


def ended(number: int) -> Ended:
    return Ended(level="info", timestamp="", number=number)


def test_event_is_one_line_of_json_with_level_and_time() -> None:
    written: list[bytes] = []
    EventLog(written.append).warning("pause\nd", connections=2, error=None)
    line = json.loads(written[0])
    assert written[0].count(b"\n") == 1
    assert line.pop("timestamp").endswith("Z")
    assert line == {"connections": 2, "error": None, "event": "pause\nd", "level": "warning"}


async def test_records_of_one_pass_are_written_together_and_before_later_events() -> None:
    written: list[bytes] = []
    log = EventLog(written.append)
    log.add(ended(1))
    log.add(ended(2))
    assert written == []
    await asyncio.sleep(0)
    assert [json.loads(line)["number"] for line in written[0].splitlines()] == [1, 2]
    log.add(ended(3))
    log.info("stopped")
    assert [json.loads(line)["event"] for line in written[1:]] == ["ended", "stopped"]


def test_defect_is_logged_with_its_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bytes] = []
    log = EventLog(written.append)
    monkeypatch.setattr(event_log, "log", log)
    try:
        int("a defect")
    except ValueError:
        log.exception("request_failed")
    record = logging.LogRecord("asyncio", logging.ERROR, "", 0, "lost %s", ("x",), None)
    event_log._LibraryHandler(logging.WARNING).emit(record)
    first, second = map(json.loads, written)
    assert "invalid literal" in first["exception"]
    assert (second["message"], second["logger"]) == ("lost x", "asyncio")


def test_full_disk_loses_lines_and_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with Path("/dev/full").open("wb") as full:
        monkeypatch.setattr(event_log, "_STANDARD_ERROR", full.fileno())
        with pytest.raises(OSError, match="No space"):
            os.write(full.fileno(), b"x")
        EventLog().info("written")
