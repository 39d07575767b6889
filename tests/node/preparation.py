"""Preparation of this machine for real nodes: `python -m tests.node.preparation`, as root, outside of the sandbox.

Debian's containerd, runc and CNI plugins, the kubelet of the tests' own Go module, and images as archives, without any
registry: Pomona's, built by buildah from `Containerfile` on a minimal Debian with Python, an engine's, that of
kube-scheduler, and one of a process that only waits.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Self

from runtimes import llama_server
from tests.controlplane import pomona_image
from tests.controlplane.binaries import (
    MODULE,
    build_missing,
    cache_folder,
    ensure_binaries,
    lock_folder,
    read_pins,
    version_variables,
)
from tests.controlplane.go_build import BuildError
from tests.controlplane.process import CHECKOUT

FOLDER: Final = CHECKOUT / "build" / "node"
POMONA: Final = "registry.test/pomona:1"
PAUSE: Final = "registry.test/pause:1"
SCHEDULER: Final = "registry.test/kube-scheduler:1"
ENGINE: Final = llama_server.IMAGES["cpu"]
PACKAGES: Final = {
    "containerd": "containerd",
    "runc": "runc",
    "buildah": "buildah",
    "debootstrap": "debootstrap",
    "/usr/lib/cni/bridge": "containernetworking-plugins",
}
"""Debian package by the program that it brings."""
CGROUPS: Final = Path("/sys/fs/cgroup")
PIP_SETTINGS: Final = (Path.home() / ".config/pip/pip.conf", Path.home() / ".pip/pip.conf", Path("/etc/pip.conf"))


class PreparationError(Exception):
    """This machine cannot run a real node; the message says why not and the way out."""


def check() -> None:
    """Check that a node can run here. Raises PreparationError."""
    if os.geteuid() != 0:
        raise PreparationError("a real node needs root: run `sudo make test-node`, or `make test` for all without one")
    writable = [path for path in cgroup_folders() if os.access(path, os.W_OK)]
    if not writable or not all((path / "cgroup.procs").exists() for path in writable):
        raise PreparationError(
            f"a real node needs control groups, and {CGROUPS} has none that can be written: in a container, start that "
            "with --privileged --cgroupns=host"
        )


def cgroup_folders() -> list[Path]:
    """Return the roots of this machine's cgroup hierarchies: one of version 2, or one for each controller."""
    if (CGROUPS / "cgroup.controllers").exists():
        return [CGROUPS]
    return sorted(path for path in CGROUPS.iterdir() if path.is_dir() and not path.is_symlink())


def install_packages() -> None:
    """Install the Debian packages that are absent. Raises PreparationError: apt-get is absent, or it failed."""
    absent = sorted({package for program, package in PACKAGES.items() if shutil.which(program) is None})
    if not absent:
        return
    if shutil.which("apt-get") is None:
        raise PreparationError(f"install {', '.join(absent)}: this machine has no apt-get to do it")
    for command in (["apt-get", "-qq", "update"], ["apt-get", "-qqy", "--no-install-recommends", "install", *absent]):
        _run(command, f"installing {', '.join(absent)}")


def ensure_kubelet() -> Path:
    """Return the kubelet, built once. Raises BuildError."""
    pins = read_pins((MODULE / "go.mod").read_text())
    folder = cache_folder() / "controlplane" / pins.key
    package = {"kubelet": "k8s.io/kubernetes/cmd/kubelet"}
    build_missing(MODULE, package, folder, go_version=pins.go, variables=version_variables(pins))
    return folder / "kubelet"


def ensure_images() -> list[Path]:
    """Return the archives of the images for this state of the checkout. Raises PreparationError."""
    root = pomona_image.ensure_root()
    folder = FOLDER / root.name
    if not folder.exists():
        with lock_folder(FOLDER):
            for older in (path for path in FOLDER.iterdir() if path.is_dir()):
                shutil.rmtree(older)
            aside = FOLDER / ".building"
            aside.mkdir()
            _build_pomona(aside / "pomona.tar")
            _build_others(root, aside)
            aside.rename(folder)
    return sorted(folder.glob("*.tar"))


def _ensure_base() -> Path:
    """Return an archive of a minimal Debian with Python, in the place of Python's own image."""
    archive = cache_folder() / "node" / "debian-python.tar"
    if not archive.exists():
        folder = archive.with_name("debian-python")
        shutil.rmtree(folder, ignore_errors=True)
        archive.parent.mkdir(parents=True, exist_ok=True)
        include = "--include=python3,python3-pip,python3-venv,ca-certificates"
        _run(["debootstrap", "--variant=minbase", include, "bookworm", folder], "making a minimal Debian with Python")
        _run(["tar", "-C", folder, "-cf", archive.with_suffix(".part"), "."], "packing the minimal Debian")
        archive.with_suffix(".part").rename(archive)
        shutil.rmtree(folder)
    return archive


class _Buildah:
    """buildah with a storage of its own, which is removed at the end."""

    def __init__(self) -> None:
        self._folder = FOLDER / "buildah"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        subprocess.run(["umount", "--recursive", self._folder], capture_output=True, check=False)
        shutil.rmtree(self._folder, ignore_errors=True)

    def __call__(self, *arguments: str | Path) -> str:
        places = [f"--root={self._folder}/storage", f"--runroot={self._folder}/run", "--storage-driver=vfs"]
        return _run(["buildah", *places, *arguments], f"buildah {arguments[0]}").strip()

    def commit_root(self, root: Path, image: str, *settings: str) -> None:
        """Make an image with one layer."""
        container = self("from", "scratch")
        self("add", "--quiet", container, root, "/")
        if settings:
            self("config", *settings, container)
        self("commit", "--quiet", "--rm", container, image)


def _build_pomona(archive: Path) -> None:
    """Build `Containerfile`, as `make image` does, on a base that needs no registry."""
    settings = [f"--volume={path}:/etc/pip.conf:ro" for path in PIP_SETTINGS if path.exists()][:1]
    with _Buildah() as buildah:
        buildah.commit_root(_ensure_base(), "localhost/python:base")
        buildah(
            *("build", "--isolation=chroot", "--network=host", "--volume=/etc/ssl/certs:/etc/ssl/certs:ro", *settings),
            *(
                "--build-arg=BASE=localhost/python:base",
                f"--tag={POMONA}",
                f"--file={CHECKOUT}/Containerfile",
                CHECKOUT,
            ),
        )
        _push(buildah, archive, POMONA)


def _build_others(root: Path, folder: Path) -> None:
    """Build images of llama.cpp's server, from this machine's Python, of kube-scheduler and of a process that waits."""
    lock = folder / "engine.lock"
    everything = (CHECKOUT / "requirements.lock").read_text()
    block = re.search(r"^xllamacpp==.*?(?=^[a-z])", everything, re.MULTILINE | re.DOTALL)
    assert block, "requirements.lock has no xllamacpp"
    lock.write_text((pomona_image.FOLDER / "requirements.lock").read_text() + block[0])
    assembled = folder / "engine"
    pomona_image.assemble("dependencies", assembled, f"--lock={lock}")
    pomona_image.assemble("project", assembled)
    path = "--env=PATH=/opt/pomona/bin"
    scheduler = folder / "scheduler"
    scheduler.mkdir()
    shutil.copy2(ensure_binaries().kube_scheduler, scheduler)
    with _Buildah() as buildah:
        buildah.commit_root(assembled, ENGINE, path, '--entrypoint=["pomona", "llama-server"]')
        waiting = '--entrypoint=["python", "-c", "import signal; signal.pause()"]'
        buildah.commit_root(root, PAUSE, path, waiting, "--user=65532:65532")
        # It is linked statically, and needs no other file.
        buildah.commit_root(scheduler, SCHEDULER, "--env=PATH=/")
        _push(buildah, folder / "engine.tar", ENGINE)
        _push(buildah, folder / "scheduler.tar", SCHEDULER)
        _push(buildah, folder / "pause.tar", PAUSE)
    shutil.rmtree(assembled)
    shutil.rmtree(scheduler)


def _push(buildah: _Buildah, archive: Path, image: str) -> None:
    buildah("push", "--quiet", image, f"docker-archive:{archive}:{image}")


def _run(command: Sequence[str | Path], what: str) -> str:
    print(what, file=sys.stderr, flush=True)
    result = subprocess.run([str(argument) for argument in command], capture_output=True, text=True, check=False)
    if result.returncode != 0:
        said = "\n".join((result.stdout + result.stderr).splitlines()[-20:])
        raise PreparationError(f"{what}: exit code {result.returncode}:\n{said}")
    return result.stdout


def main() -> None:
    """Prepare everything, with messages on the way."""
    try:
        check()
        install_packages()
        ensure_kubelet()
        ensure_images()
    except (PreparationError, BuildError) as error:
        sys.exit(f"make test-node: {error}")


if __name__ == "__main__":
    main()
