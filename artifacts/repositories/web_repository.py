"""Files of plain web servers: `http(s)://`. They list nothing; a split file names its other parts by itself."""

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import quote, urlsplit, urlunsplit

from artifacts.errors import ArtifactError
from artifacts.formats.gguf_split import list_part_names
from artifacts.repositories.http_source import connect
from artifacts.repositories.repository import Listing, RangeRefused, ReadableFile, RepositoryFile, SourceAccess
from artifacts.retry import retry_read
from artifacts.source import Source


class WebRepository:
    """The file that an http(s):// source names, with the other parts if it is split."""

    def __init__(self, source: Source, access: SourceAccess) -> None:
        self._source = source
        self._access = access

    async def list_files(self, revision: str | None) -> Listing:
        """Ask for the size of the file or of each part. Raises ArtifactError."""
        files = [await self._describe(name) for name in list_part_names(self._source.file) or [self._source.file]]
        current = files[0].revision
        if len(files) > 1:  # the revision of all parts is a digest of theirs
            current = hashlib.sha256("\0".join(file.revision for file in files).encode()).hexdigest()
        if revision and revision != current:
            raise self._source.error(
                "SourceChanged",
                f"has revision {current} now, not {revision}: delete the Model and create it "
                "again to accept the new files",
            )
        return Listing(current, files)

    async def _describe(self, name: str) -> RepositoryFile:
        """Return size, digest and revision of one file, from the answer to a request for its first byte."""

        async def read() -> RepositoryFile:
            """Request the first byte once; `retry_read` repeats it."""
            try:
                async with self.open_file(name, None) as opened, opened.read(0, 0) as response:
                    return RepositoryFile(name, response.size_bytes, response.sha256, response.revision)
            except RangeRefused:
                raise ArtifactError("HeaderInvalid", f"{name}: the file is empty") from None

        return await retry_read(read, self._access.patience)

    def file_source(self, path: str, revision: str | None) -> Source:
        """Return the source of a part: the same URL with another name at the end."""
        del revision  # a web server has the current files only
        if path in (self._source.path, self._source.file):  # the source's own file, by URL or by name
            return self._source
        parts = urlsplit(self._source.path)
        url = urlunsplit(parts._replace(path=f"{parts.path.rpartition('/')[0]}/{quote(path)}"))
        return Source(scheme=self._source.scheme, text=url, file=path, path=url)

    @asynccontextmanager
    async def open_file(self, path: str, revision: str | None) -> AsyncIterator[ReadableFile]:
        """Connect to the server for one file."""
        async with connect(self.file_source(path, revision), self._access, revision) as origin:
            yield origin
