"""Each finding of the doctor: its verdict, and a way out where there is something to do."""

import errno
import os
import socket
import sys
from pathlib import Path
from unittest import mock

import msgspec
import pytest

from crds.meta import Condition
from crds.metalhost import MetalHostStatus
from devices.facts import HostFacts
from devices.mac_settings import MacSettings
from devices.metal import Metal
from launchd.service_definition import PROGRAM
from launchd.service_manager import ServiceState
from metal_agent.control.agent_status import AgentStatus, ConnectionStatus
from metal_agent.doctor import cluster, engines, machine
from metal_agent.doctor.cluster import ApiServerAnswer, TokenTimes
from metal_agent.doctor.engines import InstalledEngine
from metal_agent.doctor.finding import Finding
from metal_agent.doctor.run import check_service
from metal_agent.exit_codes import AgentExit
from runtimes.registry import RUNTIMES
from tests.support.api_objects import condition

GIB = 2**30
SERVER = "https://10.0.0.1:6443"
PYTHON = "/Users/ada/.local/share/uv/python/bin/python3.12"


def verdicts(findings: list[Finding]) -> dict[str, str]:
    """Return the verdicts by name; what is a warning or a problem has a way out."""
    for finding in findings:
        assert finding.found
        assert finding.fix or finding.verdict in {"ok", "unknown"}, finding
    return {finding.name: finding.verdict for finding in findings}


@pytest.mark.parametrize(
    ("finding", "verdict", "fix"),
    [
        (machine.check_metal(Metal()), "problem", "processor"),
        (machine.check_metal(Metal("Apple M4 Max", 0)), "problem", "processor"),
        (machine.check_metal(Metal("Apple M4 Max", 96 * GIB)), "ok", ""),
        (machine.check_memory(HostFacts()), "problem", "--memory-budget"),
        (machine.check_disk("/weights", machine.LEAST_DISK_BYTES), "ok", ""),
        (machine.check_disk("/weights", machine.LEAST_DISK_BYTES - 1), "warning", "pomona weights delete"),
        *(
            (cluster.check_token(TokenTimes(0, 100), now, "studio-1"), verdict, fix)
            for now, verdict, fix in (
                (10, "ok", ""),
                (74, "ok", ""),
                (76, "warning", "agent status"),
                (100, "problem", "host join studio-1"),
            )
        ),
    ],
)
def test_finding_has_a_verdict_and_a_way_out(finding: Finding, verdict: str, fix: str) -> None:
    assert verdicts([finding]) == {finding.name: verdict}
    assert fix in finding.fix


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            MacSettings(0, restarts=True, firewall_state=0, file_vault=False),
            dict.fromkeys(("sleep", "firewall", "start without a login", "start after a power cut"), "ok"),
        ),
        (
            MacSettings(1, restarts=False, firewall_state=1, file_vault=True),
            dict.fromkeys(("sleep", "firewall", "start without a login", "start after a power cut"), "warning"),
        ),
        (
            MacSettings(0, firewall_state=2, file_vault=False),
            {"sleep": "ok", "firewall": "problem", "start without a login": "ok"},
        ),
        (MacSettings(), dict.fromkeys(("sleep", "firewall", "start without a login"), "unknown")),
    ],
)
def test_settings_that_stop_a_server_are_found(settings: MacSettings, expected: dict[str, str]) -> None:
    outcome = verdicts(machine.check_settings(settings, PYTHON, starts_at_login=False, is_reached=False))
    assert outcome == expected


@pytest.mark.parametrize(("is_reached", "verdict"), [(True, "ok"), (False, "warning")])
def test_firewall_that_lets_the_controller_through_is_fine(is_reached: bool, verdict: str) -> None:
    settings = MacSettings(0, firewall_state=1, file_vault=False)
    findings = machine.check_settings(settings, PYTHON, starts_at_login=False, is_reached=is_reached)
    assert verdicts(findings)["firewall"] == verdict


def test_way_through_the_firewall_is_a_command_unless_it_blocks_everything() -> None:
    on, blocks_all = (
        machine.check_settings(MacSettings(0, firewall_state=state), PYTHON, starts_at_login=False, is_reached=False)[1]
        for state in (1, 2)
    )
    assert f"--add {PYTHON} && " in on.fix
    assert PYTHON not in blocks_all.fix
    assert "Block all incoming connections" in blocks_all.fix


def test_agent_that_starts_at_login_does_not_start_after_a_power_cut() -> None:
    settings = MacSettings(0, firewall_state=0, file_vault=False)
    finding = machine.check_settings(settings, PYTHON, starts_at_login=True, is_reached=True)[-1]
    assert finding.verdict == "warning"
    assert f"sudo {PROGRAM} agent install" in finding.fix


def test_agent_that_ends_at_the_logout_is_a_warning_on_linux(tmp_path: Path) -> None:
    assert machine.check_linger("ada", tmp_path).fix == "sudo loginctl enable-linger ada"
    (tmp_path / "ada").touch()
    assert verdicts([machine.check_linger("ada", tmp_path)]) == {"start without a login": "ok"}


def nowhere(_path: str) -> bool:
    return False


def test_host_without_an_engine_is_told_how_to_install_one() -> None:
    (finding,) = engines.check_engines([], nowhere)
    assert finding.verdict == "problem"
    assert RUNTIMES["llama.cpp"].install_hint in finding.fix
    assert "pods only" not in finding.fix


@pytest.mark.parametrize(
    ("engine", "verdict", "fix"),
    [
        (
            InstalledEngine("llama.cpp", "/Users/ada/bin/llama-server", "6123"),
            "warning",
            "sudo ln -s /Users/ada/bin/llama-server /usr/local/bin/",
        ),
        (
            InstalledEngine("llama.cpp", "/usr/local/bin/llama-server", "6123", quarantined=True),
            "problem",
            "xattr -d com.apple.quarantine /",
        ),
        (InstalledEngine("mlx-lm", "/Users/ada/venv/bin/python3", ""), "warning", "install Pomona's extra mlx"),
        (InstalledEngine("mlx-lm", sys.executable, "0.32.2"), "ok", ""),
        (InstalledEngine("ollama", "", ""), "ok", ""),
    ],
)
def test_engine_that_a_service_cannot_start_has_a_way_out(engine: InstalledEngine, verdict: str, fix: str) -> None:
    (finding,) = engines.check_engines([engine], nowhere)
    assert verdicts([finding]) == {f"engine {engine.name}": verdict}
    assert fix in finding.fix
    assert "ln -s" not in finding.fix or "llama-server" in finding.fix, "a link to a Python finds no packages"
    there = {"/opt/homebrew/bin/llama-server"}
    if not engine.quarantined and "llama-server" in engine.program:
        assert verdicts(engines.check_engines([engine], there.__contains__)) == {"engine llama.cpp": "ok"}


@pytest.mark.parametrize(
    ("program", "version"), [("/Users/ada/bin/llama-server", "6123"), ("/Users/ada/venv/bin/python3", "")]
)
def test_engine_of_a_mac_is_asked_for_version_and_quarantine(
    monkeypatch: pytest.MonkeyPatch, program: str, version: str
) -> None:
    runtime = mock.Mock(**{"on_hosts": True, "installed.return_value": True, "launch.command.return_value": (program,)})
    monkeypatch.setattr(engines, "RUNTIMES", {"llama.cpp": runtime, "vllm": mock.Mock(on_hosts=False)})
    monkeypatch.setattr(engines, "output", lambda *_, **__: "version: 6123 (a1b2c3d)")
    monkeypatch.setattr("devices.mac_settings.is_quarantined", {program: True}.__getitem__)
    for platform in ("darwin", "linux"):
        monkeypatch.setattr(sys, "platform", platform)
        assert engines.list_engines() == [InstalledEngine("llama.cpp", program, version, platform == "darwin")]


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("version: 6123 (a1b2c3d)\nbuilt with clang\n", "6123"),
        ("ollama version is 0.12.3\n", "0.12.3"),
        ("usage: llama-server\n", ""),
    ],
)
def test_version_is_read_from_the_output(text: str, version: str) -> None:
    assert engines.parse_version(text) == version


@pytest.mark.parametrize(
    ("skew_seconds", "verdict"), [(0.4, "ok"), (-29, "ok"), (31, "warning"), (-31, "warning"), (301, "problem")]
)
def test_clock_is_compared_with_the_api_servers(skew_seconds: float, verdict: str) -> None:
    answer = ApiServerAnswer(SERVER, skew_seconds=skew_seconds)
    assert verdicts(cluster.check_api_server(answer, "darwin")) == {"API server": "ok", "clock": verdict}


def test_host_unreachable_on_a_mac_names_the_local_network() -> None:
    error = OSError(errno.EHOSTUNREACH, "No route to host")
    (on_mac,) = cluster.check_api_server(ApiServerAnswer(SERVER, error), "darwin")
    (on_linux,) = cluster.check_api_server(ApiServerAnswer(SERVER, error), "linux")
    assert on_mac.verdict == on_linux.verdict == "problem"
    assert "Local Network" in on_mac.fix
    assert "Local Network" not in on_linux.fix
    assert SERVER in on_mac.found


def test_agent_without_a_connection_is_a_problem_also_where_a_terminal_has_one() -> None:
    """macOS denies a LaunchAgent the local network, and allows it to the doctor in a terminal."""

    def check(state: str, message: str, system: str) -> Finding:
        finding = cluster.check_connection(ConnectionStatus(state, "2026-11-23T12:00:00Z", message), system)
        assert verdicts([finding]) == {"agent's connection": "ok" if state == "connected" else "problem"}
        assert message in finding.found + finding.fix
        return finding

    check("connected", "", "darwin")
    check("refused", "the token is not accepted (401): write a new one", "darwin")
    denied = f"cannot connect to 10.0.0.1:6443: {os.strerror(errno.EHOSTUNREACH)}"
    assert "Local Network" in check("unreachable", denied, "darwin").fix
    assert "Local Network" not in check("unreachable", denied, "linux").fix
    assert "Local Network" not in check("unreachable", "Connection refused", "darwin").fix


def test_address_of_a_tunnel_is_a_warning_if_there_is_another_one() -> None:
    interfaces = {"100.64.0.7": "utun3", "127.0.0.1": "lo0", "fe80::1": "en0"}
    assert cluster.check_address("100.64.0.7", interfaces).verdict == "ok"
    finding = cluster.check_address("100.64.0.7", interfaces | {"192.168.1.23": "en0"})
    assert finding.verdict == "warning"
    assert "192.168.1.23 of en0" in finding.fix
    assert cluster.check_address("192.168.1.23", {"192.168.1.23": "en0", "10.0.0.7": "en1"}).verdict == "ok"
    assert cluster.check_address("10.0.0.9", interfaces).verdict == "problem"


def host_status(agent: str, controller: str, **conditions: str) -> MetalHostStatus:
    converted = [msgspec.convert(condition(kind, status), Condition) for kind, status in conditions.items()]
    return MetalHostStatus(agent_version=agent, controller_version=controller, conditions=converted)


def test_conditions_of_the_controller_are_findings() -> None:
    status = host_status("1.2.0", "1.2.3", Ready="True", AddressAccepted="True", Reachable="False")
    findings = cluster.check_host(status, "1.2.0")
    assert {finding.name: finding.verdict for finding in findings} == {
        "registered": "ok",
        "address accepted": "ok",
        "reached by the cluster": "problem",
        "versions": "ok",
    }
    assert {finding.verdict for finding in cluster.check_host(host_status("", ""), "1.2.0")} == {"unknown"}


def test_versions_apart_are_a_warning() -> None:
    agent_behind = cluster.check_host(host_status("1.2.0", "1.3.0"), "1.3.0")[-1]
    assert agent_behind.verdict == "warning"
    assert "pomona agent restart" in agent_behind.fix
    assert cluster.check_host(host_status("1.2.0", "1.3.0"), "1.2.0")[-1].verdict == "warning"


def test_error_of_a_name_lookup_is_told() -> None:
    error = socket.gaierror(socket.EAI_NONAME, "nodename nor servname provided")
    (finding,) = cluster.check_api_server(ApiServerAnswer(SERVER, error), "darwin")
    assert "nodename nor servname" in finding.found


def service_state(phase: str = "running", pid: int | None = 7) -> ServiceState:
    return ServiceState("launchd", "system/dev.pomona.agent", "/Library/x.plist", phase, pid)  # type: ignore[arg-type]


def agent_status(pid: int = 7) -> AgentStatus:
    return AgentStatus(
        host="studio-1",
        version="1.2.0",
        pid=pid,
        started_at="2026-11-23T12:00:00Z",
        address="10.0.0.7",
        server=SERVER,
        connection=ConnectionStatus("connected", "2026-11-23T12:00:00Z"),
        ready=True,
        stopping=False,
        budget_bytes=GIB,
        available_bytes=GIB,
        processes=[],
    )


@pytest.mark.parametrize(
    ("state", "agent", "verdict", "fix"),
    [
        (service_state(), agent_status(), "ok", ""),
        (None, agent_status(), "warning", "agent install"),
        (None, None, "problem", "agent install"),
        (service_state("stopped", None), None, "problem", "agent restart"),
        (service_state(pid=8), agent_status(), "problem", "end process 7"),
    ],
)
def test_service_is_compared_with_the_agent_that_answers(
    state: ServiceState | None, agent: AgentStatus | None, verdict: str, fix: str
) -> None:
    finding = check_service(state, agent, AgentExit(78, "no kubeconfig", "2026-11-23T12:00:00Z"), None)
    assert verdicts([finding]) == {"service": verdict}
    assert fix in finding.fix
    assert ("no kubeconfig" in finding.found) == (state is not None and agent is None)


def test_definition_of_another_version_is_a_warning() -> None:
    finding = check_service(service_state(pid=agent_status().pid), agent_status(), None, None, is_outdated=True)
    assert verdicts([finding]) == {"service": "warning"}
    assert finding.fix == "pomona agent restart"


@pytest.mark.parametrize("agent", [agent_status(), None])
def test_program_of_the_service_that_is_gone_is_a_problem(agent: AgentStatus | None) -> None:
    finding = check_service(service_state(), agent, None, "/opt/homebrew/bin/python3")
    assert verdicts([finding]) == {"service": "problem"}
    assert "starts /opt/homebrew/bin/python3, which does not exist" in finding.found
    assert "agent install" in finding.fix
