"""The whole doctor on this machine, and its output."""

import base64
import errno
import json
import sys
import time
from collections.abc import Sequence
from email.utils import formatdate
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import RawTestServer
from click.testing import CliRunner

from cli import log
from cli.agent import doctor
from devices.facts import HostFacts
from devices.mac_settings import MacSettings
from devices.metal import Metal
from kube.credentials import Credentials, StaticToken
from kube.errors import Forbidden, NotFound, Unauthorized
from launchd.service_manager import ServiceState
from metal_agent.cluster.host_identity import advise_rejoin
from metal_agent.control.agent_client import AgentClient
from metal_agent.control.agent_status import AgentStatus, ConnectionStatus
from metal_agent.doctor import engines, run
from metal_agent.doctor.cluster import TokenTimes
from metal_agent.doctor.engines import InstalledEngine
from metal_agent.doctor.finding import Finding, FindingVerdict
from metal_agent.doctor.run import CheckedHost
from tests.unit.cli.test_agent_service import status


@pytest.fixture(autouse=True)
def _no_programs_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "list_engines", lambda: [InstalledEngine("ollama", "", "0.12.3")])


async def test_unreachable_api_server_is_one_finding(tmp_path: Path) -> None:
    token = base64.urlsafe_b64encode(b'{"iat": 1, "exp": 2}').decode().rstrip("=")
    credentials = Credentials("http://127.0.0.1:1", StaticToken(f"head.{token}.sign"))
    findings = await run.run_doctor(CheckedHost(tmp_path / "absent", "studio-1", credentials), tmp_path)
    assert [finding.name for finding in findings] == ["service", "memory", "disk", "engine ollama", "API server"]
    assert findings[-1].verdict == "problem"


async def test_connection_of_the_running_agent_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(_client: AgentClient) -> AgentStatus:
        return status(connection=ConnectionStatus("unreachable", "2026-11-23T12:00:00Z", "No route to host"))

    monkeypatch.setattr(AgentClient, "status", answer)
    findings = {finding.name: finding for finding in await run.run_doctor(CheckedHost(tmp_path), tmp_path)}
    assert (findings["service"].verdict, findings["agent's connection"].verdict) == ("warning", "problem")


@pytest.mark.parametrize("gone", ["pomona", "python3", None])
async def test_program_and_python_of_the_service_must_be_there(tmp_path: Path, gone: str | None) -> None:
    """Homebrew takes away the Python of an environment when it upgrades; an environment may be deleted as a whole."""
    for name in {"pomona", "python3"} - {gone}:
        (tmp_path / name).touch()
    state = ServiceState("launchd", "system/x", "/x.plist", "starting")
    checked = CheckedHost(tmp_path, service=state, program=str(tmp_path / "pomona"))
    found = next(finding for finding in await run.run_doctor(checked, tmp_path) if finding.name == "service")
    assert ("which does not exist" in found.found) == (gone is not None)
    assert gone is None or str(tmp_path / gone) in found.found


async def test_mac_is_asked_for_settings_gpu_and_its_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check_llama(_folder: Path) -> list[Finding]:
        return [Finding("llama.cpp's device", "problem", "(none)", "expected: the GPU")]

    settings = MacSettings(10, restarts=False, firewall_state=2, file_vault=True)
    monkeypatch.setattr(engines, "check_llama", check_llama)
    monkeypatch.setattr("devices.mac_settings.read", lambda: settings)
    monkeypatch.setattr("devices.metal.read", Metal)
    monkeypatch.setattr("devices.host.read", HostFacts)
    monkeypatch.setattr(sys, "platform", "darwin")
    verdicts = {finding.name: finding.verdict for finding in await run.run_doctor(CheckedHost(tmp_path), tmp_path)}
    problems = dict.fromkeys(("Metal", "memory", "firewall", "llama.cpp's device"), "problem")
    warnings = dict.fromkeys(("sleep", "start without a login", "start after a power cut"), "warning")
    assert verdicts | problems | warnings == verdicts


async def test_service_of_the_user_is_asked_for_its_logout(tmp_path: Path) -> None:
    findings = await run.run_doctor(CheckedHost(tmp_path, starts_at_login=True), tmp_path)
    assert "start without a login" in {finding.name for finding in findings}


async def test_refused_connection_is_named_as_such() -> None:
    answer = await run.ask_api_server(Credentials("http://127.0.0.1:1", StaticToken(None)))
    assert answer.error is not None
    assert (answer.error.errno, "Connection refused" in str(answer.error)) == (errno.ECONNREFUSED, True)


async def test_clock_of_the_api_server_is_read_from_its_refusal() -> None:
    async def refuse(_request: web.BaseRequest) -> web.Response:
        return web.Response(status=401, headers={"Date": formatdate(time.time() - 3600, usegmt=True)})

    async with RawTestServer(refuse) as server:
        answer = await run.ask_api_server(Credentials(str(server.make_url("")).rstrip("/"), StaticToken(None)))
    assert answer.error is None
    assert answer.skew_seconds is not None
    assert -3660 < answer.skew_seconds < -3540


async def test_check_that_raises_is_finding_and_stops_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def break_list() -> list[InstalledEngine]:
        raise OSError("no such thing")

    async def break_check(_: Path) -> list[Finding]:
        raise OSError("no such thing")

    async def pass_check(_: Path) -> list[Finding]:
        return [Finding("c", "ok", "1")]

    monkeypatch.setattr(engines, "list_engines", break_list)
    monkeypatch.setattr(engines, "check_llama", pass_check)
    monkeypatch.setattr(run, "_DEEP_CHECKS", (("b", break_check), ("c", pass_check)))
    findings = {finding.name: finding for finding in await run.run_doctor(CheckedHost(tmp_path), tmp_path, deep=True)}
    assert findings["engines"] == Finding("engines", "unknown", "the check failed: OSError: no such thing")
    assert findings["b"] == Finding("b", "problem", "the check failed: OSError: no such thing")
    assert findings["c"].verdict == "ok"
    assert findings["disk"].verdict in {"ok", "warning"}
    assert findings["cluster"].verdict == "unknown"


@pytest.mark.parametrize(
    ("header", "times"),
    [
        ("Bearer a.eyJpYXQiOiAxMCwgImV4cCI6IDIwfQ.c", TokenTimes(10, 20)),
        ("Bearer a.bm90IGpzb24.c", None),
        ("Bearer a.!!!.c", None),
        ("Bearer opaque", None),
        (None, None),
    ],
)
def test_times_of_a_token_are_read_without_its_key(header: str | None, times: TokenTimes | None) -> None:
    assert run.read_token_times(header) == times


def test_refusals_name_the_way_back() -> None:
    refusals = [Unauthorized("get", status=401), Forbidden("get", status=403), NotFound("get", status=404)]
    findings = [run.explain_refusal("studio-1", refusal) for refusal in refusals]
    assert {finding.verdict for finding in findings} == {"problem"}
    assert [finding.fix == advise_rejoin("studio-1") for finding in findings] == [True, True, False]


@pytest.mark.parametrize(("verdict", "code"), [("ok", 0), ("unknown", 0), ("warning", 0), ("problem", 1)])
def test_exit_code_is_one_if_there_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, verdict: FindingVerdict, code: int
) -> None:
    async def find(_checked: CheckedHost, _folder: Path, *, deep: bool) -> Sequence[Finding]:
        assert not deep
        return [Finding("sleep", verdict, "this Mac sleeps", "sudo pmset -a sleep 0")]

    monkeypatch.setattr(doctor, "run_doctor", find)
    monkeypatch.setattr(log, "configure", lambda **_: None)
    result = CliRunner().invoke(doctor.command, ["--state-dir", str(tmp_path)])
    assert result.exit_code == code
    assert f"{verdict:<10}sleep: this Mac sleeps" in result.output
    assert ("-> sudo pmset -a sleep 0" in result.output) == (verdict != "ok")
    assert (
        json.loads(CliRunner().invoke(doctor.command, ["--output=json", "--state-dir", str(tmp_path)]).output)[0]["fix"]
        == "sudo pmset -a sleep 0"
    )


def test_findings_fit_80_columns() -> None:
    long = Finding("reached by the cluster", "problem", "no answer " * 30, "start the agent with --address " * 5)
    assert max(map(len, doctor.format_findings([long], 80).splitlines())) <= 80


def test_kubeconfig_needs_the_name_of_the_host(tmp_path: Path) -> None:
    result = CliRunner().invoke(doctor.command, ["--kubeconfig", str(tmp_path / "config")])
    assert result.exit_code == 2
    assert "--name" in result.output


def test_credentials_that_cannot_be_read_are_a_finding_beside_the_others(tmp_path: Path) -> None:
    words = ["--name=a", f"--kubeconfig={tmp_path}/none", f"--state-dir={tmp_path}", "--output=json"]
    result = CliRunner().invoke(doctor.command, words)
    findings = {load["name"]: load for load in json.loads(result.output)}
    assert (result.exit_code, findings["credentials"]["verdict"]) == (1, "problem")
    assert "none: no such file" in findings["credentials"]["found"]
    assert {"disk", "memory"} <= findings.keys()
