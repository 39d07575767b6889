"""The view of `pomona up` shows each phase of a service, on narrow terminals too, and escapes markup in texts."""

from io import StringIO
from types import SimpleNamespace
from typing import cast

import pytest
from rich.console import Console
from rich.live import Live

from controller.services.preconditions import ServiceProblem
from crds.metalprocess import FetchProgress, LastExit, MetalProcessStatus
from gateway.proxy.config import ServiceStats
from kube.resources import ObjectKey
from metal_agent.lifecycle import LOG_HINT
from standalone.client_access import ApiKey, ClientAccess
from standalone.desired import Decision
from standalone.machine import Machine, UserSignals
from standalone.view import Row, build_example_command, build_row, draw_table, print_command
from tests.support.api_objects import GIB


@pytest.mark.parametrize(
    ("replicas", "shown"),
    [
        ([], Row("chat", "Pending", "waiting for Model tiny to be inspected")),
        ([MetalProcessStatus(phase="Fetching")], Row("chat", "Fetching")),
        (
            [MetalProcessStatus(phase="Fetching", progress=FetchProgress(bytes=GIB, total_bytes=4 * GIB))],
            Row("chat", "Fetching", "1.0 GiB of 4.0 GiB, 25 %"),
        ),
        (
            [MetalProcessStatus(phase="Fetching", progress=FetchProgress(bytes=GIB))],
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
                    phase="Failed", message=f"ended: bad head{LOG_HINT}", last_exit=LastExit(time="", log="a\n")
                )
            ],
            Row("chat", "Failed", "ended: bad head"),
        ),
        ([MetalProcessStatus(phase="Ready")] * 2, Row("chat", "Ready", "2 of 2 replicas are ready")),
        ([MetalProcessStatus(phase="Starting")] * 2, Row("chat", "Starting", "0 of 2 replicas are ready; loading")),
    ],
)
def test_service_is_one_row(replicas: list[MetalProcessStatus], shown: Row) -> None:
    decision = Decision(
        problem=None if replicas else ServiceProblem("Because", "waiting for Model tiny to be inspected", "Pending")
    )
    assert build_row("chat", decision, [(replica, None, None) for replica in replicas], None, None) == shown


def test_loading_shows_memory_taken_so_far() -> None:
    status = MetalProcessStatus(phase="Starting", pid=1)
    shown = build_row("chat", Decision(), [(status, 4 * GIB, GIB)], None, None)
    assert shown.detail == "loading, 1.0 GiB of about 4.0 GiB"
    assert shown.memory == "1.0 GiB"


def test_service_is_ready_once_endpoint_leads_to_it() -> None:
    ready = [(MetalProcessStatus(phase="Ready"), GIB, None)]
    assert build_row("chat", Decision(), ready, None, None, answers=False) == Row(
        "chat", "Starting", "loaded; waiting for the endpoint"
    )
    assert build_row("chat", Decision(), ready, None, None, answers=True) == Row("chat", "Ready")


def test_counts_of_proxy_are_shown() -> None:
    stats = ServiceStats(requests=12, errors=1, tokens_out=100, in_flight=2, queued=3)
    shown = build_row("chat", Decision(), [(MetalProcessStatus(phase="Ready"), GIB, GIB // 2)] * 2, stats, 41.6)
    assert (shown.memory, shown.tokens_per_second) == ("1.0 GiB", "42")
    assert shown.requests == "12 (2 running, 3 waiting, 1 failed)"


def test_names_and_messages_are_not_markup() -> None:
    console = Console(width=200, record=True, file=StringIO())
    console.print(draw_table("[red]head[/]", [Row("chat", "Failed", "[bold]no[/]")], "foot"))
    drawn = console.export_text()
    assert "[red]head[/]" in drawn
    assert "[bold]no[/]" in drawn


def test_detail_is_readable_on_narrow_terminal() -> None:
    console = Console(width=60, record=True, file=StringIO())
    console.print(
        draw_table(
            "head",
            [Row("chat", "Failed", "exit code 1 after 2 s; see its log", "9.1 GiB", "41", "12 (2 running)")],
            "foot",
        )
    )
    assert "chat: exit code 1 after 2 s; see its log\n" in console.export_text()


@pytest.mark.parametrize("width", [40, 80])
@pytest.mark.parametrize("on_terminal", [True, False])
def test_example_command_is_one_line_on_narrow_terminal(width: int, *, on_terminal: bool) -> None:
    command = 'curl http://127.0.0.1:8080/v1/chat/completions -d \'{"model": "tiny", "messages": []}\''
    out = StringIO()
    console = Console(width=width, file=out, force_terminal=on_terminal, color_system=None)
    with Live(console=console, auto_refresh=False) as screen:
        print_command(console, command)
        screen.update(
            draw_table("OpenAI endpoint: http://127.0.0.1:8080/v1", [Row("tiny", "Ready")], "foot"), refresh=True
        )
    assert next(line for line in out.getvalue().splitlines() if "curl" in line).endswith(command)


def test_example_command_sends_the_key_and_does_not_show_it_to_other_users() -> None:
    machine = SimpleNamespace(
        exposure=SimpleNamespace(url="http://127.0.0.1:80", access=ClientAccess(keys=(ApiKey("phone", "secret"),))),
        manifests=SimpleNamespace(services={ObjectKey("default", "tiny"): None}),
        signals=UserSignals(),
    )
    command = build_example_command(cast("Machine", machine))
    sender = (
        """printf 'Authorization: Bearer %s' "$POMONA_API_KEY" | curl -H @- http://127.0.0.1:80/v1/chat/completions"""
    )
    assert command.startswith(f"{sender} -d ")
