"""The page of `pomona up` shows its table as it is drawn, its phases, and the keys of its lines of JSON."""

import json
import re
from io import StringIO
from typing import Any

import msgspec
from msgspec.structs import fields
from rich.console import Console

from standalone.row_text import describe_detail
from standalone.service_rows import ServiceRow, render_json
from standalone.service_table import draw_table
from tests.controlplane.process import CHECKOUT
from tests.support.api_objects import GIB
from tests.support.documents import list_blocks

SECTION = (CHECKOUT / "docs" / "up.md").read_text().partition("## What `pomona up` shows\n")[2].partition("\n## ")[0]
MEASURED = {
    *("memoryBytes", "idleLimitSeconds", "unloadSeconds", "tokensPerSecond"),
    *("requests", "failedRequests", "running", "waiting"),
}
"""Keys of facts that change with each reading: lines, which are printed for changes, have none of them."""
DOWNLOAD = ServiceRow(
    service="llama",
    phase="Downloading",
    bytes=3 * GIB,
    total_bytes=12 * GIB,
    bytes_per_second=2.0**25,
    seconds_left=288.0,
)


def count(requests: int, running: int = 0, waiting: int = 0) -> dict[str, int]:
    return {"requests": requests, "failedRequests": 0, "running": running, "waiting": waiting}


def test_table_is_drawn_as_it_is_shown() -> None:
    loaded = {"replicas": 1, "readyReplicas": 1, "idleLimitSeconds": 300}
    rows: list[dict[str, Any]] = [
        {"service": "qwen3-8b", "phase": "Ready", "memoryBytes": 5 * GIB, "tokensPerSecond": 41.2}
        | loaded
        | count(1234, running=2, waiting=3),
        {"service": "embed", "phase": "Ready", "memoryBytes": 310 << 20, "unloadSeconds": 252.0} | loaded | count(88),
        {"service": "coder", "phase": "Starting", "memoryBytes": int(1.2 * GIB), "reservedBytes": int(9.4 * GIB)}
        | {"secondsLeft": 12.0}
        | count(0, waiting=1),
        {"service": "gemma", "phase": "Waiting"} | count(12, waiting=4),
        render_json(DOWNLOAD) | count(0),
        {"service": "whisper", "phase": "Idle"} | count(0),
    ]
    console = Console(file=StringIO(), width=80, height=40)
    (shown,) = list_blocks(SECTION, "text")
    assert draw_table(console, "", msgspec.convert(rows, list[ServiceRow]), "").plain.strip() == shown.strip()


def test_sample_line_is_one_of_the_command() -> None:
    (sample,) = list_blocks(SECTION, "json")
    line = json.loads(sample)
    assert line == render_json(DOWNLOAD) | {
        "time": "2026-11-21T13:10:00.000000Z",
        "event": "service",
        "detail": describe_detail(DOWNLOAD),
    }


def test_each_key_of_a_line_has_a_row() -> None:
    table = SECTION.partition("| key | value |")[2].partition("\n\n")[0]
    listed = {key for row in re.findall(r"^\| (`.*?`) \|", table, re.MULTILINE) for key in re.findall(r"`(\w+)`", row)}
    stated = {field.encode_name for field in fields(ServiceRow)} - {"message", "note"}
    assert listed == (stated - MEASURED) | {"time", "event", "detail"}
