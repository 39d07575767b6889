"""The first process of a container: builds its root folder, enters it, becomes the container's command.

Run as a script (`python -I -S rootfs.py SPEC.json REPORT_FD`) inside fresh mount, PID, UTS and IPC namespaces, so it
uses the standard library only. An image is a folder's top-level folders, by default the host's own, read-only, below a
tmpfs: so a volume can be mounted anywhere without a new folder on the host. The process writes to REPORT_FD: STARTED,
or the error that prevented the start of the command.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

CLONE_NEWUSER = 0x10000000
MS_NODEV = 4
MS_NOSUID = 2
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
MNT_DETACH = 2
AT_FDCWD = -100
AT_RECURSIVE = 0x8000
MOUNT_ATTR_RDONLY = 1
SYS_MOUNT_SETATTR = 442  # the same number on every architecture; Linux 5.12
SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

# Folders that each container has its own version of, and those of the host that none must see.
OWN_FOLDERS = frozenset({"dev", "proc", "run", "sys", "tmp"})
HIDDEN_FOLDERS = frozenset({"home", "lost+found", "root"})
DEVICES = ("full", "null", "random", "tty", "urandom", "zero")
OLD_ROOT = Path("/.host")
# Written before the command is executed, instead of an error. Closing the pipe would not do: `unshare` keeps it open.
STARTED = b"\0"

_libc = ctypes.CDLL(None, use_errno=True)


def main(spec_path: str, report_fd: int) -> None:
    """Build the root folder that the spec describes and execute its command; never returns."""
    os.set_inheritable(report_fd, False)
    try:
        spec = json.loads(Path(spec_path).read_bytes())
        enter(spec)
        os.chdir(spec["working_dir"])
        if spec["user"]:
            become_user(spec["user"])
        program = find_program(spec["argv"])
        os.write(report_fd, STARTED)
        # Python itself adds LC_CTYPE to an environment without a locale.
        variables = {name: os.environ[name] for name in spec["variables"]}
        os.execve(program, spec["argv"], variables)  # noqa: S606 - a list, and this process is to become it
    except OSError as error:
        os.write(report_fd, str(error).encode())
        raise SystemExit(128) from error


def find_program(argv: list[str]) -> str:
    """Return the file to execute, searched on PATH if it has no slash; raises FileNotFoundError."""
    name = argv[0] if argv else ""
    folders = [""] if "/" in name else os.get_exec_path()
    for candidate in (os.path.join(folder, name) for folder in folders):  # noqa: PTH118 - "" and "./x" keep their meaning
        if name and os.access(candidate, os.X_OK) and not os.path.isdir(candidate):  # noqa: PTH112 - same
            return candidate
    raise FileNotFoundError(f'exec: "{name}": executable file not found, PATH is {os.environ.get("PATH", "")}')


def enter(spec: dict[str, Any]) -> None:
    """Make `spec["root"]` the root folder, with image, devices and volumes; detach the host's root folder."""
    socket.sethostname(spec["hostname"])
    root = Path(spec["root"])
    _mount("none", Path("/"), flags=MS_REC | MS_PRIVATE)
    _mount("tmpfs", root, kind="tmpfs", options="mode=755")
    own = OWN_FOLDERS if spec["image_root"] else OWN_FOLDERS | HIDDEN_FOLDERS
    for entry in sorted(Path(spec["image_root"] or "/").iterdir()):
        if entry.name not in own:
            graft(entry, root / entry.name)
    for name, mode in (
        ("dev", 0o755),
        ("home", 0o755),
        ("proc", 0o755),
        ("root", 0o700),
        ("run", 0o755),
        ("sys", 0o755),
    ):
        (root / name).mkdir(mode=mode, exist_ok=True)
    (root / "tmp").mkdir()
    (root / "tmp").chmod(0o1777)
    for visible in map(Path, spec["visible"]):
        target = root / visible.relative_to("/")
        if not target.exists():
            target.mkdir(parents=True)
            _bind(visible, target, read_only=True)
    _bind(Path("/sys"), root / "sys", read_only=True)
    _mount("proc", root / "proc", kind="proc")
    _devices(root / "dev")
    _pivot(root)
    writable = [Path("/")]
    for mount in spec["mounts"]:
        source, target = OLD_ROOT / Path(mount["source"]).relative_to("/"), Path(mount["target"])
        writable += make_mount_point(target, folder=source.is_dir())
        _bind(source, target, read_only=mount["read_only"])
    # A volume hides the folders below it; an image that is a checkout below /tmp must stay visible there.
    for visible in map(Path, spec["visible"]):
        if any(visible.is_relative_to(mount["target"]) for mount in spec["mounts"]):
            writable += make_mount_point(visible, folder=True)
            _bind(OLD_ROOT / visible.relative_to("/"), visible, read_only=True)
    _call("umount2", os.fsencode(OLD_ROOT), MNT_DETACH)
    OLD_ROOT.rmdir()
    writable += make_mount_point(Path(spec["working_dir"]), folder=True)
    for folder in writable if spec["read_only_root"] else ():
        _read_only(folder, recursive=False)


def become_user(user: int) -> None:
    """Become a user other than root, without capabilities from the next program on.

    The sandbox has one user only, so this is a user namespace in which the same user has another number: the files of
    the sandbox seem to be the container's own, and which files another user could read is not decided here.
    """
    outer = os.getuid(), os.getgid()
    _call("unshare", CLONE_NEWUSER)
    own = Path("/proc/self")
    (own / "setgroups").write_text("deny")
    for name, number in zip(("uid_map", "gid_map"), outer, strict=True):
        (own / name).write_text(f"{user} {number} 1")


def graft(source: Path, target: Path) -> None:
    """Show one file, folder or symbolic link of the host at `target`, read-only."""
    if source.is_symlink():
        target.symlink_to(source.readlink())
        return
    if source.is_dir():
        target.mkdir()
    elif source.is_file():
        target.touch()
    else:
        return  # sockets and other special files are not part of an image
    _bind(source, target, read_only=True)


def make_mount_point(target: Path, *, folder: bool) -> list[Path]:
    """Create `target` without writing to the host, and return the folders that are replaced for it.

    If the nearest existing parent is a (read-only) folder of the host, that folder is replaced by a tmpfs with the same
    entries and the new one.
    """
    if target.exists():
        return []
    parent = target.parent
    replaced = [] if parent.exists() else make_mount_point(parent, folder=True)
    if os.statvfs(parent).f_flag & os.ST_RDONLY:
        original = Path("/.original")
        original.mkdir(exist_ok=True)
        _bind(parent, original, read_only=True)
        _mount("tmpfs", parent, kind="tmpfs", options="mode=755")
        for entry in sorted(original.iterdir()):
            graft(entry, parent / entry.name)
        _call("umount2", os.fsencode(original), MNT_DETACH)
        original.rmdir()
        replaced.append(parent)
    target.mkdir() if folder else target.touch()
    return replaced


def _devices(dev: Path) -> None:
    _mount("tmpfs", dev, kind="tmpfs", flags=MS_NOSUID, options="mode=755")
    for name in (name for name in DEVICES if (Path("/dev") / name).exists()):
        (dev / name).touch()
        _bind(Path("/dev") / name, dev / name, read_only=False)
    for name, link in (("fd", "fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        (dev / name).symlink_to(f"/proc/self/{link}")
    (dev / "shm").mkdir()
    _mount("tmpfs", dev / "shm", kind="tmpfs", flags=MS_NOSUID | MS_NODEV, options="mode=1777")


def _pivot(root: Path) -> None:
    old = root / OLD_ROOT.name
    old.mkdir()
    # pivot_root has no wrapper in the C library.
    if _libc.syscall(SYS_PIVOT_ROOT[os.uname().machine], os.fsencode(root), os.fsencode(old)):
        raise OSError(ctypes.get_errno(), f"pivot_root {root}: {os.strerror(ctypes.get_errno())}")
    os.chdir("/")


def _bind(source: Path, target: Path, *, read_only: bool) -> None:
    _mount(str(source), target, flags=MS_BIND | MS_REC)
    if read_only:
        _read_only(target, recursive=True)


def _read_only(target: Path, *, recursive: bool) -> None:
    """Set only the read-only flag: a remount would have to repeat flags that a user namespace may not drop."""
    attributes = (ctypes.c_uint64 * 4)(MOUNT_ATTR_RDONLY, 0, 0, 0)
    flags = AT_RECURSIVE if recursive else 0
    path = os.fsencode(target)
    if _libc.syscall(SYS_MOUNT_SETATTR, AT_FDCWD, path, flags, attributes, ctypes.sizeof(attributes)):
        raise OSError(ctypes.get_errno(), f"making {target} read-only: {os.strerror(ctypes.get_errno())}")


def _mount(source: str, target: Path, *, kind: str = "", flags: int = 0, options: str = "") -> None:
    try:
        _call("mount", source.encode(), os.fsencode(target), kind.encode(), ctypes.c_ulong(flags), options.encode())
    except OSError as error:
        raise OSError(error.errno, f"mounting {kind or source} on {target}: {error.strerror}") from error


def _call(function: str, *arguments: Any) -> None:
    if getattr(_libc, function)(*arguments):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
