"""The engines that this host can run, and how each is started for a MetalProcess: the agent's door to `runtimes/`."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from artifacts.source import parse
from crds.metalprocess import FurtherArtifact, MetalProcessSpec
from devices.sockets import LOOPBACK
from devices.vendors import VENDORS
from runtimes.registry import RUNTIMES
from runtimes.serving import Adapter, Listen, Process, Serving, Wanted, refusal

_LISTEN = Listen(LOOPBACK, 0)


def installed() -> list[str]:
    """Name the runtimes with processes of their own that can serve here. Looks at files, so it blocks."""
    return [name for name, runtime in RUNTIMES.items() if runtime.process and runtime.installed()]


def argv(spec: MetalProcessSpec, model: Path, further: Sequence[Path] = ()) -> list[str]:
    """Render the command that serves `model` on a loopback port that the kernel chooses. It has no secret in it.

    Args:
        spec: what is to be served, by a runtime with a process of its own.
        model: the weights on this host.
        further: for each of `spec.further_artifacts` where it is on this host.

    Raises:
        ValueError: the runtime is not installed any more.
    """
    command = _process(spec).command()
    if command is None:
        raise ValueError(f"{spec.runtime} is not installed any more: {RUNTIMES[spec.runtime].install_hint}")
    return [*command, *_process(spec).arguments(serving(spec, model, further), _LISTEN)]


def serving(spec: MetalProcessSpec, model: Path, further: Sequence[Path] = ()) -> Serving:
    """Return what the engine of this process serves from which files."""
    there = list(zip(spec.further_artifacts, further, strict=True))
    return Serving(
        service=spec.service_name,
        model=str(model),
        context_length=spec.context_length,
        parallel=spec.parallel,
        gpu_layers=VENDORS["metal"].gpu_layers if sys.platform == "darwin" else None,
        mode=spec.mode,
        cache_type_k=spec.cache_type_k,
        cache_type_v=spec.cache_type_v,
        draft=_one("draft", there),
        draft_max_tokens=spec.draft_max_tokens,
        projector=_one("projector", there),
        adapters=[Adapter(str(path), each.scale) for each, path in there if each.role == "adapter"],
        chat_template=spec.chat_template,
        extra=spec.extra_args,
    )


def environment(spec: MetalProcessSpec) -> dict[str, str]:
    """Return the engine's environment: ours, without what would configure it behind our back, and without tokens."""
    return _process(spec).environment(os.environ)


def served_name(spec: MetalProcessSpec) -> str | None:
    """Return what the engine wants as `model` in a request; None: the service's name."""
    runtime = RUNTIMES[spec.runtime]
    return runtime.process.served_name if runtime.process else None


def inability(spec: MetalProcessSpec) -> str | None:
    """Return why the runtime cannot serve this, with the way out; None when it can. Raises SourceError."""
    further = spec.further_artifacts
    wanted = Wanted(
        format="mlx" if parse(spec.artifact.source).is_folder else "gguf",
        accelerator="metal",
        in_pods=False,
        mode=spec.mode,
        parallel=spec.parallel,
        cache_types=(spec.cache_type_k, spec.cache_type_v),
        draft=any(each.role == "draft" for each in further),
        projector=any(each.role == "projector" for each in further),
        adapter_scales=[each.scale for each in further if each.role == "adapter"],
        chat_template=spec.chat_template is not None,
        # The API server holds which arguments there are; a newer one may know more, and the engine here too.
        extra=(),
    )
    return refusal(RUNTIMES[spec.runtime], wanted)


def _process(spec: MetalProcessSpec) -> Process:
    runtime = RUNTIMES[spec.runtime]
    if runtime.process is None:
        raise ValueError(f"{spec.runtime} is a daemon, which is not started for one process")
    return runtime.process


def _one(role: str, there: Sequence[tuple[FurtherArtifact, Path]]) -> str | None:
    return next((str(path) for each, path in there if each.role == role), None)
