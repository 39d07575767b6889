"""A host is reached at the address of its EndpointSlice, and what prevents that is said with the way out."""

from base64 import b64encode
from pathlib import Path
from typing import Any

import click
import pytest
from aiohttp import web

from cli.cluster_access import Cluster
from cli.cluster_options import ClusterOptions
from cli.options import load_hosts_ca
from cli.service.service_address import _read_token, check_host, list_host_urls
from kube.client import Client
from kube.credentials import Credentials, StaticToken
from standalone.ask import AskError, open_session
from tests.support.stub_server import serve_stub

Obj = dict[str, Any]
TARGET = ClusterOptions()


def endpoint_slice(address: str, *, ready: bool = True, protocol: str | None = None) -> Obj:
    port = {"name": "http", "port": 18000} | ({"appProtocol": protocol} if protocol else {})
    return {"ports": [port], "endpoints": [{"addresses": [address], "conditions": {"ready": ready}}]}


def test_ready_endpoints_have_urls() -> None:
    slices = [
        endpoint_slice("10.0.0.1", ready=False),
        endpoint_slice("10.0.0.2"),
        endpoint_slice("fd00::1", protocol="https"),
        {"ports": None, "endpoints": None},
    ]
    assert list(list_host_urls(slices)) == ["http://10.0.0.2:18000", "https://[fd00::1]:18000"]


async def test_host_that_answers_is_reached_even_if_it_refuses() -> None:
    async def refuse(_: web.BaseRequest) -> web.Response:
        return web.Response(status=401)

    async with serve_stub(refuse) as url, open_session() as session:
        await check_host(session, url, "chat")


async def test_host_leads_no_request_of_this_machine_elsewhere() -> None:
    asked: list[str] = []

    async def hear(request: web.BaseRequest) -> web.Response:
        asked.append(request.path)
        return web.Response()

    async with serve_stub(hear) as elsewhere:

        async def redirect(_: web.BaseRequest) -> web.Response:
            return web.Response(status=302, headers={"Location": f"{elsewhere}/admin"})

        async with serve_stub(redirect) as url, open_session() as session:
            await check_host(session, url, "chat")
    assert asked == []


async def test_host_in_another_network_is_named_with_the_way_out() -> None:
    async with open_session() as session:
        with pytest.raises(AskError, match=r"chat is served on a host at http://127\.0\.0\.1:9, .* name it with --url"):
            await check_host(session, "http://127.0.0.1:9", "chat")


@pytest.mark.parametrize("token", [b"a\r\nHost: elsewhere", b"\xff\xfe", "s\u00e9cret".encode()])
async def test_token_that_no_request_can_carry_is_reported(token: bytes) -> None:
    """Whoever may edit the Secret can put anything into it; the controller replaces that within ten minutes."""
    with pytest.raises(click.ClickException, match="Secret team/chat-token has a token that no request can carry"):
        await _read_token(Cluster(_Secret(token), Credentials("https://a", StaticToken(None)), "team", TARGET), "chat")
    good = Cluster(_Secret(b"token"), Credentials("https://a", StaticToken(None)), "team", TARGET)
    assert await _read_token(good, "chat") == "token"


class _Secret(Client):
    """An API with one Secret."""

    def __init__(self, token: bytes) -> None:
        self._token = token

    async def get(self, *_: object) -> Obj:
        return {"data": {"token": b64encode(self._token).decode()}}


def test_unreadable_authority_is_named() -> None:
    with pytest.raises(click.ClickException, match=r"--hosts-ca /dev/null: .* give a file of certificates in PEM form"):
        load_hosts_ca(Path("/dev/null"))
