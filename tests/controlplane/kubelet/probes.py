"""Startup, readiness and liveness probes: thresholds as a pure function, and the requests to a container."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import aiohttp

from tests.controlplane.kubelet.containers import Container

Obj = dict[str, Any]
USER_AGENT = "kube-probe/1.35"


@dataclass(frozen=True)
class Probe:
    """A probe's timing, in seconds and counts, with the API's defaults."""

    initial_delay_seconds: float
    period_seconds: float
    timeout_seconds: float
    success_threshold: int
    failure_threshold: int

    @classmethod
    def of(cls, spec: Obj) -> Probe:
        """Read the timing of a probe's spec."""
        return cls(
            initial_delay_seconds=spec.get("initialDelaySeconds") or 0,
            period_seconds=spec.get("periodSeconds") or 10,
            timeout_seconds=spec.get("timeoutSeconds") or 1,
            success_threshold=spec.get("successThreshold") or 1,
            failure_threshold=spec.get("failureThreshold") or 3,
        )


@dataclass(frozen=True)
class Streak:
    """The current series of equal results of a probe."""

    ok: bool = False
    length: int = 0


def step(probe: Probe, streak: Streak, *, ok: bool) -> tuple[Streak, bool | None]:
    """Count one result; the verdict is None until as many equal results in a row as the threshold demands."""
    streak = replace(streak, length=streak.length + 1) if streak.ok == ok else Streak(ok=ok, length=1)
    threshold = probe.success_threshold if ok else probe.failure_threshold
    return streak, ok if streak.length >= threshold else None


def port_number(port: int | str, container: Obj) -> int:
    """Return a probe's port number; ValueError if it is a name that the container does not have."""
    if isinstance(port, int):
        return port
    for entry in container.get("ports", []):
        if entry.get("name") == port:
            return int(entry["containerPort"])
    raise ValueError(f"container {container['name']} has no port named {port!r}")


async def ask(
    spec: Obj, container: Obj, process: Container, pod_ip: str, session: aiohttp.ClientSession
) -> tuple[bool, str]:
    """Run a probe once; return whether it succeeded, and the message of a failure."""
    timeout = Probe.of(spec).timeout_seconds
    try:
        if "exec" in spec:
            code = await process.execute(spec["exec"]["command"], timeout)
            return code == 0, f"command {spec['exec']['command']!r} exited with {code}"
        if "tcpSocket" in spec:
            host = spec["tcpSocket"].get("host") or pod_ip
            await _connect(host, port_number(spec["tcpSocket"]["port"], container), timeout)
            return True, ""
        return await _http(spec["httpGet"], container, pod_ip, session, timeout)
    except TimeoutError:
        return False, f"no answer within {timeout} s"
    except (OSError, ValueError, aiohttp.ClientError) as error:
        return False, str(error)


async def verdicts(
    spec: Obj, container: Obj, process: Container, pod_ip: str, session: aiohttp.ClientSession
) -> AsyncGenerator[tuple[bool, str], None]:
    """Run a probe for ever; yield (healthy, reason if not) for each result that reaches its threshold."""
    probe, streak = Probe.of(spec), Streak()
    await asyncio.sleep(probe.initial_delay_seconds)
    clock = asyncio.get_running_loop().time
    while True:
        began = clock()
        ok, why = await ask(spec, container, process, pod_ip, session)
        streak, verdict = step(probe, streak, ok=ok)
        if verdict is not None:
            yield verdict, why
        await asyncio.sleep(max(0.0, began + probe.period_seconds - clock()))


async def _connect(host: str, port: int, timeout_seconds: float) -> None:
    async with asyncio.timeout(timeout_seconds):
        _, writer = await asyncio.open_connection(host, port)
    writer.close()


async def _http(
    action: Obj, container: Obj, pod_ip: str, session: aiohttp.ClientSession, timeout_seconds: float
) -> tuple[bool, str]:
    port = port_number(action["port"], container)
    path = "/" + action.get("path", "/").lstrip("/")
    url = f"{action.get('scheme', 'HTTP').lower()}://{action.get('host') or pod_ip}:{port}{path}"
    headers: Mapping[str, str] = {item["name"]: item["value"] for item in action.get("httpHeaders", [])}
    async with session.get(
        url,
        headers={"User-Agent": USER_AGENT, **headers},
        allow_redirects=False,
        timeout=aiohttp.ClientTimeout(total=timeout_seconds),
    ) as response:
        return 200 <= response.status < 400, f"GET {url}: status {response.status}"


def session() -> aiohttp.ClientSession:
    """Return a session for probes: as in a kubelet, each request opens a connection and verifies no certificate."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=False, force_close=True, limit=0))
