"""The engines that this host can run, and how each is started for a MetalProcess: the agent's door to `runtimes/`."""

import importlib.util
import os
import sys
from pathlib import Path

from crds.metalprocess import MetalProcessSpec
from runtimes import llama_server

_ALL_LAYERS = 999
"""More than any model has: on a Mac all layers go to Metal, or the engine fails, and never half of them unnoticed."""


def installed() -> list[str]:
    """Name the engines that can be started here."""
    wheel = importlib.util.find_spec("xllamacpp") is not None
    external = llama_server.command()[0] != sys.executable
    return [llama_server.NAME] if wheel or external else []


def argv(spec: MetalProcessSpec, model: Path) -> list[str]:
    """Render the command that serves `model` on a loopback port that the kernel chooses. It has no secret in it."""
    arguments = llama_server.arguments(
        str(model),
        "127.0.0.1",
        0,
        service=spec.service_name,
        context_length=spec.context_length,
        parallel=spec.parallel,
        gpu_layers=_ALL_LAYERS if sys.platform == "darwin" else None,
        api_key_file=None,
        extra=spec.extra_args,
    )
    return [*llama_server.command(), *arguments]


def environment() -> dict[str, str]:
    """Return the engine's environment: ours, without what would configure it behind our back, and without tokens."""
    return llama_server.child_environment(os.environ)


def listening_url(log: Path) -> str | None:
    """Find where the engine that writes `log` listens; None when it does not yet."""
    try:
        return llama_server.listening_url(log.read_text(errors="replace"))
    except OSError:
        return None
