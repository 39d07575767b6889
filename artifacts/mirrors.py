"""Mirrors: further servers with the same bytes, asked in order while those before them cannot be reached.

Only a known SHA-256 makes a mirror safe: bytes with another digest are refused, from any server, and are never a
reason to ask the next server. A mirror gets no token: it is for the source's own server.

One file has the digest that the user states; an artifact of a registry, with all of its files, has that of its
manifest. A folder or split model of a hub has none: its listing has digests of the weights only and not of its
configuration, and cannot be read while the hub is away.
"""

import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar

from artifacts.errors import ArtifactError
from artifacts.retry import DEFAULT_PATIENCE, Patience
from artifacts.source import Source, SourceError, parse

T = TypeVar("T")

_ATTEMPTS: Final = 2
_CONNECT_SECONDS: Final = 10.0
"""Limits with a server after which another one can be asked."""
_REASONS_TO_MOVE_ON: Final = frozenset({"SourceUnreachable", "SourceNotFound"})
_MIRRORED_SCHEMES: Final = frozenset({"hf", "http", "https"})


def parse_mirrors(source: Source, mirrors: Sequence[str], sha256: str | None) -> list[Source]:
    """Return the mirrors of a source, each with the file name and the patterns of the source.

    Allowed are oci:// mirrors of an oci:// source with a digest, and single files of hf:// or http(s):// with SHA-256.

    Raises:
        SourceError: a mirror cannot have the bytes of the source, or there is no digest to verify its bytes by.
    """
    sources = []
    for text in mirrors:
        mirror = parse(text)

        # A folder or a split model has a listing instead, and no common digest.
        are_single_files = not source.has_listing and not mirror.has_listing
        # Artifacts of registries are compared by the digest in their names.
        if "oci" in (source.scheme, mirror.scheme):
            _refuse_other_artifact(source, mirror)
        # _MIRRORED_SCHEMES: hf, http and https.
        elif not (are_single_files and {source.scheme, mirror.scheme} <= _MIRRORED_SCHEMES):
            raise SourceError(text, "a mirror is for one file of an hf:// or http(s):// source, and names one")
        elif not sha256:
            raise SourceError(text, "a mirror needs the SHA-256 of the file, by which its bytes are verified")

        sources.append(dataclasses.replace(mirror, file=source.file, files=source.files))
    return sources


def _refuse_other_artifact(source: Source, mirror: Source) -> None:
    """Raise SourceError unless both are artifacts of registries with the same digest."""
    if {source.scheme, mirror.scheme} != {"oci"}:
        raise SourceError(mirror.text, "source and mirrors must all be oci:// sources, or none of them")
    if not source.is_pinned:
        raise SourceError(source.text, "a tag may be another artifact in a mirror: name its digest, @sha256:DIGEST")
    if mirror.revision != source.revision:
        raise SourceError(mirror.text, f"a mirror holds the same artifact: name it with @{source.revision}")


async def read_from_any(
    source: Source,
    mirrors: Sequence[Source],
    read: Callable[[Source, Patience], Awaitable[T]],
    patience: Patience = DEFAULT_PATIENCE,
) -> tuple[T, Source]:
    """Read the source, or the first mirror that can be reached; return what was read, and from where.

    The last server gets all of `patience`, those before it less.

    Raises:
        ArtifactError: none can be reached, or one of them answers with something that must not be used.
    """
    # One failure for each server that was tried.
    problems: list[ArtifactError] = []
    less_patience = dataclasses.replace(patience, attempts=_ATTEMPTS, connect_seconds=_CONNECT_SECONDS)
    servers = [source, *mirrors]
    for server in servers:
        try:
            return await read(server, patience if server is servers[-1] else less_patience), server
        except ArtifactError as error:
            # Only a server that is unreachable or lacks the file is a reason to ask the next one.
            if error.reason not in _REASONS_TO_MOVE_ON:
                raise
            problems.append(error)

    # Every server has failed.
    if not mirrors:
        raise problems[0]
    # The reason is that of the source: a mirror that lacks the file is no proof that the source does.
    raise ArtifactError(
        problems[0].reason,
        "; ".join(problem.message for problem in problems),
        retryable=any(problem.retryable for problem in problems),
        retry_after_seconds=min(problem.retry_after_seconds for problem in problems),
    )
