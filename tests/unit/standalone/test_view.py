"""What a person sees of a service, for all that it may be in."""

from io import StringIO

import pytest
from rich.console import Console

from controller.requirements import Problem
from crds.metalprocess import LastExit, MetalProcessStatus, Progress
from gateway.proxy.config import Stats
from metal_agent.lifecycle import LAST_LINES
from standalone.desired import Decision
from standalone.view import Row, row, table
from tests.serving import GIB


@pytest.mark.parametrize(
    ("replicas", "shown"),
    [
        ([], Row("chat", "Pending", "Model tiny is being looked at")),
        ([MetalProcessStatus(phase="Fetching")], Row("chat", "Fetching")),
        (
            [MetalProcessStatus(phase="Fetching", progress=Progress(bytes=GIB, total_bytes=4 * GIB))],
            Row("chat", "Fetching", "1.0 GiB of 4.0 GiB, 25 %"),
        ),
        (
            [MetalProcessStatus(phase="Fetching", progress=Progress(bytes=GIB))],
            Row("chat", "Fetching", "1.0 GiB"),
        ),
        ([MetalProcessStatus(phase="Starting")], Row("chat", "Starting", "loading")),
        (
            [MetalProcessStatus(phase="Rejected", message="needs 9 GiB")],
            Row("chat", "Rejected", "needs 9 GiB"),
        ),
        (
            [MetalProcessStatus(phase="Ready"), MetalProcessStatus(phase="Failed", message="crashed")],
            Row("chat", "Degraded", "1 of 2 replicas are ready; crashed"),
        ),
        (
            [
                MetalProcessStatus(
                    phase="Failed", message=f"ended{LAST_LINES}", last_exit=LastExit(time="", log="a\nbad head\n")
                )
            ],
            Row("chat", "Failed", "ended; it said last: bad head"),
        ),
        ([MetalProcessStatus(phase="Ready")] * 2, Row("chat", "Ready", "2 of 2 replicas are ready")),
        ([MetalProcessStatus(phase="Starting")] * 2, Row("chat", "Starting", "0 of 2 replicas are ready; loading")),
    ],
)
def test_a_service_is_one_row(replicas: list[MetalProcessStatus], shown: Row) -> None:
    decision = Decision(problem=None if replicas else Problem("Because", "Model tiny is being looked at", "Pending"))
    assert row("chat", decision, [(each, None, None) for each in replicas], None, None) == shown


def test_loading_shows_how_much_of_the_memory_is_taken() -> None:
    status = MetalProcessStatus(phase="Starting", pid=1)
    shown = row("chat", Decision(), [(status, 4 * GIB, GIB)], None, None)
    assert shown.detail == "loading, 1.0 GiB of about 4.0 GiB"
    assert shown.memory == "1.0 GiB"


def test_ready_is_what_the_endpoint_leads_to() -> None:
    ready = [(MetalProcessStatus(phase="Ready"), GIB, None)]
    assert row("chat", Decision(), ready, None, None, answers=False) == Row(
        "chat", "Starting", "loaded; the endpoint starts"
    )
    assert row("chat", Decision(), ready, None, None, answers=True) == Row("chat", "Ready")


def test_what_the_proxy_counts_is_shown() -> None:
    stats = Stats(requests=12, errors=1, tokens_out=100, in_flight=2, queued=3)
    shown = row("chat", Decision(), [(MetalProcessStatus(phase="Ready"), GIB, GIB // 2)] * 2, stats, 41.6)
    assert (shown.memory, shown.tokens_per_second) == ("1.0 GiB", "42")
    assert shown.requests == "12 (2 now, 3 waiting, 1 failed)"


def test_names_and_messages_bring_no_markup_to_the_terminal() -> None:
    console = Console(width=200, record=True, file=StringIO())
    console.print(table("[red]head[/]", [Row("chat", "Failed", "[bold]no[/]")], "curl", "foot"))
    drawn = console.export_text()
    assert "[red]head[/]" in drawn
    assert "[bold]no[/]" in drawn
