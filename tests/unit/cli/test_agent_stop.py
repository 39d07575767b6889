"""`pomona agent stop` and `uninstall`: only an agent that says that everything is stopped has stopped everything.

Root asks the agents of other users, who may answer anything, or lead it to the agent of a third.
"""

import itertools
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import click
import msgspec
import psutil
import pytest
from click.testing import CliRunner, Result

from cli.agent import agent_service
from cli.agent.agent_service import ServiceManagers, stop_everything
from cli.main import main
from gateway.http import owned_control_client
from launchd.service_definition import ServiceDefinition
from metal_agent.control.agent_client import AgentClient
from metal_agent.control.agent_control import AGENT_SOCKET
from metal_agent.exit_codes import STOPPED, TEMPORARY, AgentExit, save_exit
from tests.support.canned_socket import answer_with
from tests.unit.cli.test_agent_service import ManagerStandIn, status

TIME = "2026-11-24T00:00:00Z"


@pytest.fixture
def _agent_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def stop(_client: AgentClient) -> int:
        return 7

    monkeypatch.setattr(AgentClient, "stop", stop)
    monkeypatch.setattr(agent_service, "read_status", lambda *_: status())
    monkeypatch.setattr(psutil, "pid_exists", lambda _: False)


@pytest.mark.usefixtures("_agent_that_is_gone")
def test_end_with_everything_stopped_is_success(tmp_path: Path) -> None:
    save_exit(tmp_path, AgentExit(STOPPED, "everything was stopped on request", TIME))
    assert stop_everything(tmp_path)


@pytest.mark.usefixtures("_agent_that_is_gone")
@pytest.mark.parametrize("ended", [None, AgentExit(TEMPORARY, "no space left", TIME)])
def test_any_other_end_is_an_error(tmp_path: Path, ended: AgentExit | None) -> None:
    if ended:
        save_exit(tmp_path, ended)
    with pytest.raises(click.ClickException, match=ended.message if ended else "engines may still run"):
        stop_everything(tmp_path)


def hostile_socket(path: Path) -> AbstractContextManager[list[bytes]]:
    """Answer every call as an agent that is the first process of the machine, and that never ends."""
    return answer_with(path, b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + msgspec.json.encode(status(pid=1)))


class SystemService:
    """A service of the system whose state folder belongs to a hostile owner; the test is root."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder / "state"
        self.folder.mkdir()
        self.manager = ManagerStandIn(folder, needs_root=True, pid=os.getpid())
        arguments = ("/opt/pomona", "agent", "--state-dir", str(self.folder))
        self.manager.definition = ServiceDefinition(arguments, "ada", folder, folder / "output")
        self._managers = ServiceManagers(self.manager, ManagerStandIn(folder), folder / "pomona")
        monkeypatch.setattr(os, "geteuid", lambda: 0)
        uid = self.folder.stat().st_uid
        monkeypatch.setattr(owned_control_client, "unix_peer_uid", lambda _: uid)

    def run(self, *words: str) -> Result:
        return CliRunner().invoke(main, ["agent", *words], obj=self._managers)

    @property
    def is_installed(self) -> bool:
        return self.manager.definition is not None


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SystemService:
    return SystemService(tmp_path, monkeypatch)


@pytest.fixture
def _seconds_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pass 10 s at each look at the clock."""
    clock = itertools.count(step=10)

    class Time:
        monotonic: Callable[[], int] = staticmethod(lambda: next(clock))
        sleep: Callable[[float], None] = staticmethod(lambda _: None)

    monkeypatch.setattr(agent_service, "time", Time)


@pytest.mark.usefixtures("_seconds_pass")
def test_uninstall_does_not_wait_for_ever_for_an_owner_who_lies(service: SystemService) -> None:
    with hostile_socket(service.folder / AGENT_SOCKET):
        result = service.run("uninstall")
    assert f"process {os.getpid()} has not stopped everything within 3780 s" in result.output, "not process 1"
    assert "--keep-serving` removes the service" in result.output
    assert service.is_installed
    assert service.run("uninstall", "--keep-serving").exit_code == 0
    assert not service.is_installed


@pytest.mark.parametrize(
    "ended", [None, AgentExit(TEMPORARY, "no space left", TIME), AgentExit(STOPPED, "asked", TIME)]
)
def test_uninstall_says_whether_engines_go_on(service: SystemService, ended: AgentExit | None) -> None:
    service.manager.pid = None
    if ended:
        save_exit(service.folder, ended)
    said = service.run("uninstall").output
    was_stopped = ended is not None and ended.code == STOPPED
    assert ("everything is stopped" in said, "keep running" in said) == (was_stopped, not was_stopped)


@pytest.mark.parametrize("words", [["uninstall"], ["stop"]])
def test_root_asks_no_other_process_than_that_of_the_service(service: SystemService, words: list[str]) -> None:
    service.manager.pid = 1
    with hostile_socket(service.folder / AGENT_SOCKET) as calls:
        result = service.run(*words)
    assert "and the agent of the service is process 1" in result.output
    assert not any(calls), "it was sent nothing"


def test_link_to_the_socket_of_another_user_is_not_followed(
    service: SystemService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owned_control_client, "unix_peer_uid", lambda _: 54321)
    (service.folder / AGENT_SOCKET).symlink_to(tmp_path / "of-another")
    with hostile_socket(tmp_path / "of-another") as calls:
        for words in (["status"], ["stop"], ["uninstall"], ["restart"]):
            assert "of uid 54321 answers at" in service.run(*words).output
    assert not any(calls), "it was sent nothing"
    assert service.is_installed


def test_file_of_the_last_end_that_never_begins_is_named(service: SystemService) -> None:
    os.mkfifo(service.folder / "last-exit.json")
    assert "no regular file" in service.run("status").output


def test_service_without_a_process_is_removed_without_asking(service: SystemService) -> None:
    service.manager.pid = None
    with hostile_socket(service.folder / AGENT_SOCKET) as calls:
        assert service.run("uninstall").exit_code == 0
    assert calls == []
    assert not service.is_installed
