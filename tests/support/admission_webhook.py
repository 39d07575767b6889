"""A webhook that the real API server asks before it writes objects of one namespace, as it asks a policy engine.

It rewrites each object, refuses some, or never answers; its TLS, its AdmissionReviews and its registration are here.
"""

import asyncio
import base64
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Final

import msgspec
from aiohttp import web

from kube.client import Client, Obj
from kube.resources import Resource
from tests.controlplane.plane import ControlPlane
from tests.support import certificates

Review = Callable[[Obj], Awaitable[Obj]]
"""Function from an AdmissionRequest to its AdmissionResponse, without the uid."""

_GROUP: Final = "admissionregistration.k8s.io"
MUTATING: Final = Resource(_GROUP, "v1", "mutatingwebhookconfigurations", "MutatingWebhookConfiguration", False)
VALIDATING: Final = Resource(_GROUP, "v1", "validatingwebhookconfigurations", "ValidatingWebhookConfiguration", False)
NOBODY_LISTENS: Final = "https://127.0.0.1:1/"
"""The address of a webhook whose server has ended."""


def rewrite(*operations: Obj) -> Review:
    """Return a review that applies the JSON patch `operations` to each object."""
    patch = base64.b64encode(msgspec.json.encode(operations)).decode()

    async def review(_request: Obj) -> Obj:
        return {"allowed": True, "patchType": "JSONPatch", "patch": patch}

    return review


def rewrite_images(prefix: str) -> Review:
    """Return a review that puts a prefix before each image of a Deployment or Job that has none yet."""

    async def review(request: Obj) -> Obj:
        images = {
            f"/spec/template/spec/containers/{number}/image": container["image"]
            for number, container in enumerate(request["object"]["spec"]["template"]["spec"]["containers"])
        }
        operations = (
            {"op": "replace", "path": path, "value": prefix + image}
            for path, image in images.items()
            if not image.startswith(prefix)
        )
        return await rewrite(*operations)(request)

    return review


class RefuseOneIn:
    """A review that refuses one of `number` objects, and counts them all."""

    def __init__(self, number: int) -> None:
        self.asked = 0
        self._number = number

    async def __call__(self, _request: Obj) -> Obj:
        self.asked += 1
        if self.asked % self._number:
            return {"allowed": True}
        status = {"code": 400, "message": f"the policy refuses request {self.asked}"}
        return {"allowed": False, "status": status}


async def hang(_request: Obj) -> Obj:
    """Never answer."""
    await asyncio.Event().wait()
    return {}


@contextlib.asynccontextmanager
async def serving(review: Review) -> AsyncIterator[str]:
    """Serve a review over TLS, and yield its URL."""

    async def answer(request: web.Request) -> web.Response:
        asked = msgspec.json.decode(await request.read())
        response = {"uid": asked["request"]["uid"], **await review(asked["request"])}
        return web.json_response({"apiVersion": asked["apiVersion"], "kind": asked["kind"], "response": response})

    app = web.Application()
    app.router.add_post("/", answer)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificates.HOST.certificate, certificates.HOST.key)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
    try:
        yield f"https://127.0.0.1:{runner.addresses[0][1]}/"
    finally:
        await runner.cleanup()


def rule(*resources: str, operations: Sequence[str] = ("CREATE", "UPDATE")) -> Obj:
    """Return the rule by which a webhook is asked about these resources, such as `deployments` or `models/status`."""
    return {"apiGroups": ["*"], "apiVersions": ["*"], "operations": [*operations], "resources": [*resources]}


@contextlib.asynccontextmanager
async def registered(
    client: Client, kind: Resource, namespace: str, url: str, *rules: Obj, timeout_seconds: int = 10
) -> AsyncIterator[None]:
    """Register the webhook at `url`, MUTATING or VALIDATING, for writes in the namespace that meet one of the rules."""
    webhook = {
        "name": "policy.pomona.dev",
        "clientConfig": {"url": url, "caBundle": base64.b64encode(certificates.CA.read_bytes()).decode()},
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
        "rules": rules,
        "failurePolicy": "Fail",
        "timeoutSeconds": timeout_seconds,
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
    }
    await client.create(kind, {"metadata": {"name": namespace}, "webhooks": [webhook]})
    try:
        yield
    finally:
        await client.delete(kind, namespace)


async def try_deployment(plane: ControlPlane, namespace: str) -> Obj:
    """Return a Deployment as it would be stored if it were created; raises PlaneError if a webhook stops it.

    A webhook that is registered takes a moment to be known to the API server.
    """
    labels = {"a": "b"}
    template = {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "a", "image": "a"}]}}
    body = {"metadata": {"name": "probe"}, "spec": {"selector": {"matchLabels": labels}, "template": template}}
    path = f"/apis/apps/v1/namespaces/{namespace}/deployments?dryRun=All"
    tried: Obj = await plane.request("POST", path, body)
    return tried
