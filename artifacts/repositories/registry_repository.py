"""Artifacts of registries: `oci://REGISTRY/REPOSITORY:TAG`, by the distribution specification.

A tag is resolved once to the digest of a manifest, which is the revision; from then on everything has a digest, which
is verified. Registries issue tokens for minutes, so a download may have to obtain another one in its middle.
"""

import dataclasses
import hashlib
import ipaddress
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Final
from urllib.parse import quote

import msgspec
from yarl import URL

from artifacts.errors import ArtifactError
from artifacts.repositories.address_policy import find_stated_address
from artifacts.repositories.http_source import FixedAuthorizer, Origin, connect
from artifacts.repositories.oci_manifest import (
    INDEX_TYPES,
    MANIFEST_TYPES,
    MAX_MANIFEST_BYTES,
    ArtifactManifest,
    parse_manifest,
    require_files,
)
from artifacts.repositories.registry_login import (
    RegistryLogin,
    TokenChallenge,
    api_host,
    may_get_password,
    parse_login,
    read_challenge,
    wants_basic,
)
from artifacts.repositories.repository import (
    Listing,
    ReadableFile,
    RepositoryFile,
    SourceAccess,
    SourceResponse,
    is_wanted,
)
from artifacts.retry import retry_read
from artifacts.source import Source

PLAIN_HTTP_VARIABLE: Final = "POMONA_PLAIN_HTTP_REGISTRIES"
"""Environment variable with the registries, HOST[:PORT], that are asked without TLS; those on loopback always are."""
_ALGORITHM: Final = "sha256:"
_TOKEN_BYTES: Final = 64 << 10


class _IssuedToken(msgspec.Struct):
    """The answer of a token server; servers use either name."""

    token: str = ""
    access_token: str = ""


class RegistryRepository:
    """The artifact that an oci:// source names; its token is USER:PASSWORD, or a bearer token."""

    def __init__(self, source: Source, access: SourceAccess) -> None:
        self._source = source
        # The authorizer alone uses the token, as a login: any other code would send it as it is.
        self._access = dataclasses.replace(access, token=None)
        registry, _, name = source.repo.partition("/")
        host = api_host(registry)
        if host != registry and "/" not in name:
            name = f"library/{name}"  # an official image of Docker Hub
        scheme = "http" if is_plain_http(registry, os.environ) else "https"
        # URL of the repository in the registry's API.
        self._base = URL(f"{scheme}://{host}/v2/{name}")
        login = parse_login(access.token) if access.token else None
        self._authorizer = _RegistryAuthorizer(source, self._access, self._base, login)
        # Digest and content of each manifest that was requested, by tag or digest.
        self._resolved: dict[str, tuple[str, ArtifactManifest]] = {}

    async def resolve(self, revision: str | None) -> tuple[str, ArtifactManifest]:
        """Return digest and content of the manifest at a resolved revision, or at the tag or digest of the source.

        It is requested once. At an index, which lists manifests for several platforms, the digest is that of the index,
        and the content that of the one manifest that can be used.

        Raises:
            ArtifactError: with a reason and whether a retry may help.
        """
        reference = revision or self._source.revision
        if reference not in self._resolved:
            digest, content = await self._read_manifest(reference)
            # A text instead of a content is the digest of the manifest that an index names.
            if isinstance(content, str):
                _, content = await self._read_manifest(content)
            if isinstance(content, str):
                problem = "the index names another index: give the digest of a manifest instead"
                raise self._source.error("SourceRefused", problem)
            # A later call with this digest gets the same result.
            self._resolved[reference] = self._resolved[digest] = digest, content
        return self._resolved[reference]

    async def list_files(self, revision: str | None) -> Listing:
        """Read the manifest, whose layers are the files. Raises ArtifactError."""
        digest, manifest = await self.resolve(revision)
        files = require_files(self._source.display, manifest)
        return Listing(digest, [file for file in files if is_wanted(file.path)])

    def file_source(self, path: str, revision: str | None) -> Source:
        """Return the source of a file: the artifact at its tag or digest, and the path in it."""
        at = revision or self._source.revision
        separator = "@" if at.startswith(_ALGORITHM) else ":"
        text = f"oci://{self._source.repo}{separator}{at}/{quote(path)}"
        name = path.rpartition("/")[2]
        return Source(scheme="oci", text=text, file=name, repo=self._source.repo, revision=at, path=path)

    @asynccontextmanager
    async def open_file(self, path: str, revision: str | None) -> AsyncIterator[ReadableFile]:
        """Open the blob of a file."""
        digest, manifest = await self.resolve(revision)
        file = next((entry for entry in manifest.files if entry.path == path), None)
        if file is None:
            raise self._source.error("SourceNotFound", f"the artifact has no file {path!r}")
        url = self._base / "blobs" / f"{_ALGORITHM}{file.sha256}"
        source = self.file_source(path, digest)
        async with connect(source, self._access, url=str(url), authorizer=self._authorizer) as origin:
            yield _Blob(origin, file, digest, self._source)

    async def _read_manifest(self, reference: str) -> tuple[str, ArtifactManifest | str]:
        """Return the digest of a manifest with its content; that of an index, with the digest of its manifest.

        Raises ArtifactError.
        """
        url = str(self._base / "manifests" / reference)
        accept = ", ".join((*MANIFEST_TYPES, *INDEX_TYPES))

        async def read() -> bytes:
            """Request the manifest once; `retry_read` repeats it."""
            connection = connect(self._source, self._access, url=url, authorizer=self._authorizer, accept=accept)
            async with connection as origin:
                return await origin.read_whole(MAX_MANIFEST_BYTES)

        text = await retry_read(read, self._access.patience)

        # The digest is computed here, since the server could state any.
        digest = _ALGORITHM + hashlib.sha256(text).hexdigest()
        if reference.startswith(_ALGORITHM) and reference != digest:
            raise self._source.error(
                "ChecksumMismatch",
                f"the registry sent a manifest with another digest than {reference}: it is damaged, or was replaced; "
                "push it again",
            )
        return digest, parse_manifest(self._source.display, text)


class _Blob:
    """The blob of one file. Its digest makes all of its bytes the same, whatever a CDN says of their version."""

    def __init__(self, origin: Origin, file: RepositoryFile, revision: str, source: Source) -> None:
        self._origin = origin
        self._file = file
        # Digest of the artifact, which is the revision of all its files.
        self._revision = revision
        self._source = source

    @asynccontextmanager
    async def read(self, first: int = 0, last: int | None = None, validator: str = "") -> AsyncIterator[SourceResponse]:
        """Read bytes of the blob. Raises ArtifactError and RangeRefused."""
        del validator  # a blob never changes: its digest names its bytes
        async with self._origin.read(first, last) as response:
            if response.size_bytes != self._file.size_bytes:
                raise self._source.error(
                    "SourceRefused",
                    f"the registry sends {response.size_bytes} bytes for {self._file.path}, "
                    f"and its manifest states {self._file.size_bytes}: push the artifact again",
                )
            digest = self._file.sha256
            yield dataclasses.replace(response, validator=digest or "", revision=self._revision, sha256=digest)


class _RegistryAuthorizer:
    """The credentials for one repository: none until the registry asks for them."""

    def __init__(self, source: Source, access: SourceAccess, repository: URL, login: RegistryLogin | None) -> None:
        self._source = source
        self._access = access
        self._repository = repository
        self._login = login
        # Authorization header; empty until the registry asks for one. A login without a user is a bearer token, which
        # is sent from the first request on.
        self._header = f"Bearer {login.secret}" if login and not login.user else ""

    def authorize_headers(self, url: URL, headers: Mapping[str, str]) -> Mapping[str, str]:
        """Return the headers with the Authorization, once the registry has asked for it."""
        del url
        return {**headers, "Authorization": self._header} if self._header else headers

    async def answer_challenges(self, challenges: Sequence[str], refused: str) -> bool:
        """Obtain the credentials that the registry asks for; return True if the request is worth repeating with them.

        False: they are the same as before, so the registry does not accept the login; or it asks for another kind.

        Raises:
            ArtifactError: the token server refuses, or must not get the password.
        """
        login = self._login
        if login is not None and not login.user:
            return False  # a bearer token that the registry does not accept

        challenge = read_challenge(challenges)
        if challenge is not None and self._header == refused:  # else another request has obtained them meanwhile
            self._header = f"Bearer {await self._request_token(challenge, login)}"
        # The registry takes user and password themselves.
        elif login is not None and wants_basic(challenges):
            self._header = login.basic
        return self._header != refused

    async def _request_token(self, challenge: TokenChallenge, login: RegistryLogin | None) -> str:
        """Request a token to pull this repository. Raises ArtifactError if the server must not get the login."""
        name, server = self._source.display, challenge.realm.origin()
        if login is not None and not may_get_password(self._repository, challenge.realm):
            raise ArtifactError(
                "SourceUnauthorized",
                f"{name}: the registry issues tokens at {server}, which is another site than {self._repository.host} "
                "or has no https, so it gets no password: get a token there, and write it as key `token` of the Secret",
            )

        # A registry could ask for more than to pull, and for other repositories: its own scope is not used.
        query = {"scope": f"repository:{self._repository.path.removeprefix('/v2/')}:pull"}
        if challenge.service:
            query["service"] = challenge.service

        # The token server gets user and password; without a login, it issues tokens for public repositories.
        async with connect(
            self._source,
            self._access,
            url=str(challenge.realm.update_query(query)),
            authorizer=FixedAuthorizer(login.basic if login is not None else ""),
        ) as origin:
            text = await origin.read_whole(_TOKEN_BYTES)

        # The answer has the token in one of two fields.
        try:
            issued = msgspec.json.decode(text, type=_IssuedToken)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            issued = _IssuedToken()
        token = issued.token or issued.access_token
        if not token or not token.isascii() or not token.isprintable() or " " in token:
            raise ArtifactError("SourceRefused", f"{name}: {server} sent no token that can be used")
        return token


def is_plain_http(registry: str, environment: Mapping[str, str]) -> bool:
    """Return whether a registry, HOST[:PORT], is asked without TLS: on loopback, or where the operator says so."""
    if registry in environment.get(PLAIN_HTTP_VARIABLE, "").split():
        return True
    stated = find_stated_address(URL(f"http://{registry}").raw_host or "")
    return stated is not None and ipaddress.ip_address(stated).is_loopback
