"""The root folder of Pomona's image: an interpreter, the libraries that it links to, and Pomona, without a shell.

`Containerfile` runs this program with the Python of its base image, and the tests run it with that of their machine, so
that both assemble the same thing in the same way. It needs `pip` and `ldd`, and nothing that is not in the standard
library. `dependencies` makes a root with what the lock names; `project` adds Pomona itself, which changes more often.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).resolve().parent
LOCK = HERE / "requirements.lock"
BUILD_LOCK = HERE / "build-requirements.lock"
PREFIX = Path("/opt/pomona")
USER = 65532
AUTHORITIES = Path("/etc/ssl/certs/ca-certificates.crt")
LEFT_OUT = (
    *("site-packages", "dist-packages", "__pycache__", "ensurepip", "config-*", "*.a"),
    *("test", "tests", "_test*", "_xxtestfuzz*", "idlelib", "lib2to3", "pydoc_data", "turtledemo"),
    *("tkinter", "_tkinter*", "readline*", "_curses*", "_dbm*", "_gdbm*", "nis*"),
)
"""Names in the standard library's folder: packages of others, what is compiled anew, and what only terminals, windows
or developers need, which links to most of the libraries."""
RARE = re.escape("/site-packages/kubernetes/")
"""Modules that are compiled whenever they are imported: half of the image would be the bytecode of a client of which
only kubeconfigs with an auth provider need a little."""
FILES = {
    "etc/passwd": f"root:x:0:0:root:/:/sbin/nologin\npomona:x:{USER}:{USER}:Pomona:/:/sbin/nologin\n",
    "etc/group": f"root:x:0:\npomona:x:{USER}:\n",
    # Without this file the C library asks DNS before it reads /etc/hosts.
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
    "etc/ld.so.conf": "/usr/local/lib\n",
}


def main() -> None:
    """Assemble the part of a root folder that the command line names."""
    parser = argparse.ArgumentParser(prog="assemble.py", description=__doc__)
    parser.add_argument("part", choices=("dependencies", "project"))
    parser.add_argument("root", type=Path, help="root folder: absent or empty for dependencies, made by it for project")
    parser.add_argument("--lock", type=Path, default=LOCK, help="packages with their hashes")
    parser.add_argument("--source", type=Path, default=HERE.parents[1], help="folder of Pomona's pyproject.toml")
    options = parser.parse_args()
    # Programs below the root find their own files by absolute paths.
    root = options.root.absolute()
    if options.part == "dependencies":
        install_dependencies(root, options.lock)
    else:
        install_project(root, options.source)


def install_dependencies(root: Path, lock: Path) -> None:
    """Make a root with Python and the packages of the lock. Raises SystemExit: the root is not empty."""
    if root.exists() and any(root.iterdir()):
        sys.exit(f"assemble.py: {root} is not empty: give another folder")
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "tmp").mkdir(mode=0o1777)
    (root / "tmp").chmod(0o1777)
    _copy(AUTHORITIES, root)
    _copy_interpreter(root)
    _pip(_make_environment(_place(PREFIX, root)), "--require-hashes", "--only-binary=:all:", f"--requirement={lock}")
    for library in sorted(find_libraries(_place(PREFIX, root), root)):
        _copy(library, root)
    subprocess.run([shutil.which("ldconfig") or "/sbin/ldconfig", "-r", root], check=True)
    _compile(root, [root])


def install_project(root: Path, source: Path) -> None:
    """Build Pomona's wheel with the build tools of their lock, install it alone, and compile its busiest modules."""
    environment = _place(PREFIX, root)
    with tempfile.TemporaryDirectory() as folder:
        builder = _make_environment(Path(folder) / "builder")
        _pip(builder, "--require-hashes", "--only-binary=:all:", f"--requirement={BUILD_LOCK}")
        build = [builder / "bin/python", "-m", "hatchling", "build", "--target", "wheel", "--directory", folder]
        subprocess.run(build, cwd=source, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        (wheel,) = Path(folder).glob("*.whl")
        before = set(_packages(environment).iterdir())
        _pip(environment, "--no-deps", "--no-index", str(wheel))
        _build_extensions(builder, environment, wheel, source / "pyproject.toml")
    _compile(root, set(_packages(environment).iterdir()) - before)
    # An entry point names the interpreter by the path that it had at its installation; no other program is wanted.
    for program in (environment / "bin").iterdir():
        if program.name == "pomona":
            program.write_text(re.sub(r"\A#!.*", f"#!{PREFIX}/bin/python", program.read_text()))
        elif not program.is_symlink():
            program.unlink()


def find_libraries(environment: Path, root: Path) -> set[Path]:
    """Return the shared libraries of this machine to which interpreter and packages link, with the program loader."""
    library = _place(_standard_library(), root)
    programs = [Path(sys.executable).resolve(), *library.rglob("*.so"), *environment.rglob("*.so*")]
    tool = shutil.which("ldd") or "/usr/bin/ldd"
    linked: set[Path] = set()
    for program in programs:
        listed = subprocess.run([tool, program], capture_output=True, text=True, check=False).stdout
        if missing := re.findall(r"(\S+) => not found", listed):
            sys.exit(f"assemble.py: {program} needs {', '.join(missing)}, which the base image lacks: choose another")
        linked |= {Path(path) for path in re.findall(r"(/\S+) \(0x", listed)}
    libraries = {path for path in linked if not path.is_relative_to(root)}
    # The C library opens this one when a thread ends; nothing links to it for that.
    libraries |= {path.with_name("libgcc_s.so.1") for path in libraries if path.name == "libc.so.6"}
    return libraries


def _copy_interpreter(root: Path) -> None:
    library = _standard_library()
    shutil.copytree(library, _place(library, root), symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
    program = Path(sys.executable).resolve()
    _copy(program, root)
    # pyvenv.cfg names the folder of the interpreter, which is looked for there as python3 too.
    (_place(program, root).parent / "python3").unlink(missing_ok=True)
    (_place(program, root).parent / "python3").symlink_to(program.name)


def _standard_library() -> Path:
    return Path(sysconfig.get_path("stdlib")).resolve()


def _make_environment(folder: Path) -> Path:
    """Make a virtual environment without pip whose interpreter is that of this machine, at its real path."""
    program = Path(sys.executable).resolve()
    subprocess.run([program, "-m", "venv", "--without-pip", "--symlinks", folder], check=True)
    return folder


def _packages(environment: Path) -> Path:
    (folder,) = environment.glob("lib/python*/site-packages")
    return folder


def _pip(environment: Path, *arguments: str) -> None:
    python = ["--python", str(environment / "bin/python")]
    quiet = ["--quiet", "--disable-pip-version-check", "--no-compile", "--root-user-action=ignore"]
    subprocess.run([sys.executable, "-m", "pip", *python, "install", *quiet, *arguments], check=True)


def _compile(root: Path, places: Iterable[Path]) -> None:
    """Compile modules for good: nothing can be written at run time, and layers need not keep times of files."""
    mode = ["-q", "-j", "0", "--invalidation-mode=unchecked-hash", "-x", RARE]
    paths = ["-s", str(root), "-p", "/", *map(str, places)]
    subprocess.run([sys.executable, "-m", "compileall", *mode, *paths], check=True)


def _build_extensions(builder: Path, environment: Path, wheel: Path, configuration: Path) -> None:
    """Put what `extensions.py` compiles beside the modules of the same names."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.unpack_archive(wheel, folder, "zip")
        program = [builder / "bin/python", HERE / "extensions.py", environment / "bin/python", configuration]
        subprocess.run([*program, _packages(environment)], cwd=folder, check=True)


def _place(path: Path, root: Path) -> Path:
    return root / path.relative_to("/")


def _copy(path: Path, root: Path) -> None:
    """Copy a file, or what a link leads to, to its place below the root."""
    place = _place(path, root)
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(path, place)


if __name__ == "__main__":
    os.umask(0o022)
    main()
