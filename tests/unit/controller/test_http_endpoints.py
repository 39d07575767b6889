"""The ports of the controller: probes that notice a stuck event loop, and ports that are taken."""

import asyncio
import contextlib
import http.client
import socket
import threading
from contextlib import AbstractAsyncContextManager
from http import HTTPStatus

import pytest
from structlog.testing import capture_logs

from controller import http_endpoints
from controller.http_endpoints import (
    BEAT_SECONDS,
    STUCK_SECONDS,
    BindAddress,
    ControllerHealth,
    metrics_routes,
    parse_bind_address,
    serve,
)
from gateway.http.whole_answers import AnswerServer, serve_answers
from tests.support.eventually import eventually

LOOPBACK = BindAddress("127.0.0.1", 0)


def get(address: BindAddress | None, path: str) -> tuple[int, str]:
    assert address is not None
    connection = http.client.HTTPConnection(address.host, address.port, timeout=30)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


async def test_stuck_event_loop_is_noticed_while_it_is_stuck() -> None:
    """The loop is blocked here; only another thread can answer."""
    now = [100.0]
    health = ControllerHealth(lambda: now[0])
    health.is_ready = True
    beating = asyncio.create_task(health.beat())
    await asyncio.sleep(0)
    with serve("--health-probe-bind-address", LOOPBACK, health.routes) as address:
        assert get(address, "/healthz")[0] == HTTPStatus.OK
        now[0] += STUCK_SECONDS + 1
        status, body = get(address, "/healthz")
        assert (status, "stuck for 16 s" in body) == (HTTPStatus.INTERNAL_SERVER_ERROR, True)
        assert get(address, "/readyz")[0] == HTTPStatus.INTERNAL_SERVER_ERROR
    beating.cancel()


@pytest.mark.parametrize("host", ["a" * 70, "a..b", "no.such.host.invalid"])
def test_host_that_is_no_address_holds_up_no_controller(host: str) -> None:
    with capture_logs() as logs, serve("--metrics-bind-address", parse_bind_address(f"{host}:0"), {}) as address:
        assert address is None
    assert [line["event"] for line in logs] == ["port_not_served"]


def test_beat_is_much_faster_than_the_limit() -> None:
    assert BEAT_SECONDS * 5 < STUCK_SECONDS


def test_replica_is_ready_when_its_caches_are_full() -> None:
    health = ControllerHealth()
    with serve("--health-probe-bind-address", LOOPBACK, health.routes) as address:
        assert get(address, "/readyz")[0] == HTTPStatus.SERVICE_UNAVAILABLE
        assert get(address, "/healthz")[0] == HTTPStatus.OK
        health.is_ready = True
        assert get(address, "/readyz?verbose") == (HTTPStatus.OK, "ok\n")
        assert get(address, "/")[0] == HTTPStatus.NOT_FOUND


async def test_taken_port_stops_nothing_and_is_served_once_it_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[int] = []

    def count_tries(server: AnswerServer, host: str, port: int) -> AbstractAsyncContextManager[tuple[str, int]]:
        tries.append(port)
        return serve_answers(server, host, port)

    monkeypatch.setattr(http_endpoints, "RETRY_SECONDS", 0.05)
    monkeypatch.setattr(http_endpoints, "serve_answers", count_tries)
    with contextlib.ExitStack() as stack:
        told = stack.enter_context(capture_logs())
        taken = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        address = BindAddress("127.0.0.1", taken.getsockname()[1])
        served = stack.enter_context(serve("--metrics-bind-address", address, metrics_routes(lambda: b"up 1\n")))
        assert served is None
        assert told[0]["address"] == f"127.0.0.1:{address.port}"
        assert told[0]["way_out"].startswith("free the port, or set --metrics-bind-address to another address or 0")
        await eventually(lambda: len(tries) > 3)
        assert [entry["event"] for entry in told] == ["port_not_served"], "it is told once"
        taken.close()

        def is_served() -> bool:
            with contextlib.suppress(ConnectionRefusedError):
                return get(address, "/metrics") == (HTTPStatus.OK, "up 1\n")
            return False

        await eventually(is_served)


def test_taken_port_is_given_up_when_the_controller_ends() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = BindAddress("127.0.0.1", taken.getsockname()[1])
        with serve("--metrics-bind-address", address, metrics_routes(lambda: b"")) as served:
            assert served is None
    assert "--metrics-bind-address" not in [thread.name for thread in threading.enumerate()]


def test_port_that_is_off_is_not_served() -> None:
    with serve("--metrics-bind-address", parse_bind_address("0"), metrics_routes(lambda: b"")) as served:
        assert served is None


def test_every_address_is_served_without_a_host() -> None:
    with serve("--metrics-bind-address", BindAddress("", 0), metrics_routes(lambda: b"up 1\n")) as served:
        assert served is not None
        assert get(BindAddress("127.0.0.1", served.port), "/metrics") == (HTTPStatus.OK, "up 1\n")


def test_silent_client_delays_no_other() -> None:
    with serve("--metrics-bind-address", LOOPBACK, metrics_routes(lambda: b"up 1\n")) as served:
        assert served is not None
        with socket.create_connection(served):
            assert get(served, "/metrics")[0] == HTTPStatus.OK


@pytest.mark.parametrize(
    ("text", "address"),
    [
        (":8080", BindAddress("", 8080)),
        ("127.0.0.1:9", BindAddress("127.0.0.1", 9)),
        ("[::1]:9", BindAddress("::1", 9)),
        ("0", None),
    ],
)
def test_address_of_an_option(text: str, address: BindAddress | None) -> None:
    assert parse_bind_address(text) == address


@pytest.mark.parametrize("text", ["", "8080", "host", ":", ":x", ":70000", ":-1", ":²"])
def test_wrong_address_names_the_way_out(text: str) -> None:
    with pytest.raises(ValueError, match="give HOST:PORT, :PORT, or 0"):
        parse_bind_address(text)
