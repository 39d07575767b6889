"""HTTP requests to a source: one ranged request with a checked response, used to fetch and to inspect.

Every fault is raised as an ArtifactError that says whether a retry can help. Redirects are followed here, hop by hop:
the token goes to the source's own origin only (a hub redirects to a CDN), and no hop may lead to a private address.
Proxies of the environment are used; passwords of a netrc file are not, since a Model decides which host is asked.
"""

import asyncio
import contextlib
import dataclasses
import functools
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import NamedTuple, Protocol
from urllib.request import getproxies, proxy_bypass

import aiohttp
from yarl import URL

from artifacts.errors import ArtifactError
from artifacts.repositories.address_policy import (
    IN_PRIVATE_NETWORK,
    PrivateAddressError,
    find_stated_address,
    is_allowed,
    open_socket,
)
from artifacts.repositories.repository import RangeRefused, SourceAccess, SourceResponse
from artifacts.repositories.s3_access import read_digest
from artifacts.source import HUB_TOKEN_VARIABLE, TOKEN_VARIABLE, Source, is_digest
from kube.public_trust import read_public_trust

_CONTENT_RANGE = re.compile(r"bytes (?P<first>\d{1,19})-\d{1,19}/(?P<size>\d{1,19}|\*)", re.ASCII)
# Bytes that aiohttp has buffered are lost when a connection breaks. The block is large enough for few thread switches,
# and small enough to be requested again.
_BLOCK_BYTES = 256 << 10
_LOGIN_REQUIRED = 401
_UNAUTHORIZED = (_LOGIN_REQUIRED, 403)
_GONE = (404, 410)
_TRY_AGAIN = (408, 425, 429)
_OVERLOAD = (429, 503)
_SERVER_ERROR = 500
_FIRST_REDIRECT = 300
_FIRST_ERROR = 400
_REFUSAL_BYTES = 64 << 10
_PARTIAL = 206
_RANGE_REFUSED = 416
_REDIRECTS = (301, 302, 303, 307, 308)
_MOST_REDIRECTS = 10
_LONGEST_PAUSE_SECONDS = 3600.0
"""The longest pause that a server can ask for."""
_MOST_DIGITS = 9
_PROXY_SCHEMES = ("http://", "https://")
_OTHER_TOKEN = (
    f"set another token (spec.sourceSecretRef; in the environment {HUB_TOKEN_VARIABLE} for the hub, {TOKEN_VARIABLE} "
    "for another server), accept the licence of the repository, or check that the source exists"
)
_OTHER_LOGIN = (
    "give a login that may pull it (spec.sourceSecretRef; in the environment DOCKER_CONFIG, or "
    f"{TOKEN_VARIABLE}=USER:PASSWORD), or check that the repository exists"
)
_NO_ARTIFACT = "the registry has no such repository, tag, digest or blob: check the source"


class Authorizer(Protocol):
    """Credentials for the own origin of a source."""

    def authorize_headers(self, url: URL, headers: Mapping[str, str]) -> Mapping[str, str]:
        """Return the headers of a GET of `url`: those given, and the credentials. Raises ArtifactError."""

    async def answer_challenges(self, challenges: Sequence[str], refused: str) -> bool:
        """Obtain other credentials than `refused` by these WWW-Authenticate headers; return whether there are any."""


class FixedAuthorizer(NamedTuple):
    """Credentials that are known beforehand."""

    value: str

    def authorize_headers(self, url: URL, headers: Mapping[str, str]) -> Mapping[str, str]:
        """Return the headers with the Authorization."""
        del url
        return {**headers, "Authorization": self.value} if self.value else headers

    async def answer_challenges(self, challenges: Sequence[str], refused: str) -> bool:
        """Return False, as there are no other credentials."""
        del challenges, refused
        return False


ExplainRefusal = Callable[[int, Mapping[str, str], bytes], ArtifactError | None]
"""Called with status, headers and the start of the body of a refusal; None leaves the error to the status."""


class _Received(NamedTuple):
    """A response after all redirects, and the headers of the hub's own response, which redirects to a CDN."""

    response: aiohttp.ClientResponse
    hub_headers: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Origin:
    """A source on a server; made by `connect`.

    Attributes:
        checked: session whose sockets reach allowed addresses only.
        unchecked: session for requests to the hub, or through a proxy, which resolves names by itself.
        source: the file or folder.
        url: the URL to request first.
        access: settings to read the source.
        authorizer: credentials for the origin of `url`.
        accept: media types to ask for; empty for any.
        explain: reader of refusals, for a service that explains them.
        hub: URL of the hub, whose headers name commit and digest, and whose address the operator chose; None for
            a source of another server.
        revision: the requested revision.
        found: where the last answered request was sent in the end, with the hub's headers, for further requests.

    """

    checked: aiohttp.ClientSession
    unchecked: aiohttp.ClientSession
    source: Source
    url: URL
    access: SourceAccess
    authorizer: Authorizer
    accept: str
    explain: ExplainRefusal | None
    hub: URL | None
    revision: str | None
    found: list[tuple[URL, Mapping[str, str]]]

    @property
    def head_seconds(self) -> float:
        """Limit for the head of a response, whatever interim responses or parts of it arrive."""
        return self.access.patience.connect_seconds + self.access.patience.silence_seconds

    @contextlib.asynccontextmanager
    async def read(self, first: int = 0, last: int | None = None, validator: str = "") -> AsyncIterator[SourceResponse]:
        """Request the bytes from `first` to `last` (inclusive, None is the end), if they still match `validator`.

        Raises:
            ArtifactError: the server refuses or is unreachable, also while the blocks are read.
            RangeRefused: the file has no byte `first`.

        """
        headers = {}
        if first or last is not None:
            headers["Range"] = f"bytes={first}-{'' if last is None else last}"
            if validator:
                headers["If-Range"] = validator
        async with self._get(headers) as received:
            self.found[:] = [(received.response.url, received.hub_headers)]
            yield self._build_response(received, first)

    async def read_whole(self, most_bytes: int) -> bytes:
        """Return the body of a short response. Raises ArtifactError, also when the body is longer than `most_bytes`."""
        try:
            async with self._get({}) as received:
                body = await _read_most(received.response, most_bytes)
        except RangeRefused as error:
            problem = "the server answered HTTP 416 to a request without a range"
            raise self.source.error("SourceRefused", problem) from error
        if body is None:
            raise self.source.error("SourceRefused", f"the server's response is longer than {most_bytes} bytes")
        return body

    @contextlib.asynccontextmanager
    async def _get(self, headers: Mapping[str, str]) -> AsyncIterator[_Received]:
        """Request the file, and yield a response of accepted status. Raises ArtifactError and RangeRefused."""
        try:
            received = await self._follow(headers)
            async with received.response:
                await self._check_status(received.response)
                self._refuse_encoding(received.response.headers)
                yield received
        # These are errors of the request, and of the caller's block while it reads the body.
        except TimeoutError as error:
            raise self._unreachable_error("did not answer in time") from error
        except aiohttp.ClientConnectorError as error:
            if isinstance(error.os_error, PrivateAddressError):
                raise self._private_error() from error
            problem = f"is not reached, or this machine is offline: {_describe_failure(error)}"
            raise self._unreachable_error(problem) from error
        except (aiohttp.ClientError, UnicodeError) as error:
            raise self._unreachable_error(f"failed: {_describe_failure(error)}") from error

    async def _follow(self, headers: Mapping[str, str]) -> _Received:
        """Request the source's URL and follow redirects; log in where the source's own server asks for it.

        The headers of the hub's own response are returned beside it, because they name commit and digest, and the hub
        redirects to a CDN, whose response does not.

        Return the first response that is no redirect, whatever its status. Raises ArtifactError.
        """
        # Further requests go straight to the place where the hub redirected, since it counts its own.
        was_found, (url, hub_headers) = bool(self.found), self.found[0] if self.found else (self.url, {})
        for _ in range(_MOST_REDIRECTS + 1):
            response = await self._request(url, headers)
            # 1. Log in, and repeat the request.
            if response.status == _LOGIN_REQUIRED and url.origin() == self.url.origin():
                challenges = response.headers.getall("WWW-Authenticate", [])
                refused = response.request_info.headers.get("Authorization", "")
                if await self.authorizer.answer_challenges(challenges, refused):
                    response.close()
                    response = await self._request(url, headers)

            # The link that was found may have expired, which storage says by one of many statuses.
            is_refused = _FIRST_ERROR <= response.status < _SERVER_ERROR
            if was_found and is_refused and response.status not in (*_TRY_AGAIN, _RANGE_REFUSED):
                response.close()
                was_found, url = False, self.url
                continue

            # Keep what the hub says of the file.
            if self.hub and url.origin() == self.hub.origin():
                hub_headers = response.headers

            # 2. Follow a redirect. S3 sends some without a location, and the reason in the body, which `explain` reads.
            location = response.headers.get("Location", "")
            if response.status not in _REDIRECTS or (self.explain and not location):
                return _Received(response, hub_headers)
            response.close()
            url = self._resolve_redirect(url, location)
        raise self.source.error("SourceRefused", f"the server redirects more than {_MOST_REDIRECTS} times")

    def _resolve_redirect(self, url: URL, location: str) -> URL:
        """Return the URL that a redirect leads to, without credentials. Raises ArtifactError."""
        try:
            # Credentials in a redirect are the server's own, and would take the place of the token.
            target = url.join(URL(location)).with_user(None).with_fragment(None)
        except ValueError as error:
            raise self._redirect_error() from error
        if not location or target.scheme not in ("http", "https") or not target.host:
            raise self._redirect_error()
        return target

    def _redirect_error(self) -> ArtifactError:
        return self.source.error("SourceRefused", "the server redirects to what is no http(s):// URL")

    async def _request(self, url: URL, headers: Mapping[str, str]) -> aiohttp.ClientResponse:
        """Send one request, with the credentials if `url` is of the source's own origin.

        Raises ArtifactError if the host of `url` is a private address. That of a name is checked by the `checked`
        session when it connects; a proxy resolves names itself, and decides about their addresses.
        """
        # Add the credentials.
        if url.origin() == self.url.origin():
            headers = self.authorizer.authorize_headers(url, headers)

        # No session checks what a proxy connects to: refuse a private address that the URL states.
        proxy = _find_proxy(url)
        is_hub = self.hub is not None and url.origin() == self.hub.origin()
        if proxy and not is_hub:
            stated_address = find_stated_address(url.raw_host or "")
            if stated_address is not None and not is_allowed(stated_address, self.access.allowed_networks):
                raise self._private_error()

        # The `checked` session refuses private addresses, which the hub and a proxy may have: the operator chose them.
        session = self.unchecked if proxy or is_hub else self.checked

        if self.accept:
            headers = {"Accept": self.accept, **headers}
        async with asyncio.timeout(self.head_seconds):
            return await session.get(url, headers=headers, allow_redirects=False, proxy=proxy)

    def _private_error(self) -> ArtifactError:
        return self.source.error("SourceForbidden", f"it, or what it redirects to, is {IN_PRIVATE_NETWORK}")

    def _unreachable_error(self, problem: str, retry_after_seconds: float = 0.0) -> ArtifactError:
        self.found.clear()
        return self.source.error(
            "SourceUnreachable", f"the server {problem}", retryable=True, retry_after_seconds=retry_after_seconds
        )

    async def _check_status(self, response: aiohttp.ClientResponse) -> None:
        """Raise the error that the status stands for; return if it is one of success.

        `explain` comes first, for a service (S3) whose body says more than its status.

        Raises ArtifactError and RangeRefused.
        """
        name, status = self.source.display, response.status
        if status == _RANGE_REFUSED:
            raise RangeRefused

        # The body of a refusal explains it, for some services.
        if self.explain and status >= _FIRST_REDIRECT:
            async with asyncio.timeout(self.head_seconds):
                body = await _read_most(response, _REFUSAL_BYTES)
            # A body that is too long explains nothing.
            error = self.explain(status, response.headers, body or b"")
            if error:
                raise error

        # `_follow` has followed all others: this redirect has no location, and `explain` did not know it.
        if status in _REDIRECTS:
            raise self._redirect_error()
        # 401 and 403
        if status in _UNAUTHORIZED:
            way_out = _OTHER_LOGIN if self.source.scheme == "oci" else _OTHER_TOKEN
            raise ArtifactError("SourceUnauthorized", f"{name}: HTTP {status}: no access: {way_out}")
        # 404 and 410
        if status in _GONE:
            missing = _NO_ARTIFACT if self.source.scheme == "oci" else "there is no such file: check path and revision"
            raise ArtifactError("SourceNotFound", f"{name}: HTTP {status}: {missing}")
        # 408, 425, 429, and from 500 on
        if status in _TRY_AGAIN or status >= _SERVER_ERROR:
            seconds = _read_retry_after(response.headers)
            asked = f" and asks for a pause of {seconds:.0f} s" if seconds else ""
            error = self._unreachable_error(f"answered HTTP {status}{asked}", seconds)
            error.is_overload = status in _OVERLOAD
            raise error
        if status >= _FIRST_ERROR:
            raise ArtifactError("SourceRefused", f"{name}: the server refused with HTTP {status}")

    def _refuse_encoding(self, headers: Mapping[str, str]) -> None:
        """Refuse a body that is not sent as it is stored: it is neither unpacked nor kept."""
        if headers.get("Content-Encoding", "identity").lower() not in ("", "identity"):
            problem = "the server sends it compressed, although it was asked not to: turn off Content-Encoding there"
            raise self.source.error("SourceRefused", problem)

    def _build_response(self, received: _Received, requested_first: int) -> SourceResponse:
        """Return the response with range, size, version and digest of the file, which each scheme states elsewhere.

        Raises ArtifactError if the server sent another range than the requested one, or does not state the size.
        """
        response, hub_headers = received

        # 1. Range and size; a response with the whole file begins at byte 0.
        first, size = 0, response.content_length
        if response.status == _PARTIAL:
            match = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
            if not match or int(match["first"]) != requested_first:
                raise self.source.error("SourceRefused", "the server sent another range than the requested one")
            first = requested_first
            size = None if match["size"] == "*" else int(match["size"])
        if size is None:
            # Without a size, the end of the file looks like a broken connection, and no volume or host can be chosen.
            raise self.source.error("SourceRefused", "the server does not say how large the file is")

        # 2. Digest and revision, as the scheme states them.
        sha256, revision = None, _read_entity_tag(response.headers)
        if self.source.scheme == "hf":
            # The tag of a large file is its SHA-256, that of a small one is not.
            tag = _read_printable(hub_headers, "X-Linked-Etag").strip('"').lower()
            sha256 = tag if is_digest(tag) else None
            revision = _read_printable(hub_headers, "X-Repo-Commit") or self.revision or self.source.revision
        elif self.source.scheme == "s3":
            sha256 = read_digest(response.headers)
        has_ranges = response.status == _PARTIAL or response.headers.get("Accept-Ranges") == "bytes"
        validator = _read_validator(response.headers)
        return SourceResponse(
            first=first,
            size_bytes=size,
            validator=validator,
            revision=revision,
            sha256=sha256,
            # A blob of a registry is named by its digest.
            is_divisible=has_ranges and (validator.startswith('"') or self.source.scheme == "oci"),
            blocks=response.content.iter_chunked(_BLOCK_BYTES),
        )


@contextlib.asynccontextmanager
async def connect(
    source: Source,
    access: SourceAccess,
    revision: str | None = None,
    *,
    url: str | URL = "",
    authorizer: Authorizer | None = None,
    accept: str = "",
    explain: ExplainRefusal | None = None,
) -> AsyncIterator[Origin]:
    """Open the origin (the server) of a source, at `url` if given; use the proxies of the environment.

    It has two sessions. The checked one refuses private addresses when it opens a socket. The other is for requests
    through a proxy, whose own address may be private, and to the hub, whose address the operator chose.

    `authorizer` takes the place of the token, `accept` names the media types to ask for, and `explain` returns the
    error for a refusal that its body explains.
    """
    # Bytes must arrive as they are stored: a content encoding would break ranges and digests.
    headers = {"User-Agent": "pomona", "Accept-Encoding": "identity"}
    patience = access.patience
    timeout = aiohttp.ClientTimeout(None, connect=patience.connect_seconds, sock_read=patience.silence_seconds)

    def open_session(connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
        """Return a session with these headers and time-outs, which decodes nothing and keeps no cookies."""
        return aiohttp.ClientSession(
            connector=connector,
            headers=headers,
            timeout=timeout,
            auto_decompress=False,
            read_bufsize=_BLOCK_BYTES,
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    # Both sessions trust the certificate authorities of the system. `open_socket` refuses private addresses.
    trust = read_public_trust()
    open_checked = functools.partial(open_socket, networks=access.allowed_networks)
    checking_connector = aiohttp.TCPConnector(ssl=trust, socket_factory=open_checked)
    async with open_session(checking_connector) as checked, open_session(aiohttp.TCPConnector(ssl=trust)) as unchecked:
        yield Origin(
            checked=checked,
            unchecked=unchecked,
            source=source,
            url=_parse_url(source, url or source.url(access.endpoint, revision)),
            access=access,
            authorizer=authorizer or FixedAuthorizer(f"Bearer {access.token}" if access.token else ""),
            accept=accept,
            explain=explain,
            # None: the source is not of a hub.
            hub=_parse_url(source, access.endpoint) if source.scheme == "hf" else None,
            revision=revision,
            found=[],
        )


async def _read_most(response: aiohttp.ClientResponse, most_bytes: int) -> bytes | None:
    """Return the body of a response; None if it is longer than `most_bytes`."""
    text = bytearray()
    async for block in response.content.iter_chunked(_BLOCK_BYTES):
        text += block
        if len(text) > most_bytes:
            return None
    return bytes(text)


def _parse_url(source: Source, text: str | URL) -> URL:
    """Return the URL. Raises ArtifactError if it has no origin."""
    try:
        url = URL(text) if isinstance(text, str) else text
        url.origin()
    except ValueError as error:
        raise source.error("SourceInvalid", "its address is no http(s):// URL") from error
    return url


def _find_proxy(url: URL) -> str | None:
    """Return the proxy that the environment (or macOS) sets for `url`, if any."""
    proxy = getproxies().get(url.scheme)
    if not proxy or not proxy.startswith(_PROXY_SCHEMES) or proxy_bypass(url.host or ""):
        return None
    return proxy


def _read_retry_after(headers: Mapping[str, str]) -> float:
    """Return the pause in seconds that a server asks for, as a number or as a date; 0 if it asks for none."""
    text = headers.get("Retry-After", "").strip()
    if text.isascii() and text.isdecimal():
        # The first digits are enough, since the limit is an hour.
        return min(float(text[:_MOST_DIGITS]), _LONGEST_PAUSE_SECONDS)
    try:
        due = parsedate_to_datetime(text)
    except (ValueError, OverflowError):
        return 0.0
    seconds = (due.replace(tzinfo=due.tzinfo or UTC) - datetime.now(UTC)).total_seconds()
    return min(max(0.0, seconds), _LONGEST_PAUSE_SECONDS)


def _read_printable(headers: Mapping[str, str], name: str) -> str:
    """Return a header if it is printable ASCII, else an empty text: other text can neither be stored nor sent back."""
    text = headers.get(name, "")
    return text if text.isascii() and text.isprintable() else ""


def _read_validator(headers: Mapping[str, str]) -> str:
    """Return what If-Range can name these bytes by: a strong entity tag, else the date; empty if there is neither."""
    tag = _read_printable(headers, "ETag")
    # A weak tag does not promise equal bytes, and RFC 9110 forbids it in If-Range.
    return tag if tag.startswith('"') else _read_printable(headers, "Last-Modified")


def _read_entity_tag(headers: Mapping[str, str]) -> str:
    """Return the entity tag, weak or strong, without its quotes, else the date; empty if there is neither."""
    return _read_printable(headers, "ETag").removeprefix("W/").strip('"') or _read_printable(headers, "Last-Modified")


def _describe_failure(error: aiohttp.ClientError | UnicodeError) -> str:
    """Return the error in one line, without URLs, which may have a signature, and without any byte of an answer."""
    if isinstance(error, (aiohttp.ClientResponseError, aiohttp.ClientPayloadError)):
        # What is not HTTP may come from another system than a server of weights.
        return "its answer is not complete, or no valid HTTP"
    if isinstance(error, (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError, UnicodeError)):
        return "its address, or one that it redirects to, is no http(s):// URL"
    text = re.sub(r"https?://\S+", "URL", str(error)) or type(error).__name__
    return " ".join(text.split())
