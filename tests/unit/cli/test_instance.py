"""Commands ask the running `pomona up` unless a cluster is named, and say why it cannot be asked."""

import os
import socket
from pathlib import Path

import click
import msgspec
import pytest
from click.testing import CliRunner

from cli.cluster_options import ClusterOptions
from cli.machine import instance as running
from cli.machine.instance import Instance, choose_instance, find_instance, require_instance
from cli.main import main
from gateway.http import owned_control_client
from standalone.control.up_client import UpClient
from standalone.control.up_status import UP_SOCKET, UpStatus, describe_missing_service
from tests.support.canned_socket import answer_with
from tests.unit.cli.test_completion import complete
from tests.unit.cli.test_service_output import service, status


def answer(body: msgspec.Struct, code: str = "200 OK") -> bytes:
    content = msgspec.json.encode(body)
    return b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (code.encode(), len(content), content)


def instance(*names: str, found: UpStatus | None = None) -> Instance:
    return Instance(Path("/x"), UpClient(Path("/x")), found or status(*(service(name) for name in names)))


def test_instance_in_the_state_folder_is_preferred_to_a_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "default_state_folder", lambda: tmp_path)
    assert choose_instance(ClusterOptions(), None) is None
    with answer_with(tmp_path / UP_SOCKET, answer(status(service("one")))):
        found = choose_instance(ClusterOptions(), None)
        assert found
        assert (found.status.pid, found.folder) == (os.getpid(), tmp_path), "the kernel names the process"
        for target in (ClusterOptions(context="a"), ClusterOptions(namespace="b"), ClusterOptions(Path("/c"))):
            assert choose_instance(target, None) is None


def test_state_folder_and_cluster_together_are_refused(tmp_path: Path) -> None:
    with pytest.raises(click.UsageError, match="--state-dir is of `pomona up` on this machine, and -n team of a clu"):
        choose_instance(ClusterOptions(namespace="team"), tmp_path)


def test_folder_that_is_named_needs_an_instance(tmp_path: Path) -> None:
    with pytest.raises(click.ClickException, match=r"no `pomona up` runs in .*: start one by `pomona up`"):
        choose_instance(ClusterOptions(), tmp_path)


def test_socket_that_a_dead_process_left_is_no_instance(tmp_path: Path) -> None:
    assert find_instance(tmp_path / "absent") is None
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / UP_SOCKET))
    assert find_instance(tmp_path) is None


def test_agent_that_has_taken_the_engines_over_is_named(tmp_path: Path) -> None:
    with answer_with(tmp_path / "agent.sock", b""), pytest.raises(click.ClickException, match="see `pomona agent sta"):
        require_instance(tmp_path)


def test_process_of_another_user_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owned_control_client, "unix_peer_uid", lambda _: 54321)
    with (
        answer_with(tmp_path / UP_SOCKET, answer(status())) as received,
        pytest.raises(click.ClickException, match="of uid 54321 answers at"),
    ):
        find_instance(tmp_path)
    assert received == [b""], "nothing was sent to it"


def test_folder_of_another_user_is_named_with_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path) -> bool:
        raise PermissionError

    monkeypatch.setattr(Path, "exists", refuse)
    with pytest.raises(click.ClickException, match=r"is another user's: run this command as its owner or with sudo"):
        find_instance(tmp_path)


def test_process_that_answers_something_else_is_named(tmp_path: Path) -> None:
    with (
        answer_with(tmp_path / UP_SOCKET, answer(service("one"))),
        pytest.raises(click.ClickException, match="is of another version"),
    ):
        find_instance(tmp_path)


def test_missing_service_is_reported_with_what_was_meant() -> None:
    assert describe_missing_service("chta", ["chat", "code"]) == "no service chta here: did you mean chat?"
    assert describe_missing_service("x", ["chat", "code"]) == "no service x here; there are: chat, code"
    assert describe_missing_service("x" * 999, []) == f"no service {'x' * 80} here; there are: none"


def test_user_without_a_cluster_is_told_of_both_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "default_state_folder", lambda: tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "absent"))
    for words in (("list",), ("status", "one"), ("logs", "one"), ("chat", "one", "Hi")):
        ended = CliRunner().invoke(main, words)
        assert ended.exit_code == 1
        assert "absent: no such file" in ended.output
        assert "no `pomona up` runs on this machine either: start one by `pomona up`" in ended.output


def test_names_complete_from_the_running_instance(tmp_path: Path) -> None:
    with answer_with(tmp_path / UP_SOCKET, answer(status(service("one"), service("other"), service("two")))):
        for command in ("unload", "status", "logs"):
            assert complete(command, f"--state-dir={tmp_path}", "o") == ["one", "other"]
