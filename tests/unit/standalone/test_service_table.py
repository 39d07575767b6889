"""The table fits the terminal in width and height, folds long names, and draws texts of others as text."""

from collections.abc import Sequence
from io import StringIO
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from standalone.service_rows import ServiceRow
from standalone.service_table import draw_table
from tests.support.api_objects import GIB

HEAD = "OpenAI endpoint: http://127.0.0.1:8080/v1\n10.0 GiB of 48.0 GiB of the memory for models are free"
FOOT = "press Ctrl-C to stop; restart to load changes"
COUNTS: dict[str, Any] = {"requests": 12345, "failed_requests": 1, "running": 16, "waiting": 128}
LONG_NAME = "llama-3-3-70b-instruct-for-the-whole-team-q4-k-m"

MODELS = [
    ServiceRow(
        service="qwen3-8b",
        phase="Ready",
        memory_bytes=5 * GIB,
        tokens_per_second=41.2,
        idle_limit_seconds=300,
        unload_seconds=252.0,
        requests=1234,
        failed_requests=0,
        running=0,
        waiting=0,
    ),
    ServiceRow(service=LONG_NAME, phase="Starting", seconds_left=31.4, requests=0, running=0, waiting=1),
    ServiceRow(service="gemma", phase="Downloading", bytes=3 * GIB, total_bytes=12 * GIB, bytes_per_second=2.0**25),
    ServiceRow(service="coder", phase="Waiting", requests=12, running=0, waiting=4),
    ServiceRow(service="whisper", phase="Idle", requests=0, running=0, waiting=0),
    ServiceRow(service="broken", phase="Failed", message="the engine exited with exit code 3: no such device"),
]


def draw(rows: Sequence[ServiceRow], width: int = 80, height: int = 50, **console: Any) -> str:
    """Return what a terminal of this size gets."""
    out = StringIO()
    terminal = Console(file=out, width=width, height=height, **console)
    terminal.print(draw_table(terminal, HEAD, rows, FOOT))
    return out.getvalue()


def test_models_are_readable_on_80_columns() -> None:
    assert (
        draw(MODELS)
        == """\
OpenAI endpoint: http://127.0.0.1:8080/v1
10.0 GiB of 48.0 GiB of the memory for models are free

SERVICE             PHASE         MEMORY  TOKENS/S  REQUESTS
qwen3-8b            Ready        5.0 GiB        41  1,234
  unloads in 4:12
llama-3-3-70b-      Starting                        0 (1 waiting)
instruct-for-the-
whole-team-q4-k-m
  loading, about 32 s left
gemma               Downloading
  3.0 GiB of 12.0 GiB, 25 %, 32.0 MiB/s
coder               Waiting                         12 (4 waiting)
  waiting for memory that other models use
whisper             Idle                            0
broken              Failed
  the engine exited with exit code 3: no such device

press Ctrl-C to stop; restart to load changes
"""
    )


def test_narrow_terminal_leaves_out_columns_before_names_become_short() -> None:
    lines = draw(MODELS, width=60).splitlines()
    assert max(map(len, lines)) <= 60
    assert "SERVICE            PHASE        REQUESTS" in lines
    assert "SERVICE  PHASE        MEMORY  REQUESTS" in draw(MODELS[2:5], width=60).splitlines()


def test_twenty_models_fit_a_terminal_of_24_lines() -> None:
    idle = [ServiceRow(service=f"model-{number}", phase="Idle", requests=0) for number in range(20)]
    lines = draw(idle, height=24).splitlines()
    assert len(lines) == 24
    assert lines[-2].split()[0] == "model-19"


def test_what_rests_is_left_out_first_on_a_low_terminal() -> None:
    lines = draw([MODELS[4], *MODELS[:1], *MODELS[3:], MODELS[4]], height=10).splitlines()
    assert [line.split()[0] for line in lines[3:]] == [
        *("qwen3-8b", "coder", "waiting", "broken", "the"),
        *("...", "press"),
    ]
    assert lines[-2] == "... 3 more: a higher terminal shows them"


def test_details_are_left_out_before_models() -> None:
    lines = draw(MODELS[:1] * 8, height=12).splitlines()
    assert lines == draw(MODELS[:1] * 8, height=50).splitlines()[:2] + [
        line for line in draw(MODELS[:1] * 8, height=50).splitlines()[3:] if line and "unloads" not in line
    ]


def test_running_requests_change_no_other_column() -> None:
    idle = ServiceRow(service=LONG_NAME, phase="Ready", memory_bytes=GIB, **COUNTS | {"running": 0, "waiting": 0})
    busy = ServiceRow(service=LONG_NAME, phase="Ready", memory_bytes=GIB, **COUNTS | {"running": 1, "waiting": 2})
    for one, other in zip(draw([idle]).splitlines()[4:], draw([busy]).splitlines()[4:], strict=True):
        assert other.startswith(one)


def test_names_and_messages_are_not_markup() -> None:
    drawn = draw([ServiceRow(service="[red]chat[/]", phase="Failed", message="[bold]no[/]")], width=200)
    assert "[red]chat[/]" in drawn
    assert "[bold]no[/]" in drawn


def test_colours_are_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b" not in draw(MODELS, force_terminal=False)
    assert "\x1b[32mReady" in draw(MODELS, force_terminal=True)
    assert "\x1b[2mwhisper" in draw(MODELS, force_terminal=True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "Ready" in draw(MODELS, force_terminal=True)
    assert "\x1b[3" not in draw(MODELS, force_terminal=True)


@given(
    st.lists(
        st.builds(
            ServiceRow,
            service=st.from_regex(r"[a-z]([a-z0-9-]{0,50}[a-z0-9])?", fullmatch=True),
            phase=st.sampled_from(["Ready", "Idle", "Downloading", "Suspended", "Failed"]),
            message=st.just("") | st.text(max_size=200),
            memory_bytes=st.none() | st.integers(0, 1 << 42),
            tokens_per_second=st.none() | st.floats(0, 1e5),
            requests=st.integers(0, 10**7),
            running=st.integers(0, 9999),
            waiting=st.integers(0, 9999),
        ),
        max_size=30,
    ),
    st.integers(20, 120),
    st.integers(12, 60),
)
def test_table_is_never_larger_than_the_terminal(rows: list[ServiceRow], width: int, height: int) -> None:
    console = Console(file=StringIO(), width=width, height=height, force_terminal=True)
    table = draw_table(console, HEAD, rows, FOOT)
    lines = console.render_lines(table, console.options, pad=False)
    assert len(lines) <= height
    assert len(lines) == table.plain.count("\n") + 1, "the terminal wraps no line"
    assert all(sum(segment.cell_length for segment in line) <= width for line in lines)
    if height == 60:
        assert all(row.service.replace("-", "") in table.plain.replace("\n", "").replace("-", "") for row in rows[:3])
