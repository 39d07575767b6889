"""A copy of Pomona's environment, into which another version is installed before it takes the place of the first.

The programs and packages that the service runs are complete at every moment, whenever this process is killed: each
folder is exchanged with its copy in one step of the system, and a mark in the new one says that it is not proven yet.
"""

import ctypes
import os
import shutil
import stat
import sys
from pathlib import Path
from typing import Final

_COPY: Final = ".upgrade"
"""The folder of the copy, in the environment itself: on the same disk, and its owner's."""
_MARK: Final = ".pomona-unproven"
"""A file in each folder of a version that has not been ready yet."""
_LINKED_BYTES: Final = 1024 * 1024
"""Programs that are at least as long are linked; a script is copied, since its first line is changed."""
_EXCHANGE: Final = 2
"""RENAME_EXCHANGE of Linux and RENAME_SWAP of macOS."""


class TrialEnvironment:
    """The environment in `prefix`, whose packages are in `packages`, and its copy. Every method raises OSError."""

    def __init__(self, prefix: Path, packages: Path) -> None:
        self._prefix = prefix
        self._packages = packages
        self.copy: Final = prefix / _COPY
        """The copy, an environment of its own."""

    def make_copy(self) -> None:
        """Copy the environment; installers replace files and never change them in place, so most are links."""
        self.copy.mkdir(mode=0o700)
        shutil.copy2(self._prefix / "pyvenv.cfg", self.copy)
        lib64 = self._prefix / "lib64"
        if lib64.is_symlink():
            (self.copy / "lib64").symlink_to(lib64.readlink())
        for folder, in_copy in self._folders():
            is_programs = folder.name == "bin"
            in_copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copytree(folder, in_copy, symlinks=True, copy_function=_copy_program if is_programs else _link)
            (in_copy / _MARK).touch()

    def take_copy(self) -> None:
        """Put what was installed into the copy in the place of the environment's own, and keep that in the copy."""
        for path in (self.copy / "bin").iterdir():
            _set_prefix(path, self.copy, self._prefix)
        # What is exchanged must not be on the disk before its content is.
        os.sync()
        for folder, in_copy in self._folders():
            exchange_folders(folder, in_copy)

    def confirm(self) -> None:
        """Keep the version that was taken, and remove the previous one."""
        (self._packages / _MARK).unlink(missing_ok=True)
        self.undo()

    def undo(self) -> None:
        """Restore the previous version, if another was taken and not confirmed, and remove the copy."""
        (packages, packages_in_copy), (programs, programs_in_copy) = self._folders()
        if (packages / _MARK).exists() and packages_in_copy.exists():
            exchange_folders(packages, packages_in_copy)
        # The packages decide: if those in the copy are not unproven, the programs belong to a proven version.
        if (programs / _MARK).exists() and (packages_in_copy / _MARK).exists():
            exchange_folders(programs, programs_in_copy)
        for folder in (packages, programs):
            (folder / _MARK).unlink(missing_ok=True)
        shutil.rmtree(self.copy, ignore_errors=True)

    def _folders(self) -> list[tuple[Path, Path]]:
        """Return the folders that a version consists of, packages and programs, each with the one in the copy."""
        folders = (self._packages, self._prefix / "bin")
        return [(folder, self.copy / folder.relative_to(self._prefix)) for folder in folders]


def exchange_folders(first: Path, second: Path) -> None:
    """Exchange two folders of one disk in one step. Raises OSError: the file system cannot."""
    library = ctypes.CDLL(None, use_errno=True)
    name, working_folder = ("renameatx_np", -2) if sys.platform == "darwin" else ("renameat2", -100)
    paths = working_folder, os.fsencode(first), working_folder, os.fsencode(second)
    if getattr(library, name)(*paths, _EXCHANGE):
        code = ctypes.get_errno()
        raise OSError(code, f"cannot exchange it with {second}: {os.strerror(code)}", str(first))


def _copy_program(source: str, target: str) -> None:
    if Path(source).stat().st_size < _LINKED_BYTES:
        shutil.copy2(source, target)
    else:
        _link(source, target)


def _link(source: str, target: str) -> None:
    """Link a file; copy one of another user, such as root's bytecode, which Linux lets nobody else link."""
    try:
        os.link(source, target)
    except PermissionError:
        shutil.copy2(source, target)


def _set_prefix(path: Path, before: Path, after: Path) -> None:
    """Replace the path of one environment by that of another in a script that an installer made."""
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode) or found.st_size >= _LINKED_BYTES:
        return
    content = path.read_bytes()
    changed = content.replace(os.fsencode(before), os.fsencode(after))
    if changed != content:
        # It may be a link to the cache of the installer.
        path.unlink()
        path.write_bytes(changed)
        path.chmod(stat.S_IMODE(found.st_mode))
