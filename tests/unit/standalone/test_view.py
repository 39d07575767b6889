"""The example command above the table is one line, to be copied, however narrow the terminal is."""

from io import StringIO
from types import SimpleNamespace
from typing import cast

import pytest
from rich.console import Console
from rich.live import Live

from kube.resources import ObjectKey
from standalone.client_access import ApiKey, ClientAccess
from standalone.machine import Machine, UserSignals
from standalone.service_rows import ServiceRow
from standalone.service_table import draw_table
from standalone.view import build_example_command, print_command


@pytest.mark.parametrize("width", [40, 80])
@pytest.mark.parametrize("on_terminal", [True, False])
def test_example_command_is_one_line_on_narrow_terminal(width: int, *, on_terminal: bool) -> None:
    command = 'curl http://127.0.0.1:8080/v1/chat/completions -d \'{"model": "tiny", "messages": []}\''
    out = StringIO()
    console = Console(width=width, file=out, force_terminal=on_terminal, color_system=None)
    with Live(console=console, auto_refresh=False) as screen:
        print_command(console, command)
        rows = [ServiceRow(service="tiny", phase="Ready")]
        screen.update(draw_table(console, "OpenAI endpoint: http://127.0.0.1:8080/v1", rows, "foot"), refresh=True)
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
