"""The control API byte by byte: agent and proxy may be of different versions, so its JSON and paths never change."""

from collections import Counter
from importlib import metadata
from typing import Any
from unittest import mock

import aiohttp
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.http.control_messages import ControlRefusal
from gateway.proxy.build import BUILD
from gateway.proxy.config import (
    Backend,
    BackendAdapter,
    BackendHealth,
    BackendState,
    Demand,
    ListenerState,
    ProxyConfig,
    ProxyState,
    RequestsInFlight,
    RouterKey,
    RouterListener,
    ServedModelFacts,
    ServiceDemand,
    ServiceListener,
    ServiceStats,
    Tls,
)
from gateway.proxy.load_balancer import InFlight
from gateway.proxy.metrics import render_metrics
from gateway.proxy.service import Service
from tests.unit.gateway.proxy.running_proxy import ProxyProcess, make_service

CONFIG = ProxyConfig(
    services=(
        ServiceListener(
            name="ns/tiny",
            address="127.0.0.1",
            port=18000,
            token="t",
            backends=(
                Backend(
                    uid="u",
                    url="http://127.0.0.1:1",
                    draining=True,
                    asleep=True,
                    concurrency=4,
                    model="/weights/x",
                    api_key="key",
                    engine="llama.cpp",
                    mode="chat",
                    context_length=4096,
                    shared_tokens=1024,
                    previous_api_key="old",
                    adapters=(BackendAdapter(0.5), BackendAdapter(1, "tone")),
                ),
            ),
            queue_limit=7,
            load_seconds=2.5,
            problem="no",
            facts=ServedModelFacts(
                size_bytes=1,
                memory_bytes=2,
                device_bytes=3,
                digest="d",
                source="file:///x.gguf",
                format="gguf",
                architecture="llama",
                quantization="Q8_0",
                license="MIT",
                parameter_count=4,
                context_length=5,
                embedding_size=6,
                layer_count=7,
                head_count=8,
                head_count_kv=9,
                capabilities=("completion",),
            ),
        ),
    ),
    router=RouterListener(
        address="127.0.0.1",
        port=18001,
        keys=(RouterKey(name="phone", sha256="0" * 64),),
        allowed_hosts=("host.docker.internal",),
        allowed_origins=("https://chat.example",),
    ),
    tls=Tls(certificate="/c.pem", key="/k.pem"),
)
CONFIG_JSON = {
    "services": [
        {
            "name": "ns/tiny",
            "address": "127.0.0.1",
            "port": 18000,
            "token": "t",
            "backends": [
                {
                    "uid": "u",
                    "url": "http://127.0.0.1:1",
                    "draining": True,
                    "asleep": True,
                    "concurrency": 4,
                    "model": "/weights/x",
                    "apiKey": "key",
                    "engine": "llama.cpp",
                    "mode": "chat",
                    "contextLength": 4096,
                    "sharedTokens": 1024,
                    "previousApiKey": "old",
                    "adapters": [{"scale": 0.5, "name": ""}, {"scale": 1.0, "name": "tone"}],
                }
            ],
            "previousToken": None,
            "previousTokenUntil": 0.0,
            "queueLimit": 7,
            "loadSeconds": 2.5,
            "problem": "no",
            "facts": {
                "sizeBytes": 1,
                "memoryBytes": 2,
                "deviceBytes": 3,
                "digest": "d",
                "source": "file:///x.gguf",
                "format": "gguf",
                "architecture": "llama",
                "quantization": "Q8_0",
                "license": "MIT",
                "parameterCount": 4,
                "contextLength": 5,
                "embeddingSize": 6,
                "layerCount": 7,
                "headCount": 8,
                "headCountKv": 9,
                "capabilities": ["completion"],
                "idleLimitSeconds": None,
            },
        }
    ],
    "router": {
        "address": "127.0.0.1",
        "port": 18001,
        "keys": [{"name": "phone", "sha256": "0" * 64}],
        "allowedHosts": ["host.docker.internal"],
        "allowedOrigins": ["https://chat.example"],
        "controlSocket": "",
    },
    "tls": {"certificate": "/c.pem", "key": "/k.pem"},
}
STATE = ProxyState(
    version="1",
    pid=2,
    services=(
        ListenerState(
            name="ns/tiny",
            address="127.0.0.1",
            port=18000,
            error="no",
            backends=(BackendState(uid="u", url="http://127.0.0.1:1", draining=False, in_flight=3, idle_seconds=0.5),),
            port_taken=True,
            stats=ServiceStats(
                requests=1, errors=2, tokens_in=3, tokens_out=4, request_seconds=7.5, in_flight=5, queued=6
            ),
        ),
    ),
)
STATE_JSON = {
    "version": "1",
    "pid": 2,
    "services": [
        {
            "name": "ns/tiny",
            "address": "127.0.0.1",
            "port": 18000,
            "error": "no",
            "backends": [
                {"uid": "u", "url": "http://127.0.0.1:1", "draining": False, "inFlight": 3, "idleSeconds": 0.5}
            ],
            "portTaken": True,
            "stats": {
                "requests": 1,
                "errors": 2,
                "tokensIn": 3,
                "tokensOut": 4,
                "requestSeconds": 7.5,
                "inFlight": 5,
                "queued": 6,
            },
        }
    ],
    "router": None,
}
SERVICE_DEMAND = {
    "name": "ns/tiny",
    "waiting": 1,
    "waitingSeconds": 2.5,
    "inFlight": 3,
    "idleSeconds": None,
    "keepAliveSeconds": -1.0,
}
DEMAND_JSON = {"changes": 7, "services": [SERVICE_DEMAND]}
FEWEST_FIELDS = {"services": [{"name": "ns/tiny", "address": "127.0.0.1", "port": 0, "token": "t"}]}


@pytest.mark.parametrize(
    ("message", "json"),
    [
        (CONFIG, CONFIG_JSON),
        (STATE, STATE_JSON),
        (RequestsInFlight(in_flight=1), {"inFlight": 1}),
        (Demand(7, (ServiceDemand("ns/tiny", 1, 2.5, 3, None, -1.0),)), DEMAND_JSON),
        (ControlRefusal(error="no"), {"error": "no"}),
        (
            BackendHealth("u", suspect=True, reason="Failing", message="no"),
            {"uid": "u", "suspect": True, "reason": "Failing", "message": "no"},
        ),
    ],
)
def test_json_of_each_message_is_pinned(message: msgspec.Struct, json: dict[str, Any]) -> None:
    assert msgspec.json.decode(msgspec.json.encode(message)) == json
    assert msgspec.convert(json, type(message)) == message


def test_fields_of_a_later_version_are_ignored_and_absent_ones_have_defaults() -> None:
    (service,) = msgspec.convert(FEWEST_FIELDS | {"later": 1}, ProxyConfig).services
    assert (service.backends, service.queue_limit) == ((), 128)
    (listener,) = msgspec.convert(
        {
            "version": "1",
            "pid": 2,
            "services": [{"name": "a", "address": "", "port": 1, "error": "", "backends": [], "later": 1}],
        },
        ProxyState,
    ).services
    assert (listener.port_taken, listener.stats) == (False, ServiceStats())


@pytest.mark.parametrize(
    ("call", "body", "status", "keys"),
    [
        ("GET /state", None, 200, {"version", "pid", "services", "router"}),
        ("PUT /services", FEWEST_FIELDS, 200, {"version", "pid", "services", "router"}),
        ("PUT /services", {"services": 1}, 400, {"error"}),
        ("GET /backends/u/idle?timeoutSeconds=0", None, 200, {"inFlight"}),
        ("POST /backends/none/health", None, 404, {"error"}),
        ("GET /backends/u/idle", None, 400, {"error"}),
        ("GET /backends/u/idle?timeoutSeconds=soon", None, 400, {"error"}),
        ("GET /backends/busy?timeoutSeconds=0", None, 200, {"inFlight"}),
        ("GET /backends/busy", None, 400, {"error"}),
    ],
)
async def test_paths_and_status_codes_are_pinned(
    proxy: ProxyProcess, call: str, body: object, status: int, keys: set[str]
) -> None:
    method, path = call.split()
    async with (
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(proxy.client.socket))) as session,
        session.request(method, f"http://proxy{path}", data=msgspec.json.encode(body) if body else None) as response,
    ):
        assert response.status == status
        assert set(msgspec.json.decode(await response.read())) == keys


async def test_metrics_are_served_as_prometheus_text(proxy: ProxyProcess) -> None:
    async with (
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(proxy.client.socket))) as session,
        session.get("http://proxy/metrics") as response,
    ):
        assert response.status == 200
        assert response.content_type == "text/plain"
        names = {line.split()[2] for line in (await response.text()).splitlines() if line.startswith("# TYPE ")}
    assert names == {
        "pomona_proxy_requests_total",
        "pomona_proxy_errors_total",
        "pomona_proxy_prompt_tokens_total",
        "pomona_proxy_generated_tokens_total",
        "pomona_proxy_lone_tokens_total",
        "pomona_proxy_lone_token_seconds_total",
        "pomona_proxy_time_to_first_token_seconds",
        "pomona_proxy_inter_token_seconds",
        "pomona_proxy_queue_seconds",
        "pomona_proxy_request_seconds",
        "pomona_proxy_in_flight",
        "pomona_proxy_queued",
    }


async def test_version_is_the_one_by_which_agents_compare(proxy: ProxyProcess) -> None:
    assert (await proxy.client.state()).version == BUILD
    assert BUILD.partition("+")[0] == metadata.version("pomona")


@pytest.mark.interpreted
def test_metrics_are_read_by_prometheus_as_they_were_counted() -> None:
    service = Service(make_service(name='n"s/tiny'), InFlight(lambda _: None))
    counts = service.metrics
    counts.requests = Counter({("chat", 200): 1, ("chat", 503): 1})
    for _ in range(3):
        service.queue.enqueue(mock.Mock())
    for seconds in (0.004, 0.3, 1000):
        counts.request_seconds.observe(seconds)
    text = render_metrics({'n"s/tiny': service}).decode()
    families = {metric.name: metric for metric in text_string_to_metric_families(text)}
    labels = {"namespace": 'n"s', "service": "tiny"}
    requests = families["pomona_proxy_requests"]
    assert (requests.type, len(families)) == ("counter", 12)
    statuses = {sample.labels["status"]: sample.value for sample in requests.samples}
    assert statuses == {"200": 1, "503": 1}
    seconds_ = families["pomona_proxy_request_seconds"]
    buckets = {sample.labels["le"]: sample.value for sample in seconds_.samples if sample.name.endswith("_bucket")}
    assert (seconds_.type, buckets["0.005"], buckets["0.5"], buckets["+Inf"]) == ("histogram", 1, 2, 3)
    (queued,) = families["pomona_proxy_queued"].samples
    assert (queued.labels, queued.value) == (labels, 3)
