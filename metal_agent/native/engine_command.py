"""Engines that this host can run, and the command and environment of each for a MetalProcess."""

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from artifacts.source import parse
from crds.metalprocess import MetalProcessSpec
from crds.weights_header import GGUF, Layout
from devices.sockets import LOOPBACK
from runtimes.registry import RUNTIMES
from runtimes.runtime import EngineLaunch, RuntimeDemand
from runtimes.runtime_choice import refuse_demand
from runtimes.serving import CompanionFile, Listen, Serving


def list_installed() -> list[str]:
    """Return the runtimes with processes of their own that are installed. It reads files, so it blocks."""
    return [name for name, runtime in RUNTIMES.items() if runtime.launch and runtime.installed()]


def identify_engine(spec: MetalProcessSpec) -> str:
    """Return a text that changes with the version of the installed engine of a process, or "" if it is unknown.

    It reads files, so it blocks.
    """
    from importlib import metadata  # noqa: PLC0415 - only for a measurement

    launch = RUNTIMES[spec.runtime].launch
    command = launch.command() if launch else None
    if launch is None or not command:
        return ""

    # The command, the time at which its program was changed, and the version of its package.
    parts = [" ".join(command)]
    with contextlib.suppress(OSError):
        parts.append(str(Path(command[0]).stat().st_mtime_ns))
    with contextlib.suppress(metadata.PackageNotFoundError):
        parts.append(metadata.version(launch.package) if launch.package else "")
    return " ".join(filter(None, parts))


def build_argv(
    spec: MetalProcessSpec,
    model: Path,
    key_file: Path,
    further: Sequence[Path] = (),
    layout: Layout | None = None,
) -> list[str]:
    """Return the command that serves `model` on a loopback port that the kernel chooses. It has no secret in it.

    Args:
        spec: the spec of a MetalProcess whose runtime has a process of its own.
        model: the weights on this host.
        key_file: the file with the key that the engine requires.
        further: the path on this host of each of `spec.further_artifacts`.
        layout: the layout of the weights; None: unknown.

    Raises:
        ValueError: the runtime is no longer installed.
    """
    launch = _find_launch(spec)
    command = launch.command()
    if command is None:
        raise ValueError(f"{spec.runtime} is no longer installed: {RUNTIMES[spec.runtime].install_hint}")

    # Port 0: the kernel chooses one.
    listen = Listen(host=LOOPBACK, port=0, api_key_file=str(key_file))
    return [*command, *launch.arguments(build_process_serving(spec, str(model), further, layout), listen)]


def build_process_serving(
    spec: MetalProcessSpec, model: str, further: Sequence[Path] = (), layout: Layout | None = None
) -> Serving:
    """Return the `Serving` of the engine of this process: `model` is a path, or a source that its daemon fetches."""
    # further_artifacts: what the model is served with, such as a draft model or an adapter; `further` are their paths.
    companions = [
        CompanionFile(artifact.role, str(path), artifact.scale, artifact.request_name)
        for artifact, path in zip(spec.further_artifacts, further, strict=True)
    ]
    # on_device: a Mac has the whole model in the memory of its GPU; elsewhere the engine may choose.
    tokens, on_device = spec.draft_max_tokens, sys.platform == "darwin"
    return Serving(
        spec.service_name, model, spec, companions, draft_max_tokens=tokens, layout=layout, on_device=on_device
    )


def build_environment(spec: MetalProcessSpec) -> dict[str, str]:
    """Return the engine's environment: what it needs of the agent's, and nothing that may be a secret."""
    launch = _find_launch(spec)
    return launch.environment(os.environ) | launch.variables(spec)


def find_served_name(spec: MetalProcessSpec) -> str | None:
    """Return the name of the model in requests to the engine, or None if that is the service's name."""
    runtime = RUNTIMES[spec.runtime]
    return runtime.launch.served_name if runtime.launch else None


def find_obstacle(spec: MetalProcessSpec, headers: Sequence[GGUF] = ()) -> str | None:
    """Return the reason why the runtime cannot serve `spec`, with a way out; None if it can. Raises SourceError.

    `headers` are those of the fetched weights: of the model, then of the further artifacts in their order.
    """
    further = spec.further_artifacts
    source = parse(spec.artifact.source, spec.artifact.files)

    # Before the fetch there are no headers: then the spec alone is judged.
    demand = RuntimeDemand(
        format="mlx" if source.is_folder and not source.is_gguf else "gguf",
        accelerator="metal",
        in_pods=False,
        is_split=source.is_split,
        options=spec,
        draft=any(artifact.role == "draft" for artifact in further),
        projector=any(artifact.role == "projector" for artifact in further),
        adapter_scales=[artifact.scale for artifact in further if artifact.role == "adapter"],
        adapters_on_request=any(artifact.request_name for artifact in further),
        header=headers[0] if headers else GGUF(),
        companion_headers=[(artifact.role, header) for artifact, header in zip(further, headers[1:], strict=False)],
    )
    return refuse_demand(RUNTIMES[spec.runtime], demand)


def _find_launch(spec: MetalProcessSpec) -> EngineLaunch:
    """Return how engines of the runtime are started. Raises ValueError for a daemon."""
    runtime = RUNTIMES[spec.runtime]
    if runtime.launch is None:
        raise ValueError(f"{spec.runtime} is a daemon, which is not started for one process")
    return runtime.launch
