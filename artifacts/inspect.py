"""Inspection: facts of a file from its header, or of a folder from its config.json, without downloading the weights."""

import asyncio
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from artifacts import folder_config, gguf, local_files
from artifacts.address_policy import Networks
from artifacts.errors import ArtifactError
from artifacts.file_set import FileSet, refuse_digest, refuse_stored_code
from artifacts.gguf_facts import layout_of, summarize
from artifacts.partial_download import storage_faults
from artifacts.repositories import open_repository
from artifacts.repository import WEIGHTS, RangeRefused, ReadableFile, SourceAccess, SourceResponse
from artifacts.retry import DEFAULT_PATIENCE, Backoff, Patience
from artifacts.source import Source, refuse_library
from crds.model import GGUF, Layout

_FIRST_BYTES = 256 << 10
_GROWTH = 4
_TOTAL_SECONDS = 300.0
_OF_THE_ARTIFACT = ("HeaderInvalid", "CustomCode")
"""Reasons of errors that are raised where only the bytes are known, and not their source."""


@dataclasses.dataclass(frozen=True)
class HeaderFacts:
    """The facts in a file's header or a folder's config.json; `layout` is None if they do not have all of it."""

    gguf: GGUF
    layout: Layout | None


@dataclasses.dataclass(frozen=True)
class Inspection:
    """The facts that are known without downloading the weights.

    Attributes:
        size_bytes: size of the whole file.
        revision: the resolved revision: commit of hf://, entity tag or date of http(s)://, time and size of file://.
        file: name of the file; empty for a folder.
        sha256: the expected digest, else the digest that the hub states, else None.
        gguf: summary of the header, or of a folder's config.json.
        layout: the sizes that decide the memory of serving; None if the header does not have all of them.
        tensor_bytes: exact bytes of all weights.

    """

    size_bytes: int
    revision: str
    file: str
    sha256: str | None
    gguf: GGUF
    layout: Layout | None
    tensor_bytes: int


@dataclasses.dataclass(frozen=True)
class _FoundHeader:
    size_bytes: int
    revision: str
    sha256: str | None
    header: gguf.GGUFHeader


async def _inspect_folder(source: Source, access: SourceAccess) -> Inspection:
    files = FileSet(source, access)
    listing = await files.list_chosen(None)
    tensor_bytes = sum(file.size_bytes for file in listing.files if file.name.endswith(WEIGHTS))
    facts = _read_config(await files.read_config(listing), tensor_bytes, listing.python_files)
    return Inspection(
        size_bytes=listing.size_bytes,
        revision=listing.revision,
        file="",
        sha256=None,
        gguf=facts.gguf,
        layout=facts.layout,
        tensor_bytes=tensor_bytes,
    )


async def inspect(
    source: Source,
    *,
    token: str | None,
    endpoint: str,
    file_root: Path | None,
    sha256: str | None,
    patience: Patience = DEFAULT_PATIENCE,
    allowed_networks: Networks = (),
) -> Inspection:
    """Read the header of `source`, or a folder's config.json: at most 64 MiB of the file, in at most 5 minutes.

    Args:
        source: the file or folder to inspect.
        token: bearer token for the source's origin.
        endpoint: hub of hf:// sources.
        file_root: folder that file:// sources have to be in; None refuses them.
        sha256: expected digest; compared with the hub's digest if the hub states one.
        patience: time-outs and attempts.
        allowed_networks: private networks that the source may lead to.

    Raises:
        ArtifactError: with a reason and whether a retry may help.

    """
    refuse_library(source)
    access = SourceAccess(
        token=token, endpoint=endpoint, file_root=file_root, allowed_networks=allowed_networks, patience=patience
    )
    try:
        async with asyncio.timeout(_TOTAL_SECONDS):
            if source.is_folder:
                refuse_digest(source, sha256)
                return await _inspect_folder(source, access)
            async with open_repository(source, access).open_file(source.path, None) as opened:
                found = await _read_remote_header(source, opened, patience)
    except TimeoutError as error:
        raise ArtifactError(
            "SourceUnreachable",
            f"{source.display}: its header was not read within {_TOTAL_SECONDS:.0f} s",
            retryable=True,
        ) from error
    except ArtifactError as error:
        if error.reason not in _OF_THE_ARTIFACT:
            raise
        raise ArtifactError(error.reason, f"{source.display}: {error.message}") from error
    if sha256 and found.sha256 and sha256 != found.sha256:
        raise ArtifactError(
            "ChecksumMismatch",
            f"{source.display}: expected sha256 {sha256}, but the file on the hub has another: correct the sha256 or "
            "the source",
        )
    _refuse_split(source, found.header)
    return Inspection(
        size_bytes=found.size_bytes,
        revision=found.revision,
        file=source.file,
        sha256=sha256 or found.sha256,
        gguf=summarize(found.header),
        layout=layout_of(found.header),
        tensor_bytes=found.header.tensor_bytes,
    )


def check_stored(source: Source, path: Path) -> HeaderFacts:
    """Check weights on this disk before an engine loads them, and return what their header states.

    A server may have answered the inspection with other bytes: what is loaded must be of the source's format, and name
    no code.

    Raises:
        ArtifactError: HeaderInvalid, CustomCode, or the file cannot be read.
    """
    with storage_faults(path):
        try:
            if not source.is_folder:
                header = _read_local_header(path).header
                return HeaderFacts(summarize(header), layout_of(header))
            tensor_bytes = sum(file.stat().st_size for file in path.glob(f"*{WEIGHTS}"))
            return _read_config(refuse_stored_code(path), tensor_bytes)
        except ArtifactError as error:
            raise ArtifactError(error.reason, f"{source.display}: {error.message}") from error


def _read_config(text: bytes | None, tensor_bytes: int, python_files: Sequence[str] = ()) -> HeaderFacts:
    """Return the facts in the config.json of a folder; `text` is None for a LoRA adapter, which has no such file."""
    if text is None:
        return HeaderFacts(GGUF(architecture="lora"), None)
    config = folder_config.parse(text, python_files)
    return HeaderFacts(folder_config.summarize(config), folder_config.layout_of(config, tensor_bytes))


def _refuse_split(source: Source, header: gguf.GGUFHeader) -> None:
    parts = header.metadata.get("split.count", 0)
    if isinstance(parts, int) and parts > 1:
        raise ArtifactError(
            "SplitUnsupported",
            f"{source.display}: is one of {parts} files of a split model: merge them with `llama-gguf-split --merge`",
        )


def _read_local_header(path: Path) -> _FoundHeader:
    size, wanted = path.stat().st_size, _FIRST_BYTES
    with path.open("rb") as file:
        while wanted <= gguf.MAX_HEADER_BYTES * _GROWTH:
            file.seek(0)
            try:
                header = gguf.parse(file.read(wanted), size)
            except gguf.HeaderTruncated:
                wanted *= _GROWTH
            else:
                return _FoundHeader(size, local_files.revision(path), None, header)
    raise ArtifactError("HeaderInvalid", "the file was cut while it was read")


async def _read_remote_header(source: Source, opened: ReadableFile, patience: Patience) -> _FoundHeader:
    backoff = Backoff(patience)
    while True:
        try:
            return await _read_header(source, opened)
        except RangeRefused:
            raise ArtifactError("HeaderInvalid", "the file is empty or was cut while it was read") from None
        except ArtifactError as error:
            pause = backoff.pause_seconds(error)
        await asyncio.sleep(pause)


async def _read_header(source: Source, opened: ReadableFile) -> _FoundHeader:
    """Request growing ranges until the header is complete; stop reading there even if the server ignores ranges."""
    prefix = bytearray()
    wanted = _FIRST_BYTES
    validator = ""
    while True:
        async with opened.read(len(prefix), wanted - 1, validator) as response:
            if response.first == 0:
                prefix.clear()
            elif response.validator != validator:
                problem = "changed while its header was read"
                raise ArtifactError("SourceChanged", f"{source.display}: {problem}", retryable=True)
            header = await _parse_growing(response, prefix, wanted)
            if header:
                return _FoundHeader(response.size_bytes, response.revision, response.sha256, header)
        if len(prefix) == response.first:
            raise ArtifactError("SourceRefused", f"{source.display}: the server sends an empty range")
        validator = response.validator
        wanted = max(wanted, len(prefix)) * _GROWTH


async def _parse_growing(response: SourceResponse, prefix: bytearray, wanted: int) -> gguf.GGUFHeader | None:
    """Read the response into `prefix` until it has the header; return the header, or None if the response ends."""
    parsed_bytes = -1
    async for block in response.blocks:
        prefix += block
        if len(prefix) >= wanted:
            header = await _try_parse(prefix, response.size_bytes)
            if header:
                return header
            parsed_bytes = len(prefix)
            wanted = parsed_bytes * _GROWTH
    return await _try_parse(prefix, response.size_bytes) if len(prefix) > parsed_bytes else None


async def _try_parse(prefix: bytearray, size_bytes: int) -> gguf.GGUFHeader | None:
    try:
        return await asyncio.to_thread(gguf.parse, prefix, size_bytes)
    except gguf.HeaderTruncated:
        return None
