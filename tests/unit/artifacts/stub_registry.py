"""A registry that answers as a test wants, which no real one does."""

import base64
import dataclasses
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from artifacts.repositories.registry_repository import RegistryRepository
from artifacts.repositories.repository import SourceAccess
from artifacts.source import parse
from tests.support.file_server import ALLOWED_NETWORKS
from tests.support.registry_artifacts import Artifact
from tests.support.stub_server import serve_stub
from tests.unit.artifacts.stored_weights import HURRIED


@dataclasses.dataclass
class StubRegistry:
    """The repository acme/tiny, and what was asked of it.

    Attributes:
        url: URL of the registry.
        manifests: documents by tag or digest.
        blobs: contents by digest.
        password: USER:PASSWORD that is required; empty for none.
        realm: server of tokens that a 401 names; empty for Basic, "own" for this server.
        issued: the tokens that it issues, one after the other; the last one is valid.
        blob_server: another server that blobs are redirected to.
        requests: path, query and Authorization header of each request.

    """

    url: str = ""
    manifests: dict[str, bytes] = dataclasses.field(default_factory=dict)
    blobs: dict[str, bytes] = dataclasses.field(default_factory=dict)
    password: str = ""
    realm: str = ""
    issued: list[str] = dataclasses.field(default_factory=list)
    blob_server: str = ""
    requests: list[tuple[str, dict[str, str], str]] = dataclasses.field(default_factory=list)

    def hold(self, artifact: Artifact, tag: str = "v1") -> None:
        """Keep an artifact."""
        self.manifests |= {tag: artifact.manifest, artifact.digest: artifact.manifest}
        self.blobs |= artifact.blobs

    def source(self, reference: str = ":v1") -> str:
        """Return the source of a tag or digest."""
        return f"oci://{self.url.removeprefix('http://')}/acme/tiny{reference}"

    def repository(self, reference: str = ":v1", token: str | None = None) -> RegistryRepository:
        """Return the repository of a tag or digest."""
        access = SourceAccess(
            token=token, endpoint="", file_root=None, allowed_networks=ALLOWED_NETWORKS, patience=HURRIED
        )
        return RegistryRepository(parse(self.source(reference)), access)

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request."""
        authorization = request.headers.get("Authorization", "")
        self.requests.append((request.path, dict(request.query), authorization))
        if request.path == "/token":
            return self._issue(authorization)
        if not self._lets_in(authorization):
            return web.Response(status=401, headers={"WWW-Authenticate": self._challenge()})
        kind, _, reference = request.path.removeprefix("/v2/acme/tiny/").partition("/")
        if kind == "blobs" and self.blob_server:
            return web.Response(status=307, headers={"Location": f"{self.blob_server}/{reference}"})
        content = (self.manifests if kind == "manifests" else self.blobs).get(reference)
        return web.Response(status=404) if content is None else _send(request, content)

    def _basic(self) -> str:
        return f"Basic {base64.b64encode(self.password.encode()).decode()}"

    def _lets_in(self, authorization: str) -> bool:
        if self.realm:
            return bool(self.issued) and authorization == f"Bearer {self.issued[-1]}"
        return not self.password or authorization == self._basic()

    def _challenge(self) -> str:
        realm = f"{self.url}/token" if self.realm == "own" else self.realm
        scope = "repository:victim/private:pull,push"
        return f'Bearer realm="{realm}",service="stub",scope="{scope}"' if self.realm else 'Basic realm="stub"'

    def _issue(self, authorization: str) -> web.Response:
        if self.password and authorization != self._basic():
            return web.Response(status=401)
        self.issued.append(f"token-{len(self.issued)}")
        return web.json_response({"token": self.issued[-1]})


def _send(request: web.BaseRequest, content: bytes) -> web.Response:
    wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range", ""))
    if not wanted:
        return web.Response(body=content, headers={"Accept-Ranges": "bytes"})
    first, last = int(wanted[1]), min(int(wanted[2] or len(content)), len(content) - 1)
    headers = {"Content-Range": f"bytes {first}-{last}/{len(content)}"}
    return web.Response(status=206, body=content[first : last + 1], headers=headers)


@asynccontextmanager
async def serve_registry(**settings: Any) -> AsyncIterator[StubRegistry]:
    """Serve a registry until the context ends."""
    registry = StubRegistry(**settings)
    async with serve_stub(registry.answer) as url:
        registry.url = url
        yield registry
