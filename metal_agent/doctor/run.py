"""Run all checks of the doctor; a check that fails is a finding, and stops no other check."""

import asyncio
import base64
import binascii
import contextlib
import functools
import os
import pwd
import shutil
import sys
import time
from collections.abc import Awaitable, Callable
from email.utils import parsedate_to_datetime
from importlib.metadata import version
from pathlib import Path
from typing import Final, NamedTuple

import aiohttp
import msgspec
import psutil

from crds.metalhost import MetalHost
from devices import host, mac_settings, metal
from gateway.http.control_client import ControlUnreachableError
from kube.client import connect
from kube.credentials import Credentials
from kube.errors import ApiError, Forbidden, NotFound, Unauthorized, Unreachable
from kube.kubeconfig import CredentialsError
from kube.resources import METAL_HOSTS
from kube.transport import describe_failure
from launchd.service_definition import PROGRAM
from launchd.service_manager import ServiceState
from metal_agent.cluster.host_identity import advise_rejoin
from metal_agent.control.agent_client import AgentClient
from metal_agent.control.agent_status import AgentStatus
from metal_agent.doctor import cluster, engines, fact_checks, machine, process_checks
from metal_agent.doctor.cluster import ApiServerAnswer, TokenTimes
from metal_agent.doctor.finding import Finding, FindingVerdict
from metal_agent.exit_codes import AgentExit, load_exit

_ASK_SECONDS: Final = 10.0
_CHECK_SECONDS: Final = 60.0
Check = Callable[[], Awaitable[list[Finding]]]
_DEEP_CHECKS: Final[tuple[tuple[str, Callable[[Path], Awaitable[list[Finding]]]], ...]] = (
    ("facts", lambda _: asyncio.to_thread(fact_checks.check_facts)),
    ("adoption", process_checks.check_adopted_server),
    *((("Metal's memory", process_checks.check_metal_memory),) if sys.platform == "darwin" else ()),
    ("exit", process_checks.check_killed_child),
)


class CheckedHost(NamedTuple):
    """The host to check; without credentials it has joined no cluster."""

    folder: Path
    """Its state folder, which need not exist."""
    name: str | None = None
    """The name of its MetalHost."""
    credentials: Credentials | None = None
    service: ServiceState | None = None
    """The service manager's view of the agent; None if it is not installed."""
    starts_at_login: bool = False
    """The service is the user's own, which starts when that user logs in."""
    program: str | None = None
    """The program of the service."""
    is_outdated: bool = False
    """This version would write another definition of the service."""
    problem: str = ""
    """Why its credentials cannot be read."""


async def run_doctor(checked: CheckedHost, work_folder: Path, *, deep: bool = False) -> list[Finding]:
    """Run all checks; takes some seconds, and writes only into `work_folder`, an empty folder.

    Args:
        checked: the host.
        work_folder: as a real and short path, since a socket is made in it.
        deep: check the tools, processes, sockets and memory of this machine, too; this takes 256 MiB for a moment.
    """
    # First, as the check of the firewall depends on it.
    in_cluster = await _run_check("cluster", lambda: _check_cluster(checked))
    is_reached = any(finding.name == cluster.REACHED and finding.verdict == "ok" for finding in in_cluster)

    checks: list[tuple[str, Check]] = [
        ("service", lambda: _check_service(checked)),
        ("machine", lambda: asyncio.to_thread(_check_machine, checked, is_reached=is_reached)),
        ("engines", lambda: asyncio.to_thread(lambda: engines.check_engines(engines.list_engines()))),
    ]
    if deep or sys.platform == "darwin":
        checks.append(("llama.cpp", lambda: engines.check_llama(work_folder)))

    gathered = await asyncio.gather(*(_run_check(name, check) for name, check in checks))
    findings = [*(finding for findings in gathered for finding in findings), *in_cluster]

    # One after the other: they measure times and memory. An error in one of them is a problem of this machine.
    for name, deep_check in _DEEP_CHECKS if deep else ():
        findings += await _run_check(name, functools.partial(deep_check, work_folder), verdict="problem")
    return findings


async def _run_check(name: str, check: Check, verdict: FindingVerdict = "unknown") -> list[Finding]:
    """Return the findings of one check; if it fails or takes too long, one finding with `verdict` says so."""
    try:
        async with asyncio.timeout(_CHECK_SECONDS):
            return await check()
    except Exception as error:  # noqa: BLE001 - any error is a result
        return [Finding(name, verdict, f"the check failed: {type(error).__name__}: {error}")]


def check_service(
    state: ServiceState | None,
    agent: AgentStatus | None,
    ended: AgentExit | None,
    missing: str | None,
    *,
    is_outdated: bool = False,
) -> Finding:
    """Check that the agent runs and starts again by itself.

    Args:
        state: the service manager's view; None if the agent is not installed.
        agent: the status of the running agent; None if no agent answers.
        ended: how the last agent ended, if it wrote that.
        missing: the program of the service, or its Python, if it does not exist any more.
        is_outdated: this version would write another definition of the service.
    """
    name = "service"
    if state is None:
        detail = f"an agent runs as process {agent.pid}, and ends with its terminal" if agent else "no agent runs"
        return Finding(name, "warning" if agent else "problem", detail, f"sudo {PROGRAM} agent install")

    # The service is installed.
    if missing:
        fix = "install Pomona again, then the agent with its options: pomona agent install"
        return Finding(name, "problem", f"{state.job} starts {missing}, which does not exist", fix)
    if agent is None:
        reason = f": {ended.message}" if ended else ""
        fix = "fix that, then run: pomona agent restart" if ended else "pomona agent logs"
        return Finding(name, "problem", f"{state.job} is {state.phase}, and no agent answers{reason}", fix)

    # An agent answers.
    if state.pid is not None and state.pid != agent.pid:
        detail = f"{state.job} has process {state.pid}, and process {agent.pid} serves"
        return Finding(name, "problem", detail, f"end process {agent.pid}: its engines go on")
    if is_outdated:
        detail = f"{state.definition} was written by another version of Pomona"
        return Finding(name, "warning", detail, "pomona agent restart")
    return Finding(name, "ok", f"{state.job} runs as process {agent.pid}")


async def _check_service(checked: CheckedHost) -> list[Finding]:
    """Check the service and the connection of its agent; no findings on a machine that serves alone.

    If no agent answers, the finding says how the last one ended, and whether the program of the service is missing.
    """
    try:
        agent = await AgentClient(checked.folder).status()
    except ControlUnreachableError:
        agent = None  # no agent answers
    if agent is None and checked.service is None and checked.credentials is None:
        return []  # a machine that serves alone, by `pomona up`, needs no agent

    # Why does none answer? `ended` is what the last agent wrote of its end; None if it wrote nothing, or one runs.
    ended = None
    with contextlib.suppress(OSError):  # a note that cannot be read is like none
        ended = None if agent else load_exit(checked.folder)
    # The program is a script of an environment, beside the Python that runs it.
    needed_files = (Path(checked.program), Path(checked.program).with_name("python3")) if checked.program else ()
    missing = next((str(path) for path in needed_files if not path.exists()), None)

    findings = [check_service(checked.service, agent, ended, missing, is_outdated=checked.is_outdated)]
    return [*findings, cluster.check_connection(agent.connection, sys.platform)] if agent else findings


def _check_machine(checked: CheckedHost, *, is_reached: bool) -> list[Finding]:
    """Check memory, disk and settings of this machine."""
    folder, starts_at_login = checked.folder, checked.starts_at_login
    nearest_existing = next(path for path in (folder, *folder.parents) if path.exists())
    free_bytes = shutil.disk_usage(nearest_existing).free
    findings = [machine.check_memory(host.read()), machine.check_disk(str(folder), free_bytes)]
    if sys.platform == "darwin":
        # Not sys.executable: the firewall knows the file that runs, which several links and a launcher may stand for.
        python, settings = psutil.Process().exe(), mac_settings.read()
        findings.append(machine.check_metal(metal.read()))
        findings += machine.check_settings(settings, python, starts_at_login=starts_at_login, is_reached=is_reached)
    elif starts_at_login:
        findings.append(machine.check_linger(pwd.getpwuid(os.geteuid()).pw_name))
    return findings


async def _check_cluster(checked: CheckedHost) -> list[Finding]:
    """Check credentials, API server, token, address and what the controller says of this host, in this order.

    The checks end with the first one without which the next ones cannot be made.
    """
    credentials, name = checked.credentials, checked.name or ""
    if checked.problem:
        fix = f"fix that, or {advise_rejoin(name or 'NAME')}"
        return [Finding("credentials", "problem", checked.problem, fix)]
    if credentials is None:
        return [Finding("cluster", "unknown", "this host has joined none; `pomona up` needs none")]

    answer = await ask_api_server(credentials)
    findings = cluster.check_api_server(answer, sys.platform)
    if answer.error is not None:
        return findings

    try:
        times = read_token_times(await credentials.authorization())
        findings.append(cluster.check_token(times, time.time(), name))
        async with connect(credentials) as client:
            metal_host = await client.get(METAL_HOSTS, name)
        status = msgspec.convert(metal_host, MetalHost).status
    except (ApiError, Unreachable, CredentialsError) as error:
        return [*findings, explain_refusal(name, error)]

    # The interface of each address of this machine.
    interfaces = {
        address.address.partition("%")[0]: interface
        for interface, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family.name in {"AF_INET", "AF_INET6"}
    }
    findings.append(cluster.check_address(status.address, interfaces))
    return [*findings, *cluster.check_host(status, version("pomona"))]


def explain_refusal(name: str, error: Exception) -> Finding:
    """Return the finding of a MetalHost that could not be read."""
    rejoin = advise_rejoin(name)
    match error:
        case Unauthorized():
            return Finding("identity", "problem", "the API server refuses the token of this host", rejoin)
        case Forbidden():
            return Finding("identity", "problem", f"host {name} has no rights any more: it was removed", rejoin)
        case NotFound():
            fix = f"start the agent: sudo {PROGRAM} agent install"
            return Finding("registered", "problem", f"there is no MetalHost {name}", fix)
        case _:
            return Finding("identity", "unknown", str(error))


async def ask_api_server(credentials: Credentials) -> ApiServerAnswer:
    """Ask the API server for its version, and return the error or by how much our clock differs from the server's.

    The request has no token: even the answer that refuses it has a date.
    """
    began = time.time()
    connector = aiohttp.TCPConnector(ssl=credentials.tls or True)
    timeout = aiohttp.ClientTimeout(total=_ASK_SECONDS)

    try:
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=False) as session,
            session.get(
                f"{credentials.server}/version",
                proxy=credentials.proxy,
                server_hostname=credentials.tls_server_name,
                allow_redirects=False,
            ) as response,
        ):
            date = response.headers.get("Date")
    except OSError as error:
        return ApiServerAnswer(credentials.server, error=OSError(error.errno, describe_failure(error)))
    except aiohttp.ClientError as error:
        return ApiServerAnswer(credentials.server, error=OSError(describe_failure(error)))

    # The server has written its date about half-way between question and answer.
    middle = (began + time.time()) / 2
    # An HTTP date has whole seconds, so on average half of one has passed.
    skew = parsedate_to_datetime(date).timestamp() + 0.5 - middle if date else None
    return ApiServerAnswer(credentials.server, skew_seconds=skew)


def read_token_times(authorization: str | None) -> TokenTimes | None:
    """Return the times of a ServiceAccount's token, unverified; None if it is no such token."""
    parts = (authorization or "").removeprefix("Bearer ").split(".")
    if len(parts) != 3:  # noqa: PLR2004 - head, payload and signature of a JWT
        return None
    try:
        padded = parts[1] + "=="  # a JWT has no padding, and the decoder takes more than it needs
        return msgspec.json.decode(base64.urlsafe_b64decode(padded), type=TokenTimes)
    except (binascii.Error, msgspec.DecodeError):
        return None
