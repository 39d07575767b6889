"""Pomona's image as a folder of this machine: what `Containerfile` assembles, by the same program, from this Python.

The packages are assembled once for each lock into the user's cache, and Pomona itself once for each state of the
checkout into `build/`. What this cannot prove: the interpreter and the libraries of the image's base, and the other
architecture.
"""

import hashlib
import json
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.controlplane.binaries import cache_folder, lock_folder
from tests.controlplane.process import CHECKOUT

FOLDER = CHECKOUT / "deploy" / "image"
ROOTS = CHECKOUT / "build" / "image"
KEPT_ROOTS = 3


@dataclass(frozen=True)
class ImageConfiguration:
    """The settings of processes in the last stage of a Containerfile."""

    entrypoint: tuple[str, ...]
    environment: Mapping[str, str]
    user: int


def read_configuration(text: str | None = None) -> ImageConfiguration:
    """Read a Containerfile, by default Pomona's own. Raises LookupError: it has no entry point or no numeric user."""
    text = (CHECKOUT / "Containerfile").read_text() if text is None else text
    last = re.split(r"^FROM ", text, flags=re.MULTILINE)[-1]
    lines = [line.partition(" ") for line in last.splitlines()]
    said = {name: value for name, _, value in lines if name in {"ENTRYPOINT", "USER"}}
    user = re.fullmatch(r"(\d+):\1", said.get("USER", ""))
    if "ENTRYPOINT" not in said or user is None:
        raise LookupError("Containerfile: its last stage needs ENTRYPOINT, and USER as two equal numbers")
    variables = (pair.partition("=") for name, _, value in lines if name == "ENV" for pair in shlex.split(value))
    return ImageConfiguration(
        tuple(json.loads(said["ENTRYPOINT"])), {name: value for name, _, value in variables}, int(user[1])
    )


def list_sources() -> list[Path]:
    """Return the files that a wheel of the checkout is made of."""
    build = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    files = [CHECKOUT / name for name in ("pyproject.toml", "README.md", "LICENSE")]
    for package in build["targets"]["wheel"]["packages"]:
        files += [path for path in (CHECKOUT / package).rglob("*") if path.is_file() and path.suffix != ".pyc"]
    return sorted(files)


def find_root() -> Path:
    """Return the root folder of the image for this state of the checkout, there or not."""
    return ROOTS / _key(_dependencies_key(), [*list_sources(), FOLDER / "extensions.py"])


def ensure_root() -> Path:
    """Return the root folder of the image for this state of the checkout; assemble it if it is not there."""
    root, dependencies = find_root(), _dependencies_key()
    if root.exists():
        return root
    base = assemble_dependencies(FOLDER / "requirements.lock", dependencies)
    with lock_folder(ROOTS):
        if not root.exists():
            aside = ROOTS / ".assembling"
            shutil.rmtree(aside, ignore_errors=True)
            shutil.copytree(base, aside, symlinks=True)
            assemble("project", aside)
            aside.touch()  # the copy has the time of its original, by which it would be removed below
            aside.rename(root)
        older = sorted((path for path in ROOTS.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime)
        for path in older[:-KEPT_ROOTS]:
            shutil.rmtree(path)
    return root


def find_packages(root: Path) -> Path:
    """Return the folder of Pomona and its libraries below a root."""
    (folder,) = root.glob("opt/pomona/lib/python*/site-packages")
    return folder


def find_program(root: Path) -> list[str]:
    """Return the command that runs the `pomona` of a root by this machine's Python, without a container."""
    return [str(root / "opt/pomona/bin/python"), "-P", "-m", "cli.main"]


def assemble_dependencies(lock: Path, key: str) -> Path:
    """Return a root with the packages of a lock; assemble it if it is not in the user's cache under this key."""
    folder = cache_folder() / "image"
    root = folder / key
    if not root.exists():
        with lock_folder(folder):
            if not root.exists():
                print(f"assembling the packages of Pomona's image in {root} (once)", file=sys.stderr, flush=True)
                aside = folder / ".assembling"
                shutil.rmtree(aside, ignore_errors=True)
                assemble("dependencies", aside, f"--lock={lock}")
                aside.rename(root)
    return root


def assemble(part: str, root: Path, *options: str) -> None:
    """Run the program that the image is assembled by, with this Python."""
    subprocess.run([sys.executable, FOLDER / "assemble.py", part, root, *options], check=True)


def _dependencies_key() -> str:
    return _key("", [FOLDER / "assemble.py", *sorted(FOLDER.glob("*.lock"))])


def _key(prefix: str, files: Iterable[Path]) -> str:
    digest = hashlib.sha256(f"{prefix} {sys.version} {sys.base_prefix} {platform.machine()}".encode())
    for path in files:
        digest.update(f"\0{path.name}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    print(ensure_root())
