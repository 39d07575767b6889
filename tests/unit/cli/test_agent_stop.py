"""`pomona agent stop`: only an agent that says that everything is stopped has stopped everything."""

from pathlib import Path

import click
import psutil
import pytest

from cli.agent import agent_service
from cli.agent.agent_service import stop_everything
from metal_agent.control.agent_client import AgentClient
from metal_agent.control.agent_status import StopAccepted
from metal_agent.exit_codes import STOPPED, TEMPORARY, AgentExit, save_exit
from tests.unit.cli.test_agent_service import status


@pytest.fixture(autouse=True)
def _agent_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def stop(_client: AgentClient) -> StopAccepted:
        return StopAccepted(7)

    monkeypatch.setattr(AgentClient, "stop", stop)
    monkeypatch.setattr(agent_service, "read_status", lambda _: status())
    monkeypatch.setattr(psutil, "pid_exists", lambda _: False)


def test_end_with_everything_stopped_is_success(tmp_path: Path) -> None:
    save_exit(tmp_path, AgentExit(STOPPED, "everything was stopped on request", "2026-11-24T00:00:00Z"))
    assert stop_everything(tmp_path, print)


@pytest.mark.parametrize("ended", [None, AgentExit(TEMPORARY, "no space left", "2026-11-24T00:00:00Z")])
def test_any_other_end_is_an_error(tmp_path: Path, ended: AgentExit | None) -> None:
    if ended:
        save_exit(tmp_path, ended)
    with pytest.raises(click.ClickException, match=ended.message if ended else "engines may still run"):
        stop_everything(tmp_path, print)
