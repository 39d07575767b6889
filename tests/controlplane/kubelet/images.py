"""The images of the process kubelet: a table from the name of an image to programs and folders of this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from runtimes import llama_server
from runtimes.registry import RUNTIMES
from tests.controlplane import pomona_image
from tests.support.ollama.program import PROGRAM as OLLAMA

CHECKOUT = Path(__file__).resolve().parents[3]
VENV = Path(sys.prefix)
PATH = f"{VENV}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_STAND_INS = CHECKOUT / "tests/support/pod_engines/programs"
"""Stand-ins of engines that need a GPU or gigabytes, by the names that they have in their images."""
_ENTRY_POINTS: Mapping[str, tuple[str, ...]] = {
    "vllm": ("vllm", "serve"),
    "sglang": ("/opt/nvidia/nvidia_entrypoint.sh",),
    "tgi": ("text-generation-launcher",),
    "ollama": (sys.executable, "-m", "tests.support.ollama.container", str(OLLAMA)),
}
"""Entry points of those engines' images; that of SGLang's starts a shell."""

PREVIOUS = ":previous"
"""Tag of Pomona's image with the version that updates start from."""
ASSEMBLED = "registry.test/pomona:assembled"
"""Pomona's image with exactly what its Containerfile puts into it, where other tests run the checkout."""

# Variables of every container; the API server is at the first address of the Service range.
DEFAULT_ENVIRONMENT: Mapping[str, str] = {
    "HOME": "/root",
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "KUBERNETES_SERVICE_PORT": "443",
    "PATH": PATH,
}


@dataclass(frozen=True)
class Image:
    """An image: its configuration, and the folders of the host that it consists of."""

    entrypoint: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    working_dir: str = "/"
    visible: tuple[Path, ...] = ()
    root: Path | None = None
    """Folder that is the whole image; without it, the image is this machine's folders."""
    user: int = 0


def find(reference: str) -> Image | None:
    """Return the image that a reference names, or None; tag and digest of Pomona's own images are ignored."""
    if reference in llama_server.IMAGES.values():
        return _of_this_checkout(tuple(llama_server.find_command() or ()))
    for engine, entrypoint in _ENTRY_POINTS.items():
        pod = RUNTIMES[engine].pod
        if pod and reference in pod.images.values():
            return _of_engine(entrypoint)
    match _repository(reference):
        case "ghcr.io/pomona-dev/pomona" if reference.endswith(PREVIOUS):
            return _of_previous_version()
        case "registry.test/pomona":
            return _assembled()
        case "ghcr.io/pomona-dev/pomona":
            return _of_this_checkout((sys.executable, "-m", "cli.main"))
        case "pomona-test":
            return _of_this_checkout(())
    return None


def _assembled() -> Image | None:
    root = pomona_image.find_root()
    if not root.exists():
        return None  # a sandbox reaches no package index: `make image-root` assembles it
    configuration = pomona_image.read_configuration()
    # The runtime takes HOME from the image's /etc/passwd.
    environment = {"HOME": "/", **configuration.environment}
    return Image(configuration.entrypoint, environment, root=root, user=configuration.user)


def _repository(reference: str) -> str:
    name = reference.partition("@")[0]
    head, _, last = name.rpartition("/")
    return f"{head}/{last.partition(':')[0]}".lstrip("/")


def _of_this_checkout(entrypoint: tuple[str, ...]) -> Image:
    # A virtual environment links to the original interpreter, which may be in a home folder.
    folders = [CHECKOUT, VENV, Path(sys.base_prefix), Path(sys.executable).resolve().parent.parent]
    environment = {"PYTHONPATH": str(CHECKOUT), "PYTHONDONTWRITEBYTECODE": "1"}
    if binary := os.environ.get("LLAMA_SERVER_BIN"):
        folders.append(Path(binary).resolve().parent)
        environment["LLAMA_SERVER_BIN"] = binary
    return Image(entrypoint=entrypoint, environment=environment, visible=tuple(folders))


def _of_previous_version() -> Image:
    from tests.support.previous_version import unpack  # noqa: PLC0415 - few kubelets run it

    image = _of_this_checkout((sys.executable, "-m", "cli.main"))
    folder = unpack().folder
    # Python looks for modules in the working directory first.
    return replace(
        image,
        environment={**image.environment, "PYTHONPATH": str(folder)},
        working_dir=str(folder),
        visible=(*image.visible, folder),
    )


def _of_engine(entrypoint: tuple[str, ...]) -> Image:
    image = _of_this_checkout(entrypoint)
    own = {"PATH": f"{_STAND_INS}:{PATH}", "PYTHONPATH": f"{CHECKOUT}:{_STAND_INS}"}
    return replace(image, environment={**image.environment, **own}, visible=(*image.visible, OLLAMA.parent))
