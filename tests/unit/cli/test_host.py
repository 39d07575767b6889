"""`pomona host` and `pomona agent join` say in one line what is wrong with what they were given."""

import socket
from pathlib import Path

import msgspec
import pytest
import yaml
from click.testing import CliRunner

from artifacts import durable
from cli.cluster_options import ClusterOptions
from cli.host.membership import describe_removal, warn_of_bound_processes
from cli.host.scheduling import apply_changes, parse_change
from cli.main import main
from crds.metalhost import HostTaint
from metal_agent.cluster.host_identity import JoinedHost, write_joined_host
from metal_agent.exit_codes import PERMANENT
from tests.support.api_objects import process


def kubeconfig(folder: Path, server: str) -> str:
    config = {
        "current-context": "a",
        "contexts": [{"name": "a", "context": {"cluster": "a", "user": "a"}}],
        "clusters": [{"name": "a", "cluster": {"server": server}}],
        "users": [{"name": "a", "user": {"token": "hunter2"}}],
    }
    path = folder / "config"
    path.write_text(yaml.safe_dump(config))
    return f"--kubeconfig={path}"


def fail(*arguments: str, text: str | None = None) -> str:
    result = CliRunner().invoke(main, [*arguments], input=text)
    assert result.exit_code in {1, 2, PERMANENT}, result.output
    assert "Traceback" not in result.output
    return " ".join(result.output.split())


def test_loopback_address_of_a_kubeconfig_needs_another(tmp_path: Path) -> None:
    said = fail("host", "join", "studio-1", kubeconfig(tmp_path, "https://127.0.0.1:6443"))
    assert "leads to this machine only: give the one that the host reaches by --server" in said


def test_name_of_a_host_is_checked(tmp_path: Path) -> None:
    config = kubeconfig(tmp_path, "https://192.0.2.1")
    assert "'Studio.1' cannot be the name of a host" in fail("host", "join", "Studio.1", config)
    assert "'Studio.1' cannot be the name of a host" in fail("host", "remove", "Studio.1", config)


def test_api_server_that_does_not_answer_is_said(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        config = kubeconfig(tmp_path, f"https://127.0.0.1:{unused.getsockname()[1]}")
        assert "does not answer" in fail("host", "remove", "studio-1", config)
    assert "no entry named 'b'" in fail("host", "remove", "studio-1", config, "--context=b")


def test_foreign_text_is_no_code(tmp_path: Path) -> None:
    assert "this is no join code" in fail("agent", "join", "hello", f"--state-dir={tmp_path}")
    assert "cut off or damaged" in fail("agent", "join", "-", f"--state-dir={tmp_path}", text="pomona-join-2.eNqrV\n")


def test_agent_of_a_joined_machine_takes_no_other_name(tmp_path: Path) -> None:
    write_joined_host(tmp_path, JoinedHost("studio-1", "https://192.0.2.1", "t", "2026-11-23T00:00:00Z"))
    said = fail("agent", "--name=studio-2", f"--state-dir={tmp_path}")
    assert "this machine has joined as host studio-1: leave --name studio-2 out, join as studio-2" in said


def test_identity_that_is_damaged_is_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBECONFIG", raising=False)
    durable.write(tmp_path / "host-identity.json", "studio-1")
    assert "run `pomona agent join CODE`" in fail("agent", f"--state-dir={tmp_path}")


def test_processes_that_a_removed_host_still_has_are_named() -> None:
    left = [process("a-b-0", host="studio-1"), process("a-b-1", host="studio-1")]
    said = warn_of_bound_processes("studio-1", left)
    assert said.startswith("processes of team/chat are still bound to studio-1, since the")


def test_processes_of_a_host_are_named_before_it_is_removed() -> None:
    bound = [{"metadata": {"namespace": "team", "name": f"chat-{number:02}"}} for number in range(12)]
    said = describe_removal("studio-1", bound, ClusterOptions(context="lab"))
    assert said.startswith("host studio-1 has 12 processes: team/chat-00, ")
    assert "team/chat-09 and 2 more" in said
    assert said.endswith("drain the host: pomona host drain studio-1 --context lab")
    assert describe_removal("studio-1", bound[:1], ClusterOptions()).startswith(
        "host studio-1 has 1 process: team/chat-00\n"
    )


@pytest.mark.parametrize(
    "text", ["dedicated", "dedicated=a", "dedicated:Never", "=a:NoSchedule", ":NoSchedule", "-", ""]
)
def test_text_that_is_no_taint_is_refused_with_the_form(text: str) -> None:
    assert "is no taint: write KEY=VALUE:EFFECT" in fail("host", "taint", "studio-1", "--", text)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (["b=2:NoSchedule"], ["a=1:NoSchedule", "a:NoExecute", "b=2:NoSchedule"]),
        (["a=2:NoSchedule"], ["a=2:NoSchedule", "a:NoExecute"]),
        (["a-"], []),
        (["a:NoExecute-"], ["a=1:NoSchedule"]),
        (["a=1:NoSchedule-", "example.com/b:NoExecute"], ["a:NoExecute", "example.com/b:NoExecute"]),
        (["c-"], ["a=1:NoSchedule", "a:NoExecute"]),
    ],
)
def test_taints_are_set_and_removed(changes: list[str], expected: list[str]) -> None:
    taints = [{"key": "a", "value": "1", "effect": "NoSchedule"}, {"key": "a", "effect": "NoExecute"}]
    changed = apply_changes(taints, map(parse_change, changes))
    assert [msgspec.convert(taint, HostTaint).text for taint in changed] == expected
