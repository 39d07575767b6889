"""HTTP requests to a source: one ranged request with a checked response, used to fetch and to inspect.

Every fault is raised as an ArtifactError that says whether a retry can help. The token is sent to the source's
own origin only: aiohttp drops the Authorization header on a redirect to another origin, such as a hub's CDN.
"""

import contextlib
import dataclasses
import re
from collections.abc import AsyncIterator, Mapping

import aiohttp

from artifacts.errors import ArtifactError
from artifacts.retry import Patience
from artifacts.source import Source

_CONTENT_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19}|\*)", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
# Bytes that aiohttp has buffered are lost when a connection breaks. The block is large enough for few thread switches,
# and small enough to be requested again.
_BLOCK_BYTES = 256 << 10
_UNAUTHORIZED = (401, 403)
_GONE = (404, 410)
_TRY_AGAIN = (408, 425, 429)
_SERVER_ERROR = 500
_FIRST_ERROR = 400
_PARTIAL = 206
_RANGE_REFUSED = 416


class RangeRefused(Exception):  # noqa: N818  a signal between two modules, it never leaves the package
    """HTTP 416: the file is shorter than the requested range."""


@dataclasses.dataclass(frozen=True)
class SourceResponse:
    """The response of a server to a request for bytes of a file.

    Attributes:
        first: offset in the file of the first byte of `blocks`; 0 when the server ignores ranges or the file changed.
        size_bytes: size of the whole file.
        validator: identifies these bytes in a later If-Range; empty when the server sends none.
        revision: the resolved revision: commit of a hub, else entity tag or date, else empty.
        sha256: digest that the hub states, or None.
        blocks: the bytes.

    """

    first: int
    size_bytes: int
    validator: str
    revision: str
    sha256: str | None
    blocks: AsyncIterator[bytes]


class Origin:
    """A source on a server; made by `connect`."""

    def __init__(self, session: aiohttp.ClientSession, source: Source, url: str, revision: str | None) -> None:
        self._session = session
        self._source = source
        self._url = url
        self._requested_revision = revision

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
            if first and validator:
                headers["If-Range"] = validator
        async with self._get(headers) as response:
            yield self._build_response(response, first)

    async def read_whole(self, most_bytes: int) -> bytes:
        """Return the body of a short response. Raises ArtifactError, also when the body is longer than `most_bytes`."""
        text = bytearray()
        try:
            async with self._get({}) as response:
                async for block in response.content.iter_chunked(_BLOCK_BYTES):
                    text += block
                    if len(text) > most_bytes:
                        problem = f"the server's response is longer than {most_bytes} bytes"
                        raise ArtifactError("SourceRefused", f"{self._source.display}: {problem}")
        except RangeRefused as error:
            problem = "the server answered HTTP 416 to a request without a range"
            raise ArtifactError("SourceRefused", f"{self._source.display}: {problem}") from error
        return bytes(text)

    @contextlib.asynccontextmanager
    async def _get(self, headers: Mapping[str, str]) -> AsyncIterator[aiohttp.ClientResponse]:
        try:
            async with self._session.get(self._url, headers=headers) as response:
                self._check(response.status)
                yield response
        except TimeoutError as error:
            raise self._unreachable("did not answer in time") from error
        except (aiohttp.ClientError, UnicodeError) as error:
            raise self._unreachable(f"failed: {_without_url(error)}") from error

    def _unreachable(self, problem: str) -> ArtifactError:
        return ArtifactError("SourceUnreachable", f"{self._source.display}: the server {problem}", retryable=True)

    def _check(self, status: int) -> None:
        name = self._source.display
        if status == _RANGE_REFUSED:
            raise RangeRefused
        if status in _UNAUTHORIZED:
            raise ArtifactError(
                "SourceUnauthorized",
                f"{name}: HTTP {status}: no access: set another token (spec.sourceSecretRef, HF_TOKEN in the "
                "environment), accept the licence of the repository, or check that the source exists",
            )
        if status in _GONE:
            raise ArtifactError(
                "SourceNotFound", f"{name}: HTTP {status}: there is no such file: check path and revision"
            )
        if status in _TRY_AGAIN or status >= _SERVER_ERROR:
            raise self._unreachable(f"answered HTTP {status}")
        if status >= _FIRST_ERROR:
            raise ArtifactError("SourceRefused", f"{name}: the server refused with HTTP {status}")

    def _build_response(self, response: aiohttp.ClientResponse, requested_first: int) -> SourceResponse:
        first, size = 0, response.content_length
        if response.status == _PARTIAL:
            match = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
            if not match or int(match[1]) != requested_first:
                raise ArtifactError(
                    "SourceRefused", f"{self._source.display}: the server sent another range than the requested one"
                )
            first, size = requested_first, None if match[3] == "*" else int(match[3])
        if size is None:
            # Without a size, the end of the file looks like a broken connection, and no volume or host can be chosen.
            raise ArtifactError(
                "SourceRefused", f"{self._source.display}: the server does not say how large the file is"
            )
        sha256, revision = None, _entity(response.headers)
        if self._source.scheme == "hf":
            hub = _hub_headers(response)
            sha256 = _digest(_text(hub, "X-Linked-Etag"))
            revision = _text(hub, "X-Repo-Commit") or self._requested_revision or self._source.revision
        return SourceResponse(
            first=first,
            size_bytes=size,
            validator=_validator(response.headers),
            revision=revision,
            sha256=sha256,
            blocks=response.content.iter_chunked(_BLOCK_BYTES),
        )


@contextlib.asynccontextmanager
async def connect(
    source: Source, *, token: str | None, endpoint: str, revision: str | None, patience: Patience, url: str = ""
) -> AsyncIterator[Origin]:
    """Open the origin of an hf:// or http(s):// source, at `url` if given; use the proxies of the environment."""
    # Bytes must arrive as they are stored: a content encoding would break ranges and digests.
    headers = {"User-Agent": "pomona", "Accept-Encoding": "identity"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    timeout = aiohttp.ClientTimeout(total=None, connect=patience.connect_seconds, sock_read=patience.silence_seconds)
    async with aiohttp.ClientSession(
        headers=headers, timeout=timeout, trust_env=True, auto_decompress=False, read_bufsize=_BLOCK_BYTES
    ) as session:
        yield Origin(session, source, url or source.url(endpoint, revision), revision)


def _hub_headers(response: aiohttp.ClientResponse) -> Mapping[str, str]:
    """Return the headers of the hub's own response: a CDN that it redirects to sends neither commit nor digest."""
    hops = [*response.history, response]
    return next((hop.headers for hop in hops if "X-Repo-Commit" in hop.headers), {})


def _text(headers: Mapping[str, str], name: str) -> str:
    """Return a header if it is printable ASCII, else an empty text: other text can neither be stored nor sent back."""
    text = headers.get(name, "")
    return text if text.isascii() and text.isprintable() else ""


def _validator(headers: Mapping[str, str]) -> str:
    tag = _text(headers, "ETag")
    # A weak tag does not promise equal bytes, and RFC 9110 forbids it in If-Range.
    return tag if tag.startswith('"') else _text(headers, "Last-Modified")


def _entity(headers: Mapping[str, str]) -> str:
    return _text(headers, "ETag").removeprefix("W/").strip('"') or _text(headers, "Last-Modified")


def _digest(entity_tag: str) -> str | None:
    tag = entity_tag.strip('"').lower()
    return tag if _SHA256.fullmatch(tag) else None


def _without_url(error: aiohttp.ClientError | UnicodeError) -> str:
    """Return the error in one line, without URLs: they may carry a signature."""
    if isinstance(error, (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError, UnicodeError)):
        return "its address, or one that it redirects to, is no http(s):// URL"
    text = re.sub(r"https?://\S+", "URL", str(error)) or type(error).__name__
    return " ".join(text.split())
