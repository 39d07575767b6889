"""A mutating webhook on the real API server that rewrites each Deployment of one namespace, as a policy engine does."""

import base64
import contextlib
import ssl
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from aiohttp import web

from kube.client import Client, Obj
from kube.resources import Resource
from tests.support import certificates

WEBHOOKS = Resource(
    "admissionregistration.k8s.io", "v1", "mutatingwebhookconfigurations", "MutatingWebhookConfiguration", False
)


@contextlib.asynccontextmanager
async def rewriting_deployments(client: Client, namespace: str, *operations: Obj) -> AsyncIterator[None]:
    """Apply the JSON patch `operations` to each Deployment of a namespace that is created or changed."""

    async def review(request: web.Request) -> web.Response:
        asked: dict[str, Any] = await request.json()
        patch = base64.b64encode(msgspec.json.encode(operations)).decode()
        answer = {"uid": asked["request"]["uid"], "allowed": True, "patchType": "JSONPatch", "patch": patch}
        return web.json_response({"apiVersion": asked["apiVersion"], "kind": asked["kind"], "response": answer})

    app = web.Application()
    app.router.add_post("/", review)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificates.HOST.certificate, certificates.HOST.key)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
    await site.start()
    port = runner.addresses[0][1]
    webhook = {
        "name": "rewrite.pomona.dev",
        "clientConfig": {
            "url": f"https://127.0.0.1:{port}/",
            "caBundle": base64.b64encode(certificates.CA.read_bytes()).decode(),
        },
        "rules": [
            {
                "apiGroups": ["apps"],
                "apiVersions": ["v1"],
                "resources": ["deployments"],
                "operations": ["CREATE", "UPDATE"],
            }
        ],
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
    }
    await client.create(WEBHOOKS, {"metadata": {"name": namespace}, "webhooks": [webhook]})
    try:
        yield
    finally:
        await client.delete(WEBHOOKS, namespace)
        await runner.cleanup()
