"""An API server with the objects that a gateway reads, in this process: it answers lists in pages, and sends changes.

A real one takes too long to be given two thousand services with ten thousand endpoints. So each object here is a copy
of one that a real server with the real controller and agent sent, in `recorded_objects.json`, under another name.
"""

import asyncio
import contextlib
import hashlib
from base64 import b64encode
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec
from aiohttp import web

from benchmarks.clients.http_load import TOKEN
from benchmarks.simulated_server import parse_path
from crds.gatewaykey import digest_key
from crds.meta import CONTROLLER_NAMESPACE, GATEWAY_SHARDS, LABEL_SERVICE_NAME, gateway_shard, gateway_token_key
from gateway.cluster.rate_limits import LIMIT_FIELDS
from kube.client import Obj
from kube.resources import ENDPOINT_SLICES, GATEWAY_KEYS, INFERENCE_SERVICES, SECRETS, Resource
from tests.support.stub_server import serve_stub

NAMESPACE: Final = "bench"
SERVICE: Final = "tiny"
"""The service that clients ask, by the model of `benchmarks.clients`."""

_MOST: Final = (1 << 31) - 1
_BOOKMARK_SECONDS: Final = 30.0
_RECORDED: Final[Mapping[str, Obj]] = msgspec.json.decode(
    Path(__file__).with_name("recorded_objects.json").read_bytes()
)


class ClusterApi:
    """The objects, by the plural of their kind and by their names as JSON; each change is sent to all watches."""

    def __init__(self) -> None:
        self._objects: defaultdict[str, dict[tuple[str, str], bytes]] = defaultdict(dict)
        self._watches: defaultdict[str, list[asyncio.Queue[bytes]]] = defaultdict(list)
        self._tokens: defaultdict[str, dict[str, str]] = defaultdict(dict)
        """By shard: the tokens of its services, as the data of its Secret."""
        self._version = 0

    # The objects

    def serve(self, *urls: str, namespace: str = NAMESPACE, name: str = SERVICE, slots: int = 32) -> None:
        """Put a service whose replicas have these URLs, each on a host of its own, and its token."""
        service = _copy("InferenceService", namespace, name)
        service["status"]["serving"]["parallel"] = slots
        self.put(INFERENCE_SERVICES, service)
        empty = _copy("EndpointSlice of the Service", namespace, f"{name}-jh7bw")
        empty["metadata"]["labels"][LABEL_SERVICE_NAME] = name
        self.put(ENDPOINT_SLICES, empty)
        for number, url in enumerate(urls):
            self.put_endpoint(url, f"studio-{number}", namespace=namespace, name=name)
        shard = gateway_shard(namespace, name)
        self._tokens[shard][gateway_token_key(namespace, name)] = b64encode(TOKEN.encode()).decode()

    def put_endpoint(
        self, url: str, host: str, *, namespace: str = NAMESPACE, name: str = SERVICE, ready: bool = True
    ) -> None:
        """Put the slice of a service on a host."""
        parts = urlsplit(url)
        endpoint_slice = _copy("EndpointSlice of a host", namespace, f"{name}.{host}")
        endpoint_slice["metadata"]["labels"][LABEL_SERVICE_NAME] = name
        endpoint_slice["endpoints"][0]["addresses"] = [parts.hostname]
        endpoint_slice["endpoints"][0]["conditions"]["ready"] = ready
        endpoint_slice["ports"][0]["port"] = parts.port
        self.put(ENDPOINT_SLICES, endpoint_slice)

    def put_key(self, secret: str = TOKEN, *, namespace: str = NAMESPACE, name: str = "ci") -> None:
        """Put a GatewayKey with all limits, which nobody reaches."""
        key = _copy("GatewayKey", namespace, name)
        key["spec"] |= dict.fromkeys(LIMIT_FIELDS, _MOST)
        key["status"]["digest"] = digest_key(secret)
        self.put(GATEWAY_KEYS, key)

    def put(self, resource: Resource, obj: Obj) -> None:
        """Put an object under its next version."""
        self._version += 1
        metadata = obj["metadata"]
        metadata["resourceVersion"] = str(self._version)
        known = self._objects[resource.plural]
        key = metadata["namespace"], metadata["name"]
        kind = "MODIFIED" if key in known else "ADDED"
        known[key] = msgspec.json.encode({"apiVersion": resource.api_version, "kind": resource.kind, **obj})
        for events in self._watches[resource.plural]:
            events.put_nowait(b'{"type":"%b","object":%b}\n' % (kind.encode(), known[key]))

    def put_shards(self) -> None:
        """Put the Secrets with the tokens of all services."""
        for name in GATEWAY_SHARDS:
            secret = _copy("Secret", CONTROLLER_NAMESPACE, name)
            secret["data"] = self._tokens[name]
            self.put(SECRETS, secret)

    # The server

    @contextlib.asynccontextmanager
    async def run(self) -> AsyncIterator[str]:
        """Serve until the context ends; return the URL."""
        async with serve_stub(self._answer) as url:
            try:
                yield url
            finally:
                for events in chain.from_iterable(self._watches.values()):
                    events.put_nowait(b"")

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a list or a watch: a field selector is one of a name, and all objects have the labels of selectors."""
        at, name = parse_path(request.path), request.query.get("fieldSelector", "").rpartition("=")[2]
        if "watch" in request.query:
            return await self._send_changes(request, at.plural, of_all=not at.namespace)
        items = [
            item
            for key, item in sorted(self._objects[at.plural].items())
            if at.namespace in ("", key[0]) and name in ("", key[1])
        ]
        begin, limit = int(request.query.get("continue", 0)), int(request.query["limit"])
        more = str(begin + limit) if begin + limit < len(items) else ""
        metadata = msgspec.json.encode({"resourceVersion": str(self._version), "continue": more})
        body = b'{"metadata":%b,"items":[%b]}' % (metadata, b",".join(items[begin : begin + limit]))
        return web.Response(body=body, content_type="application/json")

    async def _send_changes(self, request: web.BaseRequest, plural: str, *, of_all: bool) -> web.StreamResponse:
        """Send each change of a kind to a watch of all namespaces, and none to that of one: nothing changes there."""
        events: asyncio.Queue[bytes] = asyncio.Queue()
        self._watches[plural if of_all else ""].append(events)
        response = web.StreamResponse()
        with contextlib.suppress(ConnectionError):  # the gateway has ended
            await response.prepare(request)
            while event := await self._wait_for_event(events):
                await response.write(event)
        return response

    async def _wait_for_event(self, events: asyncio.Queue[bytes]) -> bytes:
        """Return the next change, or a bookmark if there is none for a while; empty: the server ends."""
        try:
            async with asyncio.timeout(_BOOKMARK_SECONDS):
                return await events.get()
        except TimeoutError:
            return b'{"type":"BOOKMARK","object":{"metadata":{"resourceVersion":"%d"}}}\n' % self._version


def write_kubeconfig(folder: Path, url: str) -> Path:
    """Write a kubeconfig for the server at `url`, and return its path."""
    path = folder / "kubeconfig.json"  # JSON is YAML
    config = {
        "current-context": "bench",
        "contexts": [{"name": "bench", "context": {"cluster": "bench", "user": "bench"}}],
        "clusters": [{"name": "bench", "cluster": {"server": url}}],
        "users": [{"name": "bench", "user": {"token": "bench"}}],
    }
    path.write_bytes(msgspec.json.encode(config))
    return path


def _copy(recorded: str, namespace: str, name: str) -> dict[str, Any]:
    """Return a recorded object under another name, with a uid of its own."""
    made: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(_RECORDED[recorded]))
    uid = hashlib.sha256(f"{recorded}/{namespace}/{name}".encode()).hexdigest()[:36]
    made["metadata"] |= {"namespace": namespace, "name": name, "uid": uid}
    return made
