"""The stand-in of oMLX answers in the shape that was recorded."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support import daemons
from tests.support.daemons.omlx import OmlxStandIn

RECORDED = Path(daemons.__file__).parent / "recorded"
OMLX: dict[str, Any] = json.loads((RECORDED / "omlx.json").read_text())
MESSAGES = [{"role": "user", "content": "Hi"}]
HEADERS = {"Authorization": "Bearer sk-owner"}


def shape(value: Any) -> Any:
    """Return the names and types in an answer: for a list those of its first item, for any number `number`."""
    if isinstance(value, dict):
        return {name: shape(item) for name, item in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture
async def omlxs(unused_tcp_port: int, tmp_path: Path) -> AsyncIterator[OmlxStandIn]:
    async with OmlxStandIn(unused_tcp_port, tmp_path / "omlx") as daemon:
        daemon.own("Qwen3-8B-4bit", size=1 << 20)
        yield daemon


@pytest.mark.parametrize(
    ("recorded", "path", "body"),
    [
        ("GET /health", "/health", None),
        ("GET /v1/models/status", "/v1/models/status", None),
        ("GET /api/status", "/api/status", None),
        ("POST /v1/models/{id}/load", "/v1/models/Qwen3-8B-4bit/load", None),
        ("POST /v1/models/{id}/unload", "/v1/models/Qwen3-8B-4bit/unload", None),
        ("POST /admin/api/login", "/admin/api/login", {"api_key": "sk-owner"}),
        ("POST /v1/chat/completions", "/v1/chat/completions", {"model": "Qwen3-8B-4bit", "messages": MESSAGES}),
    ],
)
async def test_omlx_answers_as_recorded(
    omlxs: OmlxStandIn, session: aiohttp.ClientSession, recorded: str, path: str, body: object
) -> None:
    async with session.request(recorded.split(maxsplit=1)[0], omlxs.url + path, json=body, headers=HEADERS) as response:
        assert response.status == 200
        assert shape(await response.json()) == shape(OMLX[recorded])


@pytest.mark.parametrize(
    ("recorded", "path", "status", "headers"),
    [
        ("error 401", "/v1/models/Qwen3-8B-4bit/load", 401, {}),
        ("error 401 of /admin", "/admin/api/reload", 401, HEADERS),
        ("error 507", "/v1/models/Qwen3-8B-4bit/load", 507, HEADERS),
    ],
)
async def test_omlx_refuses_as_recorded(
    omlxs: OmlxStandIn,
    session: aiohttp.ClientSession,
    *,
    recorded: str,
    path: str,
    status: int,
    headers: dict[str, str],
) -> None:
    omlxs.evict("Qwen3-8B-4bit")
    omlxs.ceiling = 1
    async with session.post(omlxs.url + path, headers=headers) as response:
        assert response.status == status
        assert shape(await response.json()) == shape(OMLX[recorded])


async def test_omlx_reloads_for_administrator_as_recorded(omlxs: OmlxStandIn, session: aiohttp.ClientSession) -> None:
    async with session.post(f"{omlxs.url}/admin/api/login", json={"api_key": "sk-owner"}) as response:
        cookie = response.cookies["omlx_admin_session"].value
    headers = {"Cookie": f"omlx_admin_session={cookie}"}
    async with session.post(f"{omlxs.url}/admin/api/reload", headers=headers) as response:
        assert shape(await response.json()) == shape(OMLX["POST /admin/api/reload"])
    assert omlxs.names() == set(), "a reload unloads everything"
