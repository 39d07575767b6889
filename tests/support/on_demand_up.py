"""A `pomona up` with tiny models on demand, each of which answers with its name, and a look at its real engines."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from kube.client import Obj
from kube.resources import MODELS
from metal_agent.native.process import OWNER_VARIABLE
from tests.support.api_objects import GIB
from tests.support.refused_manifests import make_manifest
from tests.support.tiny_models import tiny_gguf
from tests.support.up_command import manifest, service

MODEL_BYTES = GIB // 4
"""Memory that each model states."""


def write_models(folder: Path, *names: str, more: tuple[Obj, ...] = (), **spec: Any) -> str:
    """Write weights and manifests of models on demand, and return the path of the manifests; `more` are further ones.

    Each answers "NAME speaks.", and has the fields of `spec` in its service.
    """
    objects = list(more)
    for name in names:
        path = folder / f"{name}.gguf"
        tiny_gguf.write(path, text=f"{name} speaks.")
        objects += [
            make_manifest(MODELS, name=name, source=path.as_uri(), memoryBytes=MODEL_BYTES),
            service(name, name, **{"scaling": {"minReplicas": 0}} | spec),
        ]
    return manifest(folder / "models.yaml", *objects)


def room_for(models: int) -> str:
    """Return the argument that gives `pomona up` the memory for so many models."""
    return f"--memory-budget={models * MODEL_BYTES + MODEL_BYTES // 2}"


def find_engines(state_folder: Path) -> dict[int, str]:
    """Return the models of the engines that run from a state folder, by pid."""
    return {
        process.pid: words[words.index("-a") + 1]
        for process, words in list_own_processes(state_folder)
        if "runtimes.llama_launcher" in words
    }


def find_pid(state_folder: Path, model: str) -> int:
    """Return the pid of the only engine of a model."""
    (found,) = [pid for pid, name in find_engines(state_folder).items() if name == model]
    return found


def find_proxy(state_folder: Path) -> int:
    """Return the pid of the proxy that runs from a state folder."""
    return next(process.pid for process, words in list_own_processes(state_folder) if "proxy" in words)


def list_own_processes(state_folder: Path) -> Iterator[tuple[psutil.Process, list[str]]]:
    """Yield the processes that were started for a state folder and have not ended, with their command lines."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            is_own = process.environ().get(OWNER_VARIABLE) == str(state_folder)
            if is_own and process.status() != psutil.STATUS_ZOMBIE:
                yield process, process.cmdline()
