"""Promises of the documentation about probes: defaults, thresholds, ports by name, conditions of success."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from tests.controlplane.kubelet import probes
from tests.controlplane.kubelet.containers import Container
from tests.controlplane.kubelet.probes import Probe, Streak, ask, port_number, step

NO_PROCESS = cast("Container", None)  # network probes do not use the process


def test_defaults_of_a_probe() -> None:
    assert Probe.of({}) == Probe(0, 10, 1, 1, 3)


def verdicts(probe: Probe, results: list[bool]) -> list[bool | None]:
    streak, outcomes = Streak(), []
    for ok in results:
        streak, verdict = step(probe, streak, ok=ok)
        outcomes.append(verdict)
    return outcomes


def test_thresholds_count_results_in_a_row() -> None:
    probe = Probe.of({"failureThreshold": 2, "successThreshold": 2})
    assert verdicts(probe, [True, True, False, True, False, False]) == [None, True, None, None, None, False]


@given(st.lists(st.booleans()), st.integers(1, 4), st.integers(1, 4))
def test_verdict_needs_as_many_equal_results_as_the_threshold(results: list[bool], success: int, failure: int) -> None:
    probe = Probe.of({"successThreshold": success, "failureThreshold": failure})
    for end, verdict in enumerate(verdicts(probe, results), start=1):
        last = results[end - 1]
        threshold = success if last else failure
        alike = end >= threshold and all(ok is last for ok in results[end - threshold : end])
        assert verdict is (last if alike else None)


def test_port_is_found_by_name() -> None:
    container = {"name": "c", "ports": [{"name": "http", "containerPort": 8080}]}
    assert (port_number("http", container), port_number(9, container)) == (8080, 9)
    with pytest.raises(ValueError, match="no port named 'nope'"):
        port_number("nope", container)


@pytest_asyncio.fixture
async def server() -> AsyncIterator[int]:
    async def answer(request: web.Request) -> web.Response:
        if request.match_info["what"] == "slow":
            await asyncio.Event().wait()
        if request.match_info["what"] == "header":
            return web.Response(status=200 if request.headers.get("X-Key") == "1" else 500)
        return web.Response(status=int(request.match_info["what"]), headers={"Location": "/500"})

    app = web.Application()
    app.router.add_get("/{what}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield runner.addresses[0][1]
    await runner.cleanup()


@pytest_asyncio.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with probes.session() as session:
        yield session


async def result(spec: dict[str, Any], session: aiohttp.ClientSession) -> bool:
    ok, why = await ask({"timeoutSeconds": 60, **spec}, {"name": "c"}, NO_PROCESS, "127.0.0.1", session)
    assert ok or why
    return ok


@pytest.mark.parametrize(("code", "healthy"), [(200, True), (302, True), (399, True), (404, False), (503, False)])
async def test_http_status_from_200_to_399_is_success(
    code: int, healthy: bool, server: int, session: aiohttp.ClientSession
) -> None:
    assert await result({"httpGet": {"port": server, "path": f"/{code}"}}, session) is healthy


async def test_http_headers_are_sent(server: int, session: aiohttp.ClientSession) -> None:
    action = {"port": server, "path": "header", "httpHeaders": [{"name": "X-Key", "value": "1"}]}
    assert await result({"httpGet": action}, session)


async def test_no_answer_in_time_is_a_failure(server: int, session: aiohttp.ClientSession) -> None:
    assert not await result({"httpGet": {"port": server, "path": "/slow"}, "timeoutSeconds": 0.1}, session)


async def test_a_tcp_socket_is_healthy_when_it_accepts(
    server: int, session: aiohttp.ClientSession, refused_port: int
) -> None:
    assert await result({"tcpSocket": {"port": server}}, session)
    assert not await result({"tcpSocket": {"port": refused_port}}, session)
