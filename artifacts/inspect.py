"""Inspection: facts of weights from their headers and from a folder's config.json, without downloading the weights."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from artifacts.errors import ArtifactError
from artifacts.fetch import build_mismatch
from artifacts.file_choice import ADAPTER_CONFIG
from artifacts.file_set import FileSet, read_stored_configs, read_stored_weights, refuse_digest_of_several_files
from artifacts.formats import folder_config, gguf
from artifacts.formats.chat_template import find_chat_format
from artifacts.formats.folder_config import CONFIG
from artifacts.formats.gguf_facts import count_active, find_layout, summarize
from artifacts.formats.gguf_split import append_part_header, is_gguf_name, list_part_names, merge_headers
from artifacts.formats.safetensors_header import SafetensorsHeader
from artifacts.gguf_reader import read_header, read_stored_header
from artifacts.mirrors import parse_mirrors, read_from_any
from artifacts.partial_download import translate_os_errors
from artifacts.repositories import local_files
from artifacts.repositories.registry_repository import RegistryRepository
from artifacts.repositories.repository import SourceAccess, SourceResponse
from artifacts.repositories.schemes import open_repository
from artifacts.retry import Patience, retry_read
from artifacts.source import Source, refuse_ollama_source
from crds.model import ModelFacts
from crds.weights_header import GGUF

_TOTAL_SECONDS = 300.0
_REASONS_WITHOUT_SOURCE = ("HeaderInvalid", "CustomCode", "SplitUnsupported")
"""Reasons of errors that are raised where only the bytes are known, and not their source."""


class Inspection(ModelFacts, frozen=True, kw_only=True):
    """Facts from the headers of weights, and from their source if it was asked."""

    gguf: GGUF = GGUF()
    size_bytes: int = 0
    tensor_bytes: int = 0
    """Exact bytes of all weights."""


async def _inspect_files(
    source: Source, access: SourceAccess, sha256: str | None, *, is_mounted: bool = False
) -> Inspection:
    """Inspect the files of a folder or of a split model, as they are now. Raises ArtifactError."""
    refuse_digest_of_several_files(source, sha256)
    files = FileSet(source, access, is_mounted=is_mounted)
    listing = await files.list_chosen(None)

    # Read the headers; the first file shows which kind of weights this is.
    first = listing.files[0]
    if is_gguf_name(first.path):
        headers = await files.read_gguf_headers(listing)
        facts = _describe_gguf(merge_headers(headers, [file.name for file in listing.files]))
        # An engine finds a mounted file at its path in the volume, and a fetched one by its name.
        file = first.path if is_mounted else first.name
    else:
        configs = await files.read_configs(listing)
        facts = _describe_folder(configs, await files.read_weights(listing), listing.python_files)
        # Engines get the folder and no single file.
        file = ""

    # Patterns in the source may have chosen several files, which have no common digest.
    if len(listing.files) > 1 and sha256:
        raise files.build_digest_refusal(listing)

    # The digest of a single file, if the server states one.
    stated_digest = first.sha256 if len(listing.files) == 1 else None
    _require_same_digest(source, sha256, stated_digest)
    return _add_source_facts(facts, listing.size_bytes, listing.revision, file, sha256 or stated_digest)


async def _inspect_image(source: Source, access: SourceAccess) -> Inspection:
    """Inspect an oci:// source that nodes mount: an artifact with files as layers, or a container image.

    The layers of a container image are archives, which only nodes unpack. So its digest is known and no header, and the
    user must name the weights in it.
    """
    digest, manifest = await RegistryRepository(source, access).resolve(None)

    # Files are read one by one. An artifact with neither files nor archives is refused there with a message.
    if manifest.files or not manifest.archive_types:
        return await _inspect_files(source, access, None, is_mounted=True)

    # Names in archives cannot be listed, so the user has to give one path without wildcards.
    if len(source.files) != 1 or any(letter in source.files[0] for letter in "*?["):
        raise source.error(
            "SourceInvalid",
            "is a container image, whose files only nodes unpack: give the path of the weights in "
            "it in spec.files, for example files: ['models/tiny.gguf'], and their memory in spec.memoryBytes",
        )

    # Only the name of the file tells its format.
    is_gguf = is_gguf_name(source.files[0])
    facts = Inspection(format="gguf" if is_gguf else "safetensors", gguf=GGUF())
    return _add_source_facts(facts, manifest.size_bytes, revision=digest, file=source.files[0], sha256=None)


async def _inspect_file(source: Source, access: SourceAccess, sha256: str | None) -> Inspection:
    """Inspect one GGUF file. Raises ArtifactError."""

    async def read() -> tuple[gguf.GGUFHeader, SourceResponse]:
        """Read the header once; `retry_read` repeats it."""
        async with open_repository(source, access).open_file(source.path, None) as opened:
            return await read_header(source.display, opened)

    header, response = await retry_read(read, access.patience)
    facts = _describe_gguf(merge_headers([header], [source.file]))
    _require_same_digest(source, sha256, response.sha256)
    return _add_source_facts(facts, response.size_bytes, response.revision, source.file, sha256 or response.sha256)


def _add_source_facts(facts: Inspection, size_bytes: int, revision: str, file: str, sha256: str | None) -> Inspection:
    """Return the facts with size, revision, name and digest as the source states them."""
    return msgspec.structs.replace(facts, size_bytes=size_bytes, revision=revision, file=file, sha256=sha256 or "")


def _require_same_digest(source: Source, expected: str | None, stated: str | None) -> None:
    """Raise ChecksumMismatch if the server states another digest than the expected one."""
    if expected and stated and expected != stated:
        raise build_mismatch(source, expected, "the file on the hub", stated)


async def inspect(
    source: Source, access: SourceAccess, *, sha256: str | None = None, is_mounted: bool = False
) -> Inspection:
    """Read the headers of `source` and a folder's config.json: at most 64 MiB of each file, in at most 5 minutes.

    Args:
        source: the file or folder to inspect.
        access: settings to read the source.
        sha256: expected digest; compared with the hub's digest if the hub states one.
        is_mounted: True if nodes mount the oci:// source as an image; a pvc:// source always counts as mounted.

    Raises:
        ArtifactError: with a reason and whether a retry may help.

    """
    refuse_ollama_source(source)
    is_mounted = is_mounted or source.scheme == "pvc"
    source = local_files.locate_mounted(source, access.file_root)

    # Read the headers, by the kind of source.
    try:
        async with asyncio.timeout(_TOTAL_SECONDS):
            if is_mounted and source.scheme == "oci":
                return await _inspect_image(source, access)
            if source.has_listing:
                return await _inspect_files(source, access, sha256, is_mounted=is_mounted)
            return await _inspect_file(source, access, sha256)
    except TimeoutError as error:
        problem = f"its header was not read within {_TOTAL_SECONDS:.0f} s"
        raise source.error("SourceUnreachable", problem, retryable=True) from error
    except ArtifactError as error:
        if error.reason not in _REASONS_WITHOUT_SOURCE:
            raise
        # HeaderInvalid, CustomCode and SplitUnsupported were raised without the source's name: add it.
        raise source.error(error.reason, error.message) from error


async def inspect_with_mirrors(
    source: Source,
    mirrors: Sequence[str],
    access: Callable[[Source, Patience], SourceAccess],
    *,
    sha256: str | None = None,
    is_mounted: bool = False,
) -> Inspection:
    """Inspect the source, or the first of its mirrors that can be reached; see `inspect` for the other arguments.

    `access` returns the settings to read the source or a mirror. The revision is empty if a mirror of one file was
    read: a mirror has revisions of its own, which the source would not know.

    Raises:
        ArtifactError: with a reason and whether a retry may help.
    """

    async def read(server: Source, patience: Patience) -> Inspection:
        """Inspect one server; `read_from_any` calls it for the source, then for each mirror in turn."""
        return await inspect(server, access(server, patience), sha256=sha256, is_mounted=is_mounted)

    inspection, server = await read_from_any(source, parse_mirrors(source, mirrors, sha256), read)
    # The revision of a mirror does not count, except for an artifact, which has one digest everywhere.
    is_of_source = server is source or server.scheme == "oci"
    return inspection if is_of_source else msgspec.structs.replace(inspection, revision="")


def check_stored(source: Source, path: Path) -> Inspection:
    """Check weights on this disk before an engine loads them, and return what their header states.

    A server may have sent other bytes to the inspection than to the download. So the headers are read again, weights
    with Python code are refused again, and the caller can compare the format.

    Raises:
        ArtifactError: HeaderInvalid, CustomCode, or the file cannot be read.
    """
    with translate_os_errors(path):
        try:
            if path.is_dir():
                return _describe_folder(read_stored_configs(path), read_stored_weights(path))

            # A GGUF model: one file, or all parts of a split one.
            names = list_part_names(path.name) or [path.name]
            headers: list[gguf.GGUFHeader] = []
            for name in names:
                append_part_header(headers, _read_stored_part(path, name), name)
            return _describe_gguf(merge_headers(headers, names))
        except ArtifactError as error:
            raise source.error(error.reason, error.message) from error


def _read_stored_part(path: Path, name: str) -> gguf.GGUFHeader:
    """Read the header of a part beside the first one. Raises ArtifactError if it is missing."""
    try:
        return read_stored_header(path.with_name(name))
    except FileNotFoundError as error:
        raise ArtifactError("SourceNotFound", f"{name} is missing beside {path.name}: provide all parts") from error


def _describe_gguf(header: gguf.GGUFHeader) -> Inspection:
    """Return the facts of the header of a GGUF model."""
    return Inspection(
        format="gguf",
        gguf=summarize(header),
        layout=find_layout(header),
        tensor_bytes=header.tensor_bytes,
        total_parameters=header.parameters,
        active_parameters=count_active(header),
    )


def _describe_folder(
    configs: Mapping[str, bytes], weights: SafetensorsHeader, python_files: Sequence[str] = ()
) -> Inspection:
    """Return the facts of a folder of weights; those for users are in the `gguf` field, which all formats share.

    Raises ArtifactError: a configuration is invalid, or names Python code.
    """
    if CONFIG not in configs:
        # Only the folder of a LoRA adapter has no config.json.
        adapter = folder_config.parse_safe(ADAPTER_CONFIG, configs.get(ADAPTER_CONFIG, b"{}"))
        # `written_for` is the framework that the headers of the weights name.
        is_mlx = weights.written_for == "mlx" or "lora_parameters" in adapter
        return Inspection(
            format="mlx" if is_mlx else "safetensors",
            gguf=GGUF(architecture="lora"),
            tensor_bytes=weights.tensor_bytes,
            total_parameters=weights.parameters,
        )

    # A model.
    config = folder_config.parse(configs[CONFIG], python_files, configs.get(folder_config.QUANTIZATION))
    is_mlx = weights.written_for == "mlx" or folder_config.is_mlx(config)

    # With experts, a token uses only a part of the parameters; None: not known.
    total, active = weights.parameters, None
    if total is not None:
        active = folder_config.count_active(config, total, weights.expert_parameters)
    facts = folder_config.summarize(config)
    return Inspection(
        format="mlx" if is_mlx else "safetensors",
        gguf=msgspec.structs.replace(facts, chat_format=find_chat_format(configs, facts.architecture)),
        layout=folder_config.find_layout(config, weights.tensor_bytes),
        tensor_bytes=weights.tensor_bytes,
        total_parameters=total,
        active_parameters=active,
    )
