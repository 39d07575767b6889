"""A gateway in this process: its catalog gets objects as the API server sends them, and its listener takes requests."""

import asyncio
import base64
import hashlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import aiohttp
import msgspec
from aiohttp import web

from crds.meta import gateway_token_key
from gateway.cluster.cluster_feed import ClusterFeed
from gateway.cluster.limiter import Limiter
from gateway.cluster.watched_objects import SELECTIONS, SHARD_SELECTIONS
from gateway.http.connection_table import ConnectionTable
from gateway.http.limits import ConnectionCaps, ConnectionTimes
from gateway.http.listener import HttpListener
from gateway.http.upstream_pool import UpstreamPool
from gateway.proxy.handler import handle_requests
from gateway.proxy.health_monitor import HealthMonitor
from gateway.proxy.inference_request import SharedResources
from gateway.proxy.keep_alive import KeepAlive
from gateway.proxy.request_body import BodyBudget
from kube.resources import ENDPOINT_SLICES, GATEWAY_KEYS, INFERENCE_SERVICES, MODEL_ROUTES, Resource

TOKEN = "t"
SECRET = "pomona-secret-of-team-a"
AUTHORIZED = {"Authorization": f"Bearer {SECRET}"}
BORN = "2026-11-29T12:00:00Z"


class FedCluster:
    """The objects of a cluster, put into the feed of a gateway."""

    def __init__(self, feed: ClusterFeed, shared: SharedResources) -> None:
        self.feed = feed
        self.shared = shared
        self._version = 0
        self._tokens: dict[str, str] = {}

    def put(
        self, resource: Resource, namespace: str, name: str, *, uid: str = "", born: str = BORN, **fields: Any
    ) -> None:
        """Put an object in the form in which the API server sends it."""
        self._version += 1
        metadata = {
            "namespace": namespace,
            "name": name,
            "uid": uid or f"uid-of-{namespace}-{name}",
            "resourceVersion": str(self._version),
            "creationTimestamp": born,
            **fields.pop("metadata", {}),
        }
        (selection,) = (selection for selection in SELECTIONS if selection.resource == resource)
        assert selection.read
        self.feed._store.put(
            resource, selection.read(msgspec.Raw(msgspec.json.encode({"metadata": metadata, **fields})))
        )

    def remove(self, resource: Resource, namespace: str, name: str) -> None:
        self.feed._store.remove(resource, namespace, name)

    def serve(
        self,
        namespace: str,
        name: str,
        *urls: str,
        access: tuple[str, ...] = (),
        phase: str = "Ready",
        token: str = TOKEN,
        node_speeds: Mapping[str, str] = {},
        adapters: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Put a service with these endpoints, each at a host of its own, and its token; each node may have a speed."""
        self.put(
            INFERENCE_SERVICES,
            namespace,
            name,
            spec={"modelRef": "weights", "access": {"namespaces": access}, "adapters": adapters},
            status={
                "phase": phase,
                "serving": {"contextLength": 4096},
                "nodeSpeeds": [{"node": node, "tokensPerSecond": rate} for node, rate in node_speeds.items()],
            },
        )
        for number, url in enumerate(urls):
            self.put_slice(namespace, name, f"{name}.host{number}", url, host=f"host{number}")
        self.set_token(namespace, name, token)

    def put_slice(
        self, namespace: str, service: str, name: str, url: str, *, ready: bool = True, host: str = "", node: str = ""
    ) -> None:
        """Put a slice with one endpoint of a service: that of a host, or that of a pod on a node."""
        parts = urlsplit(url)
        port: dict[str, Any] = {"name": "http", "port": parts.port}
        if parts.scheme == "https":
            port["appProtocol"] = "https"
        self.put(
            ENDPOINT_SLICES,
            namespace,
            name,
            metadata={
                "labels": {"kubernetes.io/service-name": service}
                | ({"inference.pomona.dev/host": host} if host else {})
            },
            ports=[port],
            endpoints=[
                {"addresses": [parts.hostname], "conditions": {"ready": ready}} | ({"nodeName": node} if node else {})
            ],
        )

    def set_token(self, namespace: str, name: str, token: str, previous: str | None = None) -> None:
        """Put the token of a service into the Secret of its shard, with the one before if that is still valid."""
        key = gateway_token_key(namespace, name)
        self._tokens[key] = _encode(token)
        data = dict(self._tokens)
        if previous:
            data["previous_tokens"] = _encode(
                msgspec.json.encode({key: {"token": _encode(previous), "validUntil": 1 << 40}}).decode()
            )
        self._version += 1
        metadata = {
            "namespace": "pomona-system",
            "name": "pomona-gateway-0",
            "uid": "shard",
            "resourceVersion": str(self._version),
        }
        selection = SHARD_SELECTIONS[0]
        assert selection.read
        raw = msgspec.Raw(msgspec.json.encode({"metadata": metadata, "data": data}))
        self.feed._shards[0].put(selection.resource, selection.read(raw))

    def put_key(
        self,
        namespace: str = "team-a",
        name: str = "ci",
        secret: str = SECRET,
        *,
        previous: Mapping[str, str] = {},
        born: str = BORN,
        **spec: Any,
    ) -> None:
        """Put a GatewayKey whose Secret has `secret`; `previous` has the ends of those that it has replaced."""
        replaced = [{"digest": digest(former), "validUntil": end} for former, end in previous.items()]
        self.put(
            GATEWAY_KEYS, namespace, name, born=born, spec=spec, status={"digest": digest(secret), "previous": replaced}
        )

    def put_route(
        self,
        name: str,
        services: Mapping[str, int],
        fallbacks: Mapping[str, Sequence[str]] = {},
        namespace: str = "team-a",
    ) -> None:
        """Put a ModelRoute to services with these weights; its fallbacks have their causes, none for all."""
        spec = {
            "services": [{"name": service, "weight": weight} for service, weight in services.items()],
            "fallbacks": [{"name": service, "when": when} for service, when in fallbacks.items()],
        }
        self.put(MODEL_ROUTES, namespace, name, spec=spec)


class RunningGateway(NamedTuple):
    """A gateway and its URL."""

    cluster: FedCluster
    url: str


@asynccontextmanager
async def gateway_in_process(limiter: Limiter | None = None) -> AsyncIterator[RunningGateway]:
    """Run a gateway in this process; it is healthy, as if it had read the whole cluster."""
    async with UpstreamPool() as pool:
        feed = ClusterFeed(limiter or Limiter())
        for listed in feed._listed:
            listed.set()
        shared = SharedResources(BodyBudget(), asyncio.Lock(), pool, HealthMonitor(), KeepAlive())
        table = ConnectionTable(ConnectionCaps(100, 100), 0.1)
        listener = HttpListener(handle_requests(feed.keys, shared), table, ConnectionTimes())
        await listener.bind("127.0.0.1", 0)
        expiry = asyncio.create_task(feed.keys.end_expired())
        try:
            yield RunningGateway(FedCluster(feed, shared), f"http://127.0.0.1:{listener.port}")
        finally:
            expiry.cancel()
            listener.unbind()
            await asyncio.wait_for(listener.finish(), 10)


def ask(
    http: aiohttp.ClientSession,
    gateway: RunningGateway,
    model: str | None = "chat",
    *,
    secret: str = SECRET,
    stream: bool = False,
) -> aiohttp.client._RequestContextManager:
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": stream} | ({"model": model} if model else {})
    headers = {"Authorization": f"Bearer {secret}"}
    return http.post(f"{gateway.url}/v1/chat/completions", json=body, headers=headers)


class NamedEngine:
    """Answers with its name, and keeps the tokens that it was sent."""

    def __init__(self, name: str, *, accepts: str = "t") -> None:
        self.name = name
        self.tokens: list[str] = []
        self.accepts = accepts

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        self.tokens.append(request.headers.get("Authorization", ""))
        if self.tokens[-1] != f"Bearer {self.accepts}":
            return web.json_response({"error": {"message": "wrong token"}}, status=401)
        return web.json_response({"choices": [{"message": {"content": self.name}}], "model": "chat"})


async def answer_of(response: aiohttp.ClientResponse) -> str:
    answer = await response.json()
    assert response.status == 200, answer
    return str(answer["choices"][0]["message"]["content"])


def digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def in_seconds(seconds: float) -> str:
    """Return the time in so many seconds, as the API writes it."""
    return (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat()


def _encode(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
