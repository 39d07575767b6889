"""`file://` sources: files below the one folder that the owner chose; no link or `..` leads out of the folder."""

import dataclasses
import os
from pathlib import Path

from artifacts.errors import ArtifactError
from artifacts.source import Source


def locate(source: Source, file_root: Path | None) -> Path:
    """Return the real path of a file:// source.

    Raises:
        ArtifactError: SourceForbidden when the path is not below `file_root` or `file_root` is None; SourceNotFound.

    """
    if file_root is None:
        raise ArtifactError(
            "SourceForbidden",
            f"{source.display}: local files are not allowed here: start with --file-root DIR, a folder above this file",
        )
    root = Path(os.path.realpath(file_root))
    # Where the path leads is compared before it is known to exist: the error must not tell what exists elsewhere.
    if not Path(os.path.realpath(source.path)).is_relative_to(root):
        raise ArtifactError(
            "SourceForbidden",
            f"{source.display}: is not below --file-root {file_root}: move it there or widen the root",
        )
    try:
        path = Path(source.path).resolve(strict=True)
    except (OSError, RuntimeError) as error:
        problem = getattr(error, "strerror", None) or "a loop of links"
        raise ArtifactError("SourceNotFound", f"{source.display}: {problem}") from error
    if not path.is_relative_to(root):
        raise ArtifactError("SourceForbidden", f"{source.display}: was moved out of --file-root {file_root}")
    if source.is_folder and not path.is_dir():
        raise ArtifactError("SourceNotFound", f"{source.display}: is no folder: remove the slash at its end")
    if not source.is_folder and not path.is_file():
        way_out = ": end it with a slash to serve the folder" if path.is_dir() else ""
        raise ArtifactError("SourceNotFound", f"{source.display}: is no regular file{way_out}")
    return path


def locate_mounted(source: Source, file_root: Path | None) -> Source:
    """Return a pvc:// source as files below `file_root`, where its volume is mounted; any other source as it is.

    Raises:
        ArtifactError: SourceForbidden; no volume is mounted here.
    """
    if source.scheme != "pvc":
        return source
    if file_root is None:
        raise ArtifactError(
            "SourceForbidden",
            f"{source.display}: only a pod can mount a claim: with its volume mounted at DIR, add --file-root DIR",
        )
    return dataclasses.replace(source, scheme="file", path=f"{file_root}/{source.path}")


def refuse_outside(source: Source, path: Path, file_root: Path | None) -> None:
    """Raise SourceForbidden for a file of a folder that is a link out of `file_root`. Raises OSError."""
    if path.is_symlink() and not (file_root and path.resolve().is_relative_to(file_root.resolve())):
        raise ArtifactError(
            "SourceForbidden",
            f"{source.display}: {path.name} is a link out of --file-root {file_root}: move its target there, or "
            "widen the root",
        )


def revision(path: Path) -> str:
    """Return the revision of a local file, its time and size: it changes when the file is written."""
    stat = path.stat()
    return f"{stat.st_mtime_ns:x}-{stat.st_size:x}"


def list_python(folder: Path) -> list[str]:
    """Return the names of the Python files in a folder, which a loader would find there. Raises OSError."""
    return sorted(path.name for path in folder.glob("*.py"))
