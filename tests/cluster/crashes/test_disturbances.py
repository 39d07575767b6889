"""Controllers that are refused, cut off, misinformed and doubled end in the same state as an undisturbed one.

`make crash` runs these tests, which take minutes; `make test` does not collect them.
"""

import base64
import contextlib
import secrets
import ssl
from collections.abc import AsyncIterator, Collection
from typing import Any, Final

import msgspec
import pytest
from aiohttp import web

from kube.client import Client, Obj
from kube.resources import DEPLOYMENTS, INFERENCE_SERVICES, MODELS, Resource
from tests.cluster.crashes.conftest import MakeWorld
from tests.controlplane.plane import ControlPlane, PlaneError
from tests.support import certificates
from tests.support.crash_scenarios import METAL, POD, SCENARIOS, live_on_hosts, ready
from tests.support.crash_world import GIB, CrashWorld
from tests.support.disturbances import DisturbedWatches, RandomFaults
from tests.support.eventually import eventually

WEBHOOKS: Final = Resource(
    "admissionregistration.k8s.io", "v1", "validatingwebhookconfigurations", "ValidatingWebhookConfiguration", False
)
ONE_IN: Final = 8
"""One of so many calls and events is disturbed."""
EVERY: Final = 3


@pytest.mark.parametrize("scenario", ["live_in_pods", "live_on_hosts"])
async def test_two_disturbed_leaders_reach_the_state_of_one_undisturbed(make_world: MakeWorld, scenario: str) -> None:
    """Two controllers work at once throughout, which is longer than any change of leaders takes."""
    seed = secrets.randbelow(1_000_000)
    async with make_world(None) as undisturbed, undisturbed.running():
        await SCENARIOS[scenario](undisturbed)
    watches: list[DisturbedWatches] = []
    faults = RandomFaults(seed, ONE_IN)

    def disturb(transport: Any) -> DisturbedWatches:
        watches.append(DisturbedWatches(transport, seed, ONE_IN))
        return watches[0]

    async with make_world(undisturbed, disturb) as world:
        world.transport.plan = faults
        try:
            async with world.running(controllers=2):
                await SCENARIOS[scenario](world)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
    assert faults.injected > 10, seed
    assert watches[0].injected > 10, seed


class Webhook:
    """An admission webhook: it refuses every third request, or never answers."""

    def __init__(self, *, hangs: bool = False) -> None:
        self.asked = 0
        self._hangs = hangs

    async def answer(self, request: web.Request) -> web.Response:
        """Answer one AdmissionReview."""
        review = msgspec.json.decode(await request.read())
        self.asked += 1
        if self._hangs:
            await request.content.wait_eof()
            await eventually(lambda: request.transport is None)
        response: Obj = {"uid": review["request"]["uid"], "allowed": self.asked % EVERY != 0}
        if not response["allowed"]:
            response["status"] = {"code": 400, "message": f"the policy refuses request {self.asked}"}
        return web.json_response({**review, "response": response, "request": None})


def _tls() -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificates.HOST.certificate, certificates.HOST.key)
    return context


@contextlib.asynccontextmanager
async def serving(webhook: Webhook) -> AsyncIterator[int]:
    """Serve the webhook over TLS, and yield its port."""
    app = web.Application()
    app.router.add_post("/", webhook.answer)
    runner = web.AppRunner(app, shutdown_timeout=1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=_tls()).start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def registered(
    client: Client, namespace: str, port: int, *resources: str, created: Collection[str] = ()
) -> AsyncIterator[None]:
    """Register the webhook on `port` for the writes of these resources in the namespace.

    It is asked about those in `created` only when they are created.
    """
    every = {"apiGroups": ["*"], "apiVersions": ["*"]}
    rules = [{**every, "operations": ["CREATE", "UPDATE"], "resources": [*resources]}]
    if created:
        rules.append({**every, "operations": ["CREATE"], "resources": [*created]})
    webhook = {
        "name": "refusing.pomona.dev",
        "clientConfig": {
            "url": f"https://127.0.0.1:{port}/",
            "caBundle": base64.b64encode(certificates.CA.read_bytes()).decode(),
        },
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
        "rules": rules,
        "failurePolicy": "Fail",
        "timeoutSeconds": 1,
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
    }
    await client.create(WEBHOOKS, {"metadata": {"name": namespace}, "webhooks": [webhook]})
    try:
        yield
    finally:
        await client.delete(WEBHOOKS, namespace)


async def refuses_deployments(plane: ControlPlane, namespace: str) -> bool:
    """Decide whether the API server asks the webhook by now."""
    container = {"name": "a", "image": "a"}
    labels = {"a": "b"}
    template = {"metadata": {"labels": labels}, "spec": {"containers": [container]}}
    body = {"metadata": {"name": "probe"}, "spec": {"selector": {"matchLabels": labels}, "template": template}}
    try:
        await plane.request("POST", f"{DEPLOYMENTS.path(namespace)}?dryRun=All", body)
    except PlaneError as error:
        return "failed calling webhook" in str(error)
    return False


async def test_policy_that_refuses_every_third_write_delays_and_changes_nothing(
    make_world: MakeWorld, client: Client
) -> None:
    async with make_world(None) as undisturbed, undisturbed.running():
        await live_on_hosts(undisturbed)
    webhook = Webhook()
    async with make_world(undisturbed) as world, serving(webhook) as port:
        resources = ("services", "secrets", "inferenceservices/status")
        # A refused binding is tried on another host, which is another state, and a good one.
        policy = registered(client, world.namespace, port, *resources, created=["metalprocesses"])
        async with policy, world.running():
            await live_on_hosts(world)
    assert webhook.asked >= 2 * EVERY


@pytest.mark.parametrize("hangs", [False, True], ids=["connection refused", "no answer"])
async def test_dead_webhook_of_deployments_stops_no_service_on_hosts(
    make_world: MakeWorld, plane: ControlPlane, client: Client, hangs: bool
) -> None:
    async def serve(world: CrashWorld) -> None:
        await world.make(MODELS, "tiny", source="http://models.example/tiny.gguf", memoryBytes=GIB)
        await world.host()
        await world.make(INFERENCE_SERVICES, "chat", modelRef="tiny", hardware=POD, contextLength=512)
        await world.make(INFERENCE_SERVICES, "late", modelRef="tiny", hardware=METAL)

    async with make_world(None) as undisturbed, undisturbed.running():
        await serve(undisturbed)
        await undisturbed.checkpoint("both serve", lambda state: ready(state, deployments=1, processes=1))
    async with make_world(undisturbed) as world, serving(Webhook(hangs=True)) as port, world.running():
        async with registered(client, world.namespace, port if hangs else 1, "deployments"):
            await eventually(lambda: refuses_deployments(plane, world.namespace))
            await serve(world)

            async def told() -> bool:
                late = await client.get(INFERENCE_SERVICES, "late", world.namespace)
                chat = await client.get(INFERENCE_SERVICES, "chat", world.namespace)
                return late["status"]["phase"] == "Ready" and "webhook" in str(chat["status"]["conditions"])

            await eventually(told)
        await world.checkpoint("both serve", bool)
