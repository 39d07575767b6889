"""Buckets of an S3 service: `s3://BUCKET/KEY` and `s3://BUCKET/PREFIX/`.

The entity tag is the revision of an object; that of a prefix is a digest over all of its objects, since a bucket has no
commits that would pin them.
"""

import dataclasses
import hashlib
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Final
from urllib.parse import quote

from yarl import URL

from artifacts.errors import ArtifactError
from artifacts.formats.gguf_split import list_part_names
from artifacts.repositories.http_source import Origin, connect
from artifacts.repositories.repository import (
    Listing,
    ReadableFile,
    RepositoryFile,
    SourceAccess,
    SourceResponse,
    is_wanted,
)
from artifacts.repositories.s3_answers import PAGE_BYTES, ListingPage, explain_refusal, parse_page
from artifacts.retry import retry_read
from artifacts.source import Source

_PAGE_KEYS: Final = 1000
_MOST_PAGES: Final = 10
"""More is no folder of one model but a whole bucket."""


class S3Repository:
    """The object, or the objects below the prefix, that an s3:// source names."""

    def __init__(self, source: Source, access: SourceAccess) -> None:
        self._source = source
        self._access = access
        self._service = access.s3

    async def list_files(self, revision: str | None) -> Listing:
        """List the objects below the prefix, or the single object with the other parts if it is split.

        Raises:
            ArtifactError: with a reason and whether a retry may help.
        """
        # root: the key of the source's folder, with which the keys of all its objects begin.
        source, root = self._source, self._root

        # 1. List the objects whose keys begin as that of the source: for KEY-00001-of-00003.gguf, with KEY-.
        prefix = source.path
        if source.is_split:
            prefix, _, _ = prefix.rpartition("00001-of-")

        # 2. Take all of a folder, but of others only the file and its parts: objects beside them may change.
        parts = list_part_names(source.file) or [source.file]
        files = []
        for listed in await self._list_objects(prefix):
            path = listed.path.removeprefix(root)
            is_of_source = listed.path.startswith(root) and (source.is_folder or path in parts)
            if is_of_source and is_wanted(path):
                files.append(dataclasses.replace(listed, path=path))

        # 3. The digest of all paths, entity tags and sizes is the revision.
        files.sort(key=lambda file: file.path)
        lines = "\n".join(f"{file.path}\0{file.revision}\0{file.size_bytes}" for file in files)
        digest = hashlib.sha256(lines.encode()).hexdigest()
        if revision and revision != digest:
            raise source.error(
                "SourceChanged",
                f"its objects are not those that were inspected (revision {digest}, not "
                f"{revision}): delete the Model and create it again to accept the new ones",
            )
        return Listing(digest, files)

    @property
    def _root(self) -> str:
        """The key of the folder, with a slash at its end; empty for the whole bucket."""
        return self._source.path[: self._source.path.rfind("/") + 1]

    async def _list_objects(self, prefix: str) -> list[RepositoryFile]:
        """Return all objects whose keys begin with `prefix`. Raises ArtifactError, also if they are too many."""
        objects: list[RepositoryFile] = []
        token = ""
        for _ in range(_MOST_PAGES):
            page = await self._read_page(prefix, token)
            objects += page.objects
            token = page.next_token
            if not token:
                return objects
        most = _MOST_PAGES * _PAGE_KEYS
        problem = f"has more than {most} objects below it: name a longer prefix, with the files of one model"
        raise self._source.error("SourceRefused", problem)

    async def _read_page(self, prefix: str, token: str) -> ListingPage:
        """Request one page; each of its keys is quoted, since XML cannot carry every character of a key."""
        query = {"list-type": "2", "encoding-type": "url", "max-keys": str(_PAGE_KEYS), "prefix": prefix}
        if token:
            query["continuation-token"] = token
        url = self._service.url(self._source.repo, query=query)

        async def read() -> ListingPage:
            """Request and parse the page once; `retry_read` repeats it."""
            try:
                async with self._connect(self._source, url) as origin:
                    return parse_page(await origin.read_whole(PAGE_BYTES))
            except ValueError as error:
                problem = f"the service's list of objects cannot be used: {error}"
                raise self._source.error("SourceRefused", problem) from error

        return await retry_read(read, self._access.patience)

    def file_source(self, path: str, revision: str | None) -> Source:
        """Return the s3:// source of an object below the root."""
        del revision  # the current object is fetched, and refused if it is another one
        if path == self._source.path:
            return self._source
        # _root: the key of the source's folder, below which all paths are.
        key = f"{self._root}{path}"
        bucket = self._source.repo
        name = path.rpartition("/")[2]
        return Source(scheme="s3", text=f"s3://{bucket}/{quote(key)}", file=name, repo=bucket, path=key)

    @asynccontextmanager
    async def open_file(self, path: str, revision: str | None) -> AsyncIterator[ReadableFile]:
        """Connect to the service for one object."""
        source = self.file_source(path, revision)
        async with self._connect(source, self._service.url(source.repo, source.path)) as origin:
            yield _S3Object(origin)

    def _connect(self, source: Source, url: URL) -> AbstractAsyncContextManager[Origin]:
        """Open the origin of an object or of a listing, whose refusals are explained as those of S3."""
        signed = bool(self._service.key_id)

        def explain(status: int, headers: Mapping[str, str], body: bytes) -> ArtifactError | None:
            """Return the error of a refusal as S3 explains it; the origin calls it."""
            return explain_refusal(source.display, status, headers, body, signed=signed)

        return connect(source, self._access, url=url, authorizer=self._service, explain=explain)


class _S3Object:
    """One object, and its digest by validator, once a request for the whole object was answered."""

    def __init__(self, origin: Origin) -> None:
        self._origin = origin
        self._digests: dict[str, str | None] = {}

    @asynccontextmanager
    async def read(self, first: int = 0, last: int | None = None, validator: str = "") -> AsyncIterator[SourceResponse]:
        """Read from the object, and add its digest to the response. Raises as `ReadableFile.read`.

        S3 states the digest only in the headers of a response with the whole object. So a read from the first byte
        requests the whole object, and the caller stops when it has enough. Before the first read from a later byte, the
        whole object is requested for its headers only.
        """
        # The digests are kept by validator, which names the version of the object.
        if first and validator not in self._digests:
            async with self._origin.read() as whole:
                self._digests[whole.validator] = whole.sha256

        async with self._origin.read(first, last if first else None, validator) as response:
            if response.first == 0:
                self._digests[response.validator] = response.sha256
            sha256 = response.sha256 or self._digests.get(response.validator)
            yield dataclasses.replace(response, sha256=sha256)
