"""The clients of the router: programs of this machine, those with a key, and web pages of allowed origins."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import openai
import pytest
from aiohttp import web
from msgspec import structs

from crds.gatewaykey import digest_key
from gateway.http.control_client import ControlRefusedError
from gateway.proxy.config import Backend, ProxyConfig, RouterKey, RouterListener
from tests.support.eventually import eventually
from tests.unit.gateway.proxy.recording_engine import recording_engine
from tests.unit.gateway.proxy.running_proxy import (
    CHAT,
    DONE_EVENT,
    TOKEN,
    ProxyProcess,
    error_code,
    fake_engine,
    make_service,
)

PHONE, LAPTOP = "the-key-of-the-phone", "the-key-of-the-laptop"
LOOPBACK = RouterListener("127.0.0.1", 0)
KEYED = structs.replace(LOOPBACK, keys=(RouterKey("phone", digest_key(PHONE)), RouterKey("laptop", digest_key(LAPTOP))))
PAGE = "https://chat.example"
Serve = Callable[[RouterListener], Awaitable[str]]


async def speak(request: web.BaseRequest) -> web.StreamResponse:
    """Answer as an engine that opens itself to web pages; the text `fail` fails."""
    asked = json.loads(await request.read())
    opened = {"Access-Control-Allow-Origin": "https://evil.example", "Access-Control-Allow-Credentials": "true"}
    if asked["messages"][0]["content"] == "fail":
        return web.json_response({"error": {"message": "bad", "code": 400}}, status=400, headers=opened)
    if not asked.get("stream"):
        message = {"role": "assistant", "content": "Hi"}
        return web.json_response({"model": "x", "choices": [{"message": message}]}, headers=opened)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **opened})
    await response.prepare(request)
    chunk = {"model": "x", "choices": [{"delta": {"content": "Hi"}}]}
    await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n" + DONE_EVENT)
    return response


@pytest.fixture
async def backend() -> AsyncIterator[Backend]:
    async with fake_engine(speak) as made:
        yield made


@pytest.fixture
def serve(proxy: ProxyProcess, backend: Backend) -> Serve:
    """Configure the proxy with a router, and return the URL of that."""

    async def configure(router: RouterListener) -> str:
        state = await proxy.client.configure(ProxyConfig((make_service(backend),), router))
        assert state.router
        assert state.router.error == ""
        return f"http://127.0.0.1:{state.router.port}"

    return configure


async def ask(
    http: aiohttp.ClientSession,
    url: str,
    text: str = "hi",
    *,
    method: str = "POST",
    stream: bool = False,
    **fields: Any,
) -> tuple[int, Any, str]:
    """Return the status, the header fields and the text of an answer."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "stream": stream}
    headers = {name.replace("_", "-"): value for name, value in fields.items()}
    async with http.request(method, f"{url}/v1/chat/completions", json=body, headers=headers) as response:
        return response.status, response.headers, await response.text()


async def preflight(http: aiohttp.ClientSession, url: str, **fields: str) -> tuple[int, Any, str]:
    """Ask as a browser does before it sends a page's request."""
    headers = {name.replace("_", "-"): value for name, value in fields.items()}
    headers |= {"Access-Control-Request-Method": "POST"}
    async with http.options(f"{url}/v1/chat/completions", headers=headers) as response:
        return response.status, response.headers, await response.text()


# Programs of this machine


@pytest.mark.parametrize(
    "fields", [{"Origin": "https://evil.example"}, {"Host": "evil.example"}, {"Host": "localhost.evil.example:80"}]
)
async def test_web_page_cannot_use_a_router_without_keys(
    http: aiohttp.ClientSession, serve: Serve, fields: dict[str, Any]
) -> None:
    status, headers, text = await ask(http, await serve(LOOPBACK), **fields)
    assert (status, error_code(json.loads(text))) == (403, "foreign_origin")
    assert "Access-Control-Allow-Origin" not in headers


async def test_allowed_host_is_named_by_the_refusal_of_it(http: aiohttp.ClientSession, serve: Serve) -> None:
    status, _, text = await ask(http, await serve(LOOPBACK), Host="host.docker.internal:8080")
    assert status == 403
    assert "--allow-host host.docker.internal," in json.loads(text)["error"]["message"]
    url = await serve(structs.replace(LOOPBACK, allowed_hosts=("host.docker.internal",)))
    assert (await ask(http, url, Host="host.docker.internal:8080"))[0] == 200
    assert (await ask(http, url, Host="other.docker.internal:8080"))[0] == 403


@pytest.mark.parametrize(
    ("router", "problem"),
    [
        ('{"address": "10.0.0.1", "port": 0}', "needs keys"),
        ('{"address": "127.0.0.1", "port": 0, "allowedOrigins": ["*"]}', "needs keys"),
        ('{"address": "127.0.0.1", "port": 0, "allowedHosts": ["a\\\\r\\\\nb"]}', "allowedHosts"),
        ('{"address": "127.0.0.1", "port": 0, "allowedOrigins": ["https://a/b"]}', "allowedOrigins"),
        ('{"address": "127.0.0.1", "port": 0, "keys": [{"name": "a\\\\nb", "sha256": "00"}]}', "keys"),
    ],
)
async def test_router_that_would_be_open_is_refused(proxy: ProxyProcess, router: str, problem: str) -> None:
    with pytest.raises(ControlRefusedError, match=problem):
        await proxy.client.request("PUT", "/services", body=f'{{"router": {router}}}'.encode())


# Keys


@pytest.mark.parametrize("fields", [{"Authorization": f"Bearer {PHONE}"}, {"X_Api_Key": LAPTOP}])
async def test_each_key_opens_the_router_under_any_name_of_the_machine(
    http: aiohttp.ClientSession, serve: Serve, fields: dict[str, Any]
) -> None:
    status, _, text = await ask(http, await serve(KEYED), Host="studio.local:8080", Origin="app://desktop", **fields)
    assert (status, json.loads(text)["choices"][0]["message"]["content"]) == (200, "Hi")


@pytest.mark.parametrize("key", ["", "wrong", PHONE[:-1], TOKEN, digest_key(PHONE)])
async def test_other_keys_are_refused_also_on_this_machine(http: aiohttp.ClientSession, serve: Serve, key: str) -> None:
    fields: dict[str, Any] = {"Authorization": f"Bearer {key}"} if key else {}
    url = await serve(KEYED)
    status, headers, text = await ask(http, url, **fields)
    assert (status, error_code(json.loads(text)), headers["X-Should-Retry"]) == (401, "invalid_api_key", "false")
    assert "`pomona up --api-key`" in text
    async with http.get(f"{url}/v1/models", headers=fields) as response:
        assert response.status == 401
    async with http.get(f"{url}/health") as response:
        assert await response.json() == {"status": "ok"}


async def test_client_of_openai_sends_a_key_of_the_router(serve: Serve) -> None:
    async with openai.AsyncOpenAI(base_url=f"{await serve(KEYED)}/v1", api_key=PHONE, max_retries=0) as client:
        assert [model.id async for model in client.models.list()] == ["tiny"]
        stream = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], stream=True
        )
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "Hi"
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="wrong").models.list()


async def test_changed_keys_are_valid_at_once_at_the_same_port(
    proxy: ProxyProcess, http: aiohttp.ClientSession, serve: Serve
) -> None:
    url = await serve(KEYED)
    assert (await ask(http, url, Authorization=f"Bearer {PHONE}"))[0] == 200
    assert await serve(structs.replace(KEYED, keys=KEYED.keys[1:])) == url
    assert (await ask(http, url, Authorization=f"Bearer {PHONE}"))[0] == 401
    assert (await ask(http, url, Authorization=f"Bearer {LAPTOP}"))[0] == 200
    assert await serve(LOOPBACK) == url
    assert (await ask(http, url))[0] == 200
    assert not any(PHONE in line or LAPTOP in line for line in proxy.log)


async def test_requests_are_logged_and_counted_by_the_name_of_the_key(
    proxy: ProxyProcess, http: aiohttp.ClientSession, serve: Serve
) -> None:
    await proxy.client.configure(ProxyConfig())
    url = await serve(LOOPBACK)
    assert (await ask(http, url))[0] == 200
    assert b"key_requests_total" not in await proxy.client.metrics()
    url = await serve(KEYED)
    for key in (PHONE, PHONE, LAPTOP, "wrong"):
        await ask(http, url, Authorization=f"Bearer {key}")
    counted = [line for line in (await proxy.client.metrics()).decode().splitlines() if "key_requests_total{" in line]
    assert counted == [
        'pomona_proxy_key_requests_total{key="phone",namespace="ns",service="tiny"} 2.0',
        'pomona_proxy_key_requests_total{key="laptop",namespace="ns",service="tiny"} 1.0',
    ]

    def read_keys() -> bool:
        lines = [json.loads(line) for line in proxy.log if '"event":"request_finished"' in line]
        return [line.get("key") for line in lines[-4:]] == [None, "phone", "phone", "laptop"]

    await eventually(read_keys)


# Web pages


ALLOWED = {
    "Access-Control-Allow-Origin": PAGE,
    "Access-Control-Expose-Headers": "*",
    "Vary": "Origin",
}


def read_cors(headers: Any) -> dict[str, str]:
    """Return the fields for browsers, each of which may come once."""
    names = [name for name in headers if name.lower() == "vary" or name.lower().startswith("access-control-")]
    assert len(names) == len(set(names))
    return {name: headers[name] for name in names}


@pytest.mark.parametrize("stream", [False, True])
async def test_page_of_an_allowed_origin_reads_answers_streams_and_errors(
    http: aiohttp.ClientSession, serve: Serve, *, stream: bool
) -> None:
    url = await serve(structs.replace(LOOPBACK, allowed_origins=("https://other.example", PAGE)))
    for text, status in (("hi", 200), ("fail", 400)):
        answered, headers, _ = await ask(http, url, text, stream=stream, Origin=PAGE)
        assert (answered, read_cors(headers)) == (status, ALLOWED)
    answered, headers, _ = await ask(http, url, method="PATCH", Origin=PAGE)
    assert (answered, read_cors(headers)) == (405, ALLOWED)


async def test_other_answers_of_a_router_for_pages_vary_by_origin_only(
    http: aiohttp.ClientSession, serve: Serve
) -> None:
    url = await serve(structs.replace(LOOPBACK, allowed_origins=(PAGE,)))
    for origin, status in (("", 200), ("http://localhost:3000", 200), (f"{PAGE}:444", 403)):
        fields: dict[str, Any] = {"Origin": origin} if origin else {}
        answered, headers, _ = await ask(http, url, **fields)
        assert (answered, read_cors(headers)) == (status, {"Vary": "Origin"})
    url = await serve(LOOPBACK)
    assert read_cors((await ask(http, url))[1]) == {}


async def test_preflight_allows_what_libraries_send(http: aiohttp.ClientSession, serve: Serve) -> None:
    url = await serve(structs.replace(KEYED, allowed_origins=(PAGE,)))
    wanted = "authorization,content-type, x-api-key,anthropic-version,x-stainless-os"
    status, headers, text = await preflight(http, url, Origin=PAGE, Access_Control_Request_Headers=wanted)
    assert (status, text) == (200, "")
    assert read_cors(headers) == ALLOWED | {
        "Access-Control-Allow-Methods": "GET, POST, DELETE",
        "Access-Control-Allow-Headers": wanted,
        "Access-Control-Max-Age": "600",
    }
    assert (await ask(http, url, Origin=PAGE))[0] == 401
    status, headers, _ = await ask(http, url, Origin=PAGE, Authorization=f"Bearer {PHONE}")
    assert (status, read_cors(headers)) == (200, ALLOWED)


async def test_preflight_of_another_origin_names_the_option(http: aiohttp.ClientSession, serve: Serve) -> None:
    for router in (LOOPBACK, KEYED, structs.replace(KEYED, allowed_origins=("https://other.example",))):
        for origin in ("http://localhost:3000", PAGE):
            status, headers, text = await preflight(http, await serve(router), Origin=origin)
            assert (status, error_code(json.loads(text))) == (403, "foreign_origin")
            assert f"--allow-origin {origin}" in text
            assert "Access-Control-Allow-Origin" not in headers


async def test_pages_of_every_origin_need_a_key(http: aiohttp.ClientSession, serve: Serve) -> None:
    url = await serve(structs.replace(KEYED, allowed_origins=("*",)))
    for origin in (PAGE, "null"):
        status, headers, _ = await preflight(http, url, Origin=origin)
        assert (status, headers["Access-Control-Allow-Origin"]) == (200, "*")
        assert (await ask(http, url, Origin=origin))[0] == 401
        assert (await ask(http, url, Origin=origin, Authorization=f"Bearer {PHONE}"))[0] == 200


async def test_port_of_a_service_answers_no_preflight(proxy: ProxyProcess, http: aiohttp.ClientSession) -> None:
    status, headers, _ = await preflight(http, await proxy.serve(), Origin=PAGE)
    assert (status, read_cors(headers)) == (401, {})


async def test_engine_does_not_get_the_origin(proxy: ProxyProcess, http: aiohttp.ClientSession) -> None:
    async with recording_engine() as (engine, backend):
        router = structs.replace(LOOPBACK, allowed_origins=(PAGE,))
        state = await proxy.client.configure(ProxyConfig((make_service(backend),), router))
        assert state.router
        url = f"http://127.0.0.1:{state.router.port}"
        async with http.post(f"{url}/v1/chat/completions", json=CHAT, headers={"Origin": PAGE}) as response:
            assert response.status == 200
        assert engine.requests[0].values(b"origin") == []
