"""Download of any source to one folder: a file, all parts of a split model, or the files of a folder."""

import asyncio
from pathlib import Path

from artifacts.fetch import ExpectedFile, FetchedArtifact, ReportProgress, fetch
from artifacts.file_set import FileSet, refuse_digest_of_several_files
from artifacts.partial_download import require_space, translate_os_errors
from artifacts.repositories.repository import Listing, SourceAccess
from artifacts.source import Source


async def fetch_source(
    source: Source, destination_dir: Path, access: SourceAccess, expected: ExpectedFile, on_progress: ReportProgress
) -> FetchedArtifact:
    """Download a file, all parts of a split GGUF model, or a folder of weights to `destination_dir`.

    Return the path that an engine gets: the file, the first part, or the folder. The arguments mean the same as in
    `fetch.fetch`; the expected size is that of all files together.

    Raises:
        ArtifactError: with a reason and whether a retry may help.
    """
    sha256, size_bytes = expected.sha256, expected.size_bytes
    refuse_digest_of_several_files(source, sha256)

    # A folder or a split model has a listing, of which files are chosen.
    if not source.has_listing:  # one file
        return await fetch(source, destination_dir, access, expected, on_progress=on_progress)

    # Of several files, list those that an engine needs.
    files = FileSet(source, access)
    listing = await files.list_chosen(expected.revision)
    if size_bytes is not None and listing.size_bytes != size_bytes:
        raise source.error(
            "SourceChanged",
            f"its files have {listing.size_bytes} bytes, not the {size_bytes} that were inspected: delete the Model "
            "and create it again to accept them",
        )

    # The owner's own files are used where they are.
    if source.scheme == "file":
        return await files.verify_local(listing, sha256, on_progress)

    # Download all of them.
    with translate_os_errors(destination_dir):
        await asyncio.to_thread(_require_space, destination_dir, listing)
    fetched = await files.fetch(listing, destination_dir, sha256, on_progress)
    first = fetched[0]

    return FetchedArtifact(
        # Engines get the path of a GGUF model's first file, or the folder of other weights.
        path=first.path if first.is_gguf else destination_dir,
        size_bytes=listing.size_bytes,
        # Several files have no common digest.
        sha256=first.sha256 if len(fetched) == 1 else "",
        revision=listing.revision,
    )


def _require_space(folder: Path, listing: Listing) -> None:
    """Make the folder; raise NoSpace unless what it lacks fits on its volume. A partial file has holes."""
    folder.mkdir(parents=True, exist_ok=True)
    present = [folder / f"{file.name}{end}" for file in listing.files for end in ("", ".part")]
    require_space(folder, listing.size_bytes - sum(path.stat().st_blocks * 512 for path in present if path.exists()))
