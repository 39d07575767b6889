"""The gateway from a user's side: one address and one key for services in pods and on hosts, with real clients."""

import asyncio
import contextlib
import itertools
import json
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import anthropic
import openai
import pytest
import pytest_asyncio
from aiohttp import web

from crds.meta import (
    API_VERSION,
    LABEL_HOST,
    LABEL_MANAGED_BY,
    LABEL_SERVICE_NAME,
    LABEL_SLICE_MANAGED_BY,
    MANAGED_BY,
)
from gateway.cluster.affinity import find_affinity
from gateway.cluster.endpoint_choice import EndpointGroup, GatewayEndpoint, order_endpoints
from gateway.http.headers import Headers
from kube.client import Obj
from kube.resources import ENDPOINT_SLICES, GATEWAY_KEYS, INFERENCE_SERVICES, MODEL_ROUTES
from tests.cluster.conftest import HUB_PORT, StartMetalHost
from tests.cluster.main_job.cluster import GIB, Cluster
from tests.cluster.shared_controller import SharedController
from tests.controlplane import pomona_image
from tests.controlplane.members import MetalHost
from tests.controlplane.network import ADDRESS
from tests.controlplane.plane import ControlPlane, PlaneError
from tests.controlplane.process import Process
from tests.support.eventually import eventually
from tests.support.namespaces import open_namespace
from tests.support.pomona_command import Pomona

URL = "http://127.0.0.1:8095"
HEALTH = "http://127.0.0.1:8096"
FAST_PORT = HUB_PORT + 2
"""Port of the bridge of the first of two engines."""
QUESTION: Any = [{"role": "user", "content": "Hi"}]


class Gateway(NamedTuple):
    """The process of a gateway, and how clients reach it."""

    process: Process
    cluster: Cluster
    clients: contextlib.AsyncExitStack
    """Closes the clients that were made."""

    async def make_key(self, name: str, **spec: Any) -> str:
        """Apply a GatewayKey, and return the key that the controller has made for it."""
        return await self.cluster.gateway_key(name, **spec)

    async def openai(self, key: str) -> openai.AsyncOpenAI:
        """Return a client of OpenAI's API, which tries nothing again."""
        client = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=key, max_retries=0)
        return await self.clients.enter_async_context(client)

    async def anthropic(self, key: str) -> anthropic.AsyncAnthropic:
        """Return a client of Anthropic's API, which sends its key as a bearer token and tries nothing again."""
        client = anthropic.AsyncAnthropic(base_url=URL, auth_token=key, max_retries=0)
        return await self.clients.enter_async_context(client)


async def is_gateway_ready() -> bool:
    async with aiohttp.ClientSession() as session, session.get(f"{HEALTH}/readyz") as response:
        return response.status == 200


@pytest_asyncio.fixture
async def gateway(
    plane: ControlPlane, cluster: Cluster, shared_controller: SharedController, tmp_path: Path, watched: list[Process]
) -> AsyncIterator[Gateway]:
    await shared_controller.lend("--gateway")
    kubeconfig = await plane.service_account_kubeconfig("pomona-system", "pomona-gateway")
    argv = [
        *(*pomona_image.find_program(pomona_image.find_root()), "gateway", f"--kubeconfig={kubeconfig}"),
        *("--address=127.0.0.1:8095", "--metrics-address=127.0.0.1:8096", "--drain-seconds=5"),
    ]
    process = Process("gateway", argv, tmp_path / "gateway.log")
    watched.append(process)
    process.start()

    await eventually(is_gateway_ready)
    async with contextlib.AsyncExitStack() as clients:
        yield Gateway(process, cluster, clients)
    watched.remove(process)
    if process.running:
        assert await process.stop() == 0


async def test_one_key_reaches_a_pod_and_a_host_by_both_apis(
    gateway: Gateway, cluster: Cluster, host: MetalHost
) -> None:
    del host
    await cluster.apply(cluster.model(), cluster.service("in-pod", "cpu"), cluster.service("on-host", "metal"))
    key = await gateway.make_key("ci")
    await cluster.ready("in-pod", "on-host")
    client, messages = await gateway.openai(key), (await gateway.anthropic(key)).messages
    models = await client.models.list()
    assert [model.id for model in models.data] == ["in-pod", "on-host"]
    for name in ("in-pod", "on-host"):
        answer = await client.chat.completions.create(model=name, messages=QUESTION, max_tokens=8)
        assert "Hello" in (answer.choices[0].message.content or "")
        assert answer.model == name
        stream = await client.chat.completions.create(model=name, messages=QUESTION, max_tokens=8, stream=True)
        chunks = [chunk async for chunk in stream]
        assert "Hello" in "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        message = await messages.create(model=name, messages=QUESTION, max_tokens=8)
        assert any("Hello" in getattr(block, "text", "") for block in message.content)
        assert (await messages.count_tokens(model=name, messages=QUESTION)).input_tokens > 0


async def test_replica_that_dies_is_passed_over_and_its_stream_ends_by_an_error(
    gateway: Gateway, cluster: Cluster, metal_host: StartMetalHost
) -> None:
    """Nothing is lost silently, and the requests that follow are answered by the host that is left."""
    hosts = [await metal_host(name, f"--memory-budget={64 * GIB}") for name in ("studio-1", "studio-2")]
    spread = cluster.service("chat", "metal", replicas=2, contextLength=16384, parallel=1)
    await cluster.apply(cluster.model(file="loop.gguf"), spread)
    key = await gateway.make_key("ci")
    await cluster.ready("chat")
    client = await gateway.openai(key)
    sessions = find_sessions(await cluster.urls("chat"), f"{cluster.namespace}/chat", cluster.namespace)
    begun = {session: asyncio.Event() for session in sessions.values()}

    async def read_stream(session: str) -> None:
        """Read a stream of a session to its end."""
        stream = await client.chat.completions.create(
            model="chat", messages=QUESTION, max_tokens=10_000, stream=True, extra_headers={"session-id": session}
        )
        async for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content:
                begun[session].set()

    # One stream at each host, of which the first loses its network.
    lost_url = next(url for url in sessions if url.startswith(f"http://{hosts[0].host.address}:"))
    streams = {url: asyncio.create_task(read_stream(session)) for url, session in sessions.items()}
    for event in begun.values():
        await asyncio.wait_for(event.wait(), 60)
    await hosts[0].host.cut()
    for _ in range(5):
        answer = await client.chat.completions.create(model="chat", messages=QUESTION, max_tokens=2)
        assert answer.choices[0].message.content
    outcomes = dict(zip(streams, await asyncio.gather(*streams.values(), return_exceptions=True), strict=True))
    assert {url: type(outcome) for url, outcome in outcomes.items() if outcome} == {lost_url: openai.APIError}


def find_sessions(urls: Sequence[str], service: str, namespace: str) -> dict[str, str]:
    """Return a session for each endpoint of a service whose requests go to it first."""
    group = EndpointGroup([GatewayEndpoint(f"{service} {url}") for url in urls])
    sessions = {}
    for number in itertools.count():
        session = str(number)
        affinity = find_affinity(Headers([(b"session-id", session.encode())]), "chat", {}, namespace)
        assert affinity is not None
        sessions[order_endpoints(group, affinity)[0].uid.partition(" ")[2]] = session
        if len(sessions) == len(urls):
            break
    return sessions


async def test_conversations_are_divided_by_the_speeds_in_the_status(gateway: Gateway, cluster: Cluster) -> None:
    """A pod on a fast node and a host, as stubs; the gateway reads both speeds with no right but those that it has."""
    await cluster.apply(cluster.model(), cluster.service("chat", "cpu", replicas=0))
    key = await gateway.make_key("ci")
    client, answered = await gateway.openai(key), Counter[str]()

    def make_engine(name: str) -> web.Application:
        async def answer(_request: web.Request) -> web.Response:
            answered[name] += 1
            return web.json_response({"object": "chat.completion", "id": "1", "choices": []})

        engine = web.Application()
        engine.router.add_post("/v1/chat/completions", answer)
        return engine

    async def ask(session: int) -> None:
        await client.chat.completions.create(
            model="chat", messages=QUESTION, max_tokens=1, extra_headers={"session-id": f"{session}"}
        )

    async with contextlib.AsyncExitStack() as engines:
        for port, name, labels, place in (
            (FAST_PORT, "fast", {}, {"nodeName": "gpu-a"}),
            (FAST_PORT + 1, "slow", {LABEL_HOST: "studio-9"}, {}),
        ):
            runner = web.AppRunner(make_engine(name))
            await runner.setup()
            engines.push_async_callback(runner.cleanup)
            await web.TCPSite(runner, ADDRESS, port).start()
            await cluster.client.create(
                ENDPOINT_SLICES,
                {
                    "metadata": {
                        "name": f"chat-{name}",
                        "namespace": cluster.namespace,
                        "labels": {
                            LABEL_SERVICE_NAME: "chat",
                            LABEL_SLICE_MANAGED_BY: "test",
                            LABEL_MANAGED_BY: MANAGED_BY,
                            **labels,
                        },
                    },
                    "addressType": "IPv4",
                    "ports": [{"name": "http", "port": port, "protocol": "TCP"}],
                    "endpoints": [{"addresses": [ADDRESS], **place}],
                },
            )

        async def both_answer() -> bool:
            await asyncio.gather(*[ask(session) for session in range(20)], return_exceptions=True)  # refused at first
            return len(answered) == 2

        await eventually(both_answer)
        speeds = {"gpu-a": "180", "studio-9": "20.0"}
        shown = [{"node": node, "tokensPerSecond": rate} for node, rate in speeds.items()]
        patch = json.dumps({"status": {"nodeSpeeds": shown}})
        await cluster.kubectl("patch", "isvc", "chat", "--subresource=status", "--type=merge", f"--patch={patch}")

        async def divided_by_speed() -> bool:
            answered.clear()
            for begin in range(0, 200, 20):
                await asyncio.gather(*[ask(session) for session in range(begin, begin + 20)])
            return 150 <= answered["fast"] < 200 and answered.total() == 200

        await eventually(divided_by_speed)


async def test_key_opens_only_its_services_and_a_wrong_one_none(gateway: Gateway, cluster: Cluster) -> None:
    await cluster.apply(cluster.model(), cluster.service("chat", "cpu"))
    key = await gateway.make_key("ci", services=["other-*"])
    await cluster.ready("chat")
    client = await gateway.openai(key)
    with pytest.raises(openai.NotFoundError, match="no model is served here"):
        await client.chat.completions.create(model="chat", messages=QUESTION)
    with pytest.raises(openai.AuthenticationError, match="missing, wrong, suspended or expired"):
        await (await gateway.openai("wrong")).models.list()


async def test_limits_and_suspension_of_a_key_reach_its_clients(gateway: Gateway, cluster: Cluster) -> None:
    """A client of a suspended key learns within five seconds that its stream is not whole."""
    await cluster.apply(cluster.model(file="loop.gguf"), cluster.service("chat", "cpu", contextLength=16384))
    key, limited = await gateway.make_key("ci"), await gateway.make_key("limited", requestsPerMinute=1)
    await cluster.ready("chat")

    client = await gateway.openai(limited)
    await client.chat.completions.create(model="chat", messages=QUESTION, max_tokens=1)
    with pytest.raises(
        openai.RateLimitError, match=r"limited: spec.requestsPerMinute 1 is used up: try again in \d+ s"
    ):
        await client.chat.completions.create(model="chat", messages=QUESTION, max_tokens=1)

    client = await gateway.openai(key)
    stream = await client.chat.completions.create(model="chat", messages=QUESTION, max_tokens=10_000, stream=True)
    await anext(aiter(stream))
    await cluster.kubectl("patch", "gatewaykey", "ci", "--type=merge", '--patch={"spec":{"suspend":true}}')
    began = time.monotonic()
    with pytest.raises(openai.APIError, match="was revoked, suspended or replaced"):
        async for _ in stream:
            pass
    assert time.monotonic() - began < 5
    with pytest.raises(openai.AuthenticationError):
        await client.models.list()


async def test_tenant_who_may_only_make_routes_reaches_nothing_new(
    plane: ControlPlane, gateway: Gateway, cluster: Cluster, tmp_path: Path
) -> None:
    """A route of theirs works, with a service that stands in for another, and opens nothing that the key does not."""
    verbs, kinds = "--verb=get,create,patch", "--resource=modelroutes.inference.pomona.dev"
    await cluster.kubectl("create", "role", "router", verbs, kinds)
    await cluster.kubectl("create", "rolebinding", "router", "--role=router", "--user=router")
    asleep, large = (cluster.service(name, "cpu", replicas=0) for name in ("asleep", "large"))
    await cluster.apply(cluster.model(), cluster.service("chat", "cpu"), asleep, large)
    key = await gateway.make_key("ci", services=["chat", "asleep", "fast", "spy", "back-door"])
    async with open_namespace(plane) as elsewhere:
        foreign = cluster.service("secret", "cpu", replicas=0)
        await cluster.client.create(
            INFERENCE_SERVICES, foreign | {"metadata": {"name": "secret", "namespace": elsewhere}}
        )
        targets = {"fast": "asleep", "spy": f"{elsewhere}/secret", "back-door": "large"}
        routes = [
            {
                "apiVersion": API_VERSION,
                "kind": "ModelRoute",
                "metadata": {"name": name},
                "spec": {"services": [{"name": target}]}
                | ({"fallbacks": [{"name": "chat", "when": ["Unavailable"]}]} if name == "fast" else {}),
            }
            for name, target in targets.items()
        ]
        path = tmp_path / "routes.json"
        path.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": routes}))
        await cluster.kubectl("--as=router", "apply", f"--filename={path}")
        for attempt in (
            ("patch", "gatewaykey", "ci", "--type=merge", '--patch={"spec":{"services":[]}}'),
            ("patch", "isvc", "large", "--type=merge", '--patch={"spec":{"replicas":1}}'),
            ("get", "isvc,gatewaykeys,secrets"),
        ):
            with pytest.raises(PlaneError, match="orbidden"):
                await cluster.kubectl("--as=router", *attempt)

        async def are_judged() -> bool:
            found = (await cluster.client.list(MODEL_ROUTES, cluster.namespace)).items
            reasons = {route["metadata"]["name"]: route["status"]["conditions"][0]["reason"] for route in found}
            return reasons == {"fast": "Valid", "spy": "NoService", "back-door": "NoKey"}

        await eventually(are_judged)
        await cluster.ready("chat")
        client = await gateway.openai(key)
        assert [model.id for model in (await client.models.list()).data] == ["asleep", "chat", "fast"]
        answer = await client.chat.completions.with_raw_response.create(model="fast", messages=QUESTION, max_tokens=8)
        assert answer.headers["x-pomona-service"] == f"{cluster.namespace}/chat"
        said = answer.parse()
        assert (said.model, "Hello" in (said.choices[0].message.content or "")) == ("fast", True)
        stream = await client.chat.completions.create(model="fast", messages=QUESTION, max_tokens=8, stream=True)
        assert {chunk.model async for chunk in stream} == {"fast"}
        for name in ("spy", "back-door"):
            with pytest.raises(
                openai.NotFoundError, match="is not served here: set `model` to one that is: asleep, chat"
            ):
                await client.chat.completions.create(model=name, messages=QUESTION)


@pytest_asyncio.fixture
async def gateway_pod(plane: ControlPlane, tmp_path: Path) -> AsyncIterator[None]:
    """A pod that stands for the process of the gateway, with the labels and the port of the chart's."""
    labels = {"app.kubernetes.io/name": "pomona", "app.kubernetes.io/component": "gateway"}
    ports = [{"name": "metrics", "containerPort": int(HEALTH.rpartition(":")[2])}]
    restricted = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    container = {"name": "gateway", "image": "none", "ports": ports, "securityContext": restricted}
    manifest = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "gateway-of-test", "namespace": "pomona-system", "labels": labels},
        "spec": {"schedulerName": "none", "containers": [container]},
    }
    path = tmp_path / "pod.json"
    path.write_text(json.dumps(manifest))
    pod = ("pod", "gateway-of-test", "--namespace=pomona-system")
    status = {"status": {"phase": "Running", "podIP": "127.0.0.1", "podIPs": [{"ip": "127.0.0.1"}]}}
    await plane.kubectl("create", f"--filename={path}")
    await plane.kubectl("patch", *pod, "--subresource=status", f"--patch={json.dumps(status)}")
    yield
    await plane.kubectl("delete", *pod, "--grace-period=0", "--force")


@pytest.mark.usefixtures("gateway_pod")
async def test_usage_of_a_key_is_shown_to_its_tenant_and_outlives_restarts(
    plane: ControlPlane, gateway: Gateway, cluster: Cluster, shared_controller: SharedController
) -> None:
    """A tenant that may only read the keys of its namespace sees how much each was used."""
    await cluster.kubectl("create", "role", "reader", "--verb=get,list", "--resource=gatewaykeys.inference.pomona.dev")
    await cluster.kubectl("create", "rolebinding", "reader", "--role=reader", "--user=reader")
    await cluster.apply(cluster.model(), cluster.service("chat", "cpu"))
    key, _ = await gateway.make_key("ci"), await gateway.make_key("idle")
    await cluster.ready("chat")

    async def use_key(times: int) -> None:
        client = await gateway.openai(key)
        for _ in range(times):
            await client.chat.completions.create(model="chat", messages=QUESTION, max_tokens=2)

    async def read_usage(name: str, requests: int) -> Obj:
        """Return the usage of a key once it has so many requests."""

        async def is_shown() -> Obj:
            usage: Obj = (await cluster.client.get(GATEWAY_KEYS, name, cluster.namespace))["status"]["usage"]
            assert usage["requests"] == requests
            return usage

        return await eventually(is_shown)

    await use_key(1)
    used, idle = await read_usage("ci", 1), await read_usage("idle", 0)
    assert used["tokens"] > 2
    assert "lastUsedAt" not in idle
    head, *rows = (await cluster.kubectl("--as=reader", "get", "gatewaykeys")).splitlines()
    assert "LAST USED   REQUESTS   TOKENS" in head
    cells = {row.split()[0]: row[head.index("LAST USED") : head.index("AGE")].split() for row in rows}
    assert cells["ci"][1:] == ["1", str(used["tokens"])]
    assert cells["idle"] == ["0", "0"]
    listed = await Pomona(plane, cluster.namespace).succeed("key", "list")
    assert re.search(rf"^ci .* \d+[sm] ago +1 +{used['tokens']} ", listed, re.MULTILINE)
    assert re.search(r"^idle .* not in \d+[sm] +0 +0 ", listed, re.MULTILINE)

    # Another process of the gateway counts from 0, and another controller adds that to what it finds.
    assert await gateway.process.stop() == 0
    gateway.process.start()
    await shared_controller.lend_new("--gateway")
    await eventually(is_gateway_ready)
    await use_key(2)
    long_ago = {"status": {"usage": {"lastUsedAt": "2026-01-01T00:00:00Z"}}}
    patch = ("--subresource=status", "--type=merge", f"--patch={json.dumps(long_ago)}")
    await cluster.kubectl("patch", "gatewaykey", "ci", *patch)
    assert [entry["requests"] for entry in (await read_usage("ci", 3))["counted"]] == [2]
