"""ModelRoutes on a real control plane: the controller as its own ServiceAccount says what of them has no effect."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from kube.client import Client, Obj
from kube.resources import GATEWAY_KEYS, INFERENCE_SERVICES, MODEL_ROUTES
from tests.cluster.shared_controller import SharedController
from tests.controlplane.plane import ControlPlane
from tests.support.eventually import eventually
from tests.support.namespaces import open_namespace


class RouteNamespaces:
    """The namespace of a route and another one, as their users handle them."""

    def __init__(self, client: Client, namespace: str, elsewhere: str) -> None:
        self.client = client
        self.namespace = namespace
        self.elsewhere = elsewhere

    async def make(self, *services: str, fallbacks: tuple[str, ...] = ()) -> None:
        """Make the route."""
        spec = {
            "services": [{"name": name} for name in services],
            "fallbacks": [{"name": name} for name in fallbacks],
        }
        metadata = {"name": "route", "namespace": self.namespace}
        await self.client.create(MODEL_ROUTES, {"metadata": metadata, "spec": spec})

    async def make_service(self, name: str, namespace: str = "", **spec: Any) -> None:
        metadata = {"name": name, "namespace": namespace or self.namespace}
        spec = {"modelRef": "tiny", "replicas": 0, **spec}
        await self.client.create(INFERENCE_SERVICES, {"metadata": metadata, "spec": spec})

    async def make_key(self, *services: str) -> None:
        metadata = {"name": "app", "namespace": self.namespace}
        await self.client.create(GATEWAY_KEYS, {"metadata": metadata, "spec": {"services": services}})

    async def admit(self, name: str, *namespaces: str) -> None:
        """Make a service of the other namespace admit these ones."""
        operation = {"op": "add", "path": "/spec/access", "value": {"namespaces": namespaces}}
        await self.client.patch_json(INFERENCE_SERVICES, name, self.elsewhere, [operation])

    async def reaches(self, reason: str, *texts: str) -> Obj:
        """Wait until the route has this reason, with these texts in its message."""

        async def has_reached() -> Obj:
            route = await self.client.get(MODEL_ROUTES, "route", self.namespace)
            (ready,) = route["status"]["conditions"]
            assert ready["observedGeneration"] == route["metadata"]["generation"]
            assert (ready["reason"], ready["status"] == "True") == (reason, reason in {"Valid", "HidesService"}), ready
            assert [text for text in texts if text not in ready["message"]] == [], ready["message"]
            return dict(ready)

        return await eventually(has_reached)


@pytest.fixture
async def routes(
    plane: ControlPlane, client: Client, namespace: str, shared_controller: SharedController
) -> AsyncIterator[RouteNamespaces]:
    await shared_controller.lend("--gateway")
    async with open_namespace(plane) as elsewhere:
        yield RouteNamespaces(client, namespace, elsewhere)


async def test_route_follows_its_services_and_keys(routes: RouteNamespaces) -> None:
    """Each change of another object that matters is seen by itself, without an edit of the route."""
    public = f"{routes.elsewhere}/public"
    await routes.make("chat", fallbacks=(public,))
    await routes.reaches("NoService", "InferenceService chat does not exist", public, "leads nowhere")
    await routes.make_service("chat")
    absent = await routes.reaches("NoService", f"{public} does not exist, or its spec.access", "to the other services")
    await routes.make_service("public", routes.elsewhere)
    await routes.admit("public", "another-team")
    await routes.admit("public", routes.namespace)
    await routes.reaches("NoKey", f"no GatewayKey of namespace {routes.namespace} opens a service of the route")
    await routes.admit("public", "another-team")
    closed = await routes.reaches("NoService", "to the other services")
    assert closed["message"] == absent["message"]
    await routes.admit("public", "*")
    await routes.reaches("NoKey")
    await routes.make_key("chat")
    await routes.reaches("Valid", "ask for model route")
    await routes.client.delete(INFERENCE_SERVICES, "public", routes.elsewhere)
    await routes.reaches("NoService", public)


async def test_route_says_that_it_hides_a_service(routes: RouteNamespaces) -> None:
    await routes.make_service("chat")
    await routes.make_key()
    await routes.make("chat")
    await routes.reaches("Valid")
    await routes.make_service("route")
    await routes.reaches("HidesService", f"InferenceService route only as {routes.namespace}/route")
    await routes.client.delete(INFERENCE_SERVICES, "route", routes.namespace)
    await routes.reaches("Valid")


async def test_controller_without_a_gateway_says_so(
    routes: RouteNamespaces, shared_controller: SharedController
) -> None:
    await shared_controller.lend()
    await routes.make("chat")
    await routes.reaches("NoGateway")
