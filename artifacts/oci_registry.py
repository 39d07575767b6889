"""Pulls of an artifact from a registry, by the distribution specification.

A tag is resolved once to the digest of a manifest; from then on everything has a digest, which is verified. Registries
issue tokens for minutes, so a download may have to obtain another one in its middle.
"""

import asyncio
import contextlib
import hashlib
import ipaddress
import os
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import msgspec
from yarl import URL

from artifacts.address_policy import Networks, find_stated_address
from artifacts.errors import ArtifactError
from artifacts.http_source import Authorizer, FixedAuthorization, Origin, connect
from artifacts.oci_manifest import (
    INDEX_TYPES,
    MANIFEST_TYPES,
    MAX_MANIFEST_BYTES,
    ArtifactManifest,
    parse_manifest,
)
from artifacts.registry_login import (
    RegistryLogin,
    TokenChallenge,
    api_host,
    may_get_password,
    read_challenge,
    read_token,
    wants_basic,
)
from artifacts.retry import DEFAULT_PATIENCE, Backoff, Patience
from artifacts.source import Source, is_digest

PLAIN_HTTP_VARIABLE: Final = "POMONA_PLAIN_HTTP_REGISTRIES"
"""Environment variable with the registries, HOST[:PORT], that are asked without TLS; those on loopback always are."""
_ALGORITHM: Final = "sha256:"
_TOKEN_BYTES: Final = 64 << 10


class ResolvedArtifact(NamedTuple):
    """An artifact at the digest of its manifest."""

    digest: str
    """Digest of the manifest or index that the source names: sha256:HEX."""
    manifest: ArtifactManifest


class _IssuedToken(msgspec.Struct):
    """The answer of a server of tokens; servers use either name."""

    token: str = ""
    access_token: str = ""


class Registry:
    """The repository of an oci:// source.

    Args:
        source: the source.
        token: USER:PASSWORD, or a bearer token; None for what everybody may pull.
        allowed_networks: private networks that may be reached.
        patience: time-outs and attempts.
        environment: where the registries without TLS are named.
    """

    def __init__(
        self,
        source: Source,
        *,
        token: str | None,
        allowed_networks: Networks = (),
        patience: Patience = DEFAULT_PATIENCE,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self._source = source
        self._patience = patience
        self._connections = _Connections(source, allowed_networks, patience)
        registry, _, self._repository = source.repo.partition("/")
        self._host = api_host(registry)
        if self._host != registry and "/" not in self._repository:
            self._repository = f"library/{self._repository}"
        scheme = "http" if is_plain_http(registry, environment) else "https"
        self._base = URL(f"{scheme}://{self._host}/v2/{self._repository}")
        login = read_token(token) if token else None
        self._authorizer = _RegistryAuthorizer(self._connections, self._base, self._repository, login)

    async def resolve(self, revision: str | None = None) -> ResolvedArtifact:
        """Read the manifest of a resolved revision, or of the source's tag or digest.

        Raises:
            ArtifactError: with a reason and whether a retry may help.
        """
        digest, parsed = await self._read_manifest(revision or self._source.revision)
        if isinstance(parsed, str):
            _, chosen = await self._read_manifest(parsed)
            if isinstance(chosen, str):
                raise self._refusal("the index names another index: give the digest of a manifest instead")
            parsed = chosen
        return ResolvedArtifact(digest, parsed)

    def open_blob(self, sha256: str) -> contextlib.AbstractAsyncContextManager[Origin]:
        """Open the blob of a digest, for ranges of it."""
        return self._connections.open(self._base / "blobs" / f"{_ALGORITHM}{sha256}", self._authorizer)

    async def _read_manifest(self, reference: str) -> tuple[str, ArtifactManifest | str]:
        text = await self._read_document(self._base / "manifests" / reference)
        digest = _ALGORITHM + hashlib.sha256(text).hexdigest()
        if reference.startswith(_ALGORITHM) and reference != digest:
            raise ArtifactError(
                "ChecksumMismatch",
                f"{self._source.display}: the registry sent a manifest with another digest than {reference}: it is "
                "damaged, or was replaced; push it again",
            )
        return digest, parse_manifest(self._source.display, text)

    async def _read_document(self, url: URL) -> bytes:
        backoff, accept = Backoff(self._patience), ", ".join((*MANIFEST_TYPES, *INDEX_TYPES))
        while True:
            try:
                async with self._connections.open(url, self._authorizer, accept) as origin:
                    return await origin.read_whole(MAX_MANIFEST_BYTES)
            except ArtifactError as error:
                pause = backoff.pause_seconds(error)
            await asyncio.sleep(pause)

    def _refusal(self, problem: str) -> ArtifactError:
        return ArtifactError("SourceRefused", f"{self._source.display}: {problem}")


class _RegistryAuthorizer:
    """The credentials for one repository: none until the registry asks for them."""

    def __init__(
        self, connections: "_Connections", registry: URL, repository: str, login: RegistryLogin | None
    ) -> None:
        self._connections = connections
        self._registry = registry
        self._repository = repository
        self._login = login
        self._header = f"Bearer {login.secret}" if login and not login.user else ""

    def header(self) -> str:
        """Return the Authorization header of the next request; empty for none."""
        return self._header

    async def answer(self, challenges: Sequence[str]) -> bool:
        """Obtain the credentials that the registry asks for.

        Raises:
            ArtifactError: the server of tokens refuses, or must not get the password.
        """
        login, before = self._login, self._header
        if login is not None and not login.user:
            return False  # a bearer token that the registry does not accept
        challenge = read_challenge(challenges)
        if challenge is not None:
            self._header = f"Bearer {await self._request_token(challenge, login)}"
        elif login is not None and wants_basic(challenges):
            self._header = login.basic
        return self._header != before

    async def _request_token(self, challenge: TokenChallenge, login: RegistryLogin | None) -> str:
        name = self._connections.source.display
        if login is not None and not may_get_password(self._registry, challenge.realm):
            raise ArtifactError(
                "SourceUnauthorized",
                f"{name}: the registry names {challenge.realm.origin()} for tokens, which gets no password of "
                f"{self._registry.host}, because it is another site or not https: get a token there, and give it in the "
                "key `token` of the Secret",
            )
        # A registry could ask for more than to pull, and for other repositories: its own scope is not used.
        scope = f"repository:{self._repository}:pull"
        url = challenge.realm.update_query(scope=scope, **({"service": challenge.service} if challenge.service else {}))
        authorizer = FixedAuthorization(login.basic if login is not None else "")
        async with self._connections.open(url, authorizer) as origin:
            text = await origin.read_whole(_TOKEN_BYTES)
        try:
            issued = msgspec.json.decode(text, type=_IssuedToken)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            issued = _IssuedToken()
        token = issued.token or issued.access_token
        if not token or not token.isascii() or not token.isprintable() or " " in token:
            problem = f"{challenge.realm.origin()} sent no token that can be used"
            raise ArtifactError("SourceRefused", f"{name}: {problem}")
        return token


class _Connections(NamedTuple):
    """The settings of all requests for one source."""

    source: Source
    networks: Networks
    patience: Patience

    def open(
        self, url: URL, authorizer: Authorizer, accept: str = ""
    ) -> contextlib.AbstractAsyncContextManager[Origin]:
        """Open the origin of a URL."""
        return connect(
            self.source,
            token=None,
            endpoint="",
            allowed_networks=self.networks,
            revision=None,
            patience=self.patience,
            url=str(url),
            authorizer=authorizer,
            accept=accept,
        )


def is_plain_http(registry: str, environment: Mapping[str, str]) -> bool:
    """Return whether a registry, HOST[:PORT], is asked without TLS: on loopback, or where the operator says so."""
    if registry in environment.get(PLAIN_HTTP_VARIABLE, "").split():
        return True
    stated = find_stated_address(URL(f"http://{registry}").raw_host or "")
    return stated is not None and ipaddress.ip_address(stated).is_loopback


def digest_of(revision: str) -> str | None:
    """Return the SHA-256 in a resolved revision, sha256:HEX; None if it is none."""
    digest = revision.removeprefix(_ALGORITHM)
    return digest if digest != revision and is_digest(digest) else None
