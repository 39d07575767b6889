"""The engines that this host can run, and how each is started for a MetalProcess: the agent's door to `runtimes/`."""

import importlib.util
import os
import sys
from pathlib import Path

from crds.metalprocess import MetalProcessSpec
from devices.sockets import LOOPBACK, loopback_port
from devices.vendors import VENDORS
from runtimes import llama_server


def installed() -> list[str]:
    """Name the engines that can be started here."""
    wheel = importlib.util.find_spec("xllamacpp") is not None
    external = llama_server.command()[0] != sys.executable
    return [llama_server.NAME] if wheel or external else []


def argv(spec: MetalProcessSpec, model: Path) -> list[str]:
    """Render the command that serves `model` on a loopback port that the kernel chooses. It has no secret in it."""
    arguments = llama_server.arguments(
        str(model),
        LOOPBACK,
        0,
        service=spec.service_name,
        context_length=spec.context_length,
        parallel=spec.parallel,
        gpu_layers=VENDORS["metal"].gpu_layers if sys.platform == "darwin" else None,
        api_key_file=None,
        extra=spec.extra_args,
    )
    return [*llama_server.command(), *arguments]


def environment() -> dict[str, str]:
    """Return the engine's environment: ours, without what would configure it behind our back, and without tokens."""
    return llama_server.child_environment(os.environ)


def listening_url(pid: int) -> str | None:
    """Find where the engine `pid` listens; None when it does not yet."""
    port = loopback_port(pid)
    return f"http://{LOOPBACK}:{port}" if port else None
