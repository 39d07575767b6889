"""The files and options that an engine serves, built by one function for pods and hosts, and the type of a runtime.

A runtime is data and a few functions. It lists the formats, modes and settings that it supports, so that a service that
it cannot serve is refused with a message before anything is placed. Otherwise an engine would fail to start or ignore a
setting.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

from crds.meta import Accelerator
from crds.serving import TUNING_ARGUMENTS, CacheType, Mode, Role, RuntimeName, ServingOptions

Format = Literal["gguf", "mlx", "ollama"]
"""Format of an artifact: a GGUF file, a folder of MLX (Hugging Face) weights, or a model that Ollama pulls."""
Setting = Literal["draft", "projector", "adapters", "chat template", "parallel"]
"""A setting that not every runtime supports; cache types are listed by each runtime."""


class CompanionFile(NamedTuple):
    """A draft, projector or LoRA adapter as the engine sees it."""

    role: Role
    path: str
    scale: str = "1"
    """Scale of an adapter: a decimal number as the user wrote it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """The files and options that one engine serves; paths are as the engine sees them."""

    service: str
    """Name of the InferenceService, which clients send as `model`."""
    model: str
    """Path of the weights."""
    options: ServingOptions
    """Serving options, from which the engine's arguments are rendered."""
    gpu_layers: int | None = None
    """Layers kept in accelerator memory; None leaves the choice to the engine."""
    draft: str | None = None
    """Path of the draft model."""
    draft_max_tokens: int | None = None
    projector: str | None = None
    """Path of the projector."""
    adapters: Sequence[CompanionFile] = ()


def build_serving(
    service: str,
    model: str,
    options: ServingOptions,
    companions: Iterable[CompanionFile] = (),
    *,
    draft_max_tokens: int | None = None,
    gpu_layers: int | None = None,
) -> Serving:
    """Build the files and options that an engine serves, in a pod or on a host.

    Args:
        service: name of the InferenceService.
        model: path of the weights as the engine sees it.
        options: serving options, such as the spec of an InferenceService or MetalProcess.
        companions: files that are served together with the model; at most one draft and one projector.
        draft_max_tokens: tokens that the draft guesses ahead at most; None leaves it to the engine.
        gpu_layers: layers kept in accelerator memory; None leaves the choice to the engine.
    """
    companions = tuple(companions)
    paths = {companion.role: companion.path for companion in companions}
    return Serving(
        service=service,
        model=model,
        options=options,
        gpu_layers=gpu_layers,
        draft=paths.get("draft"),
        draft_max_tokens=draft_max_tokens,
        projector=paths.get("projector"),
        adapters=tuple(companion for companion in companions if companion.role == "adapter"),
    )


class Listen(NamedTuple):
    """Address at which an engine listens."""

    host: str
    port: int
    """0 lets the kernel choose; `devices.sockets` then finds it."""
    api_key_file: str | None = None
    """Path of a file with the bearer token that the engine requires; None: it requires none."""
    behind_proxy: bool = False
    """True if only the proxy of this host, and the agent, send requests to it."""


class RuntimeDemand(NamedTuple):
    """The abilities that a service demands of a runtime."""

    format: Format
    accelerator: Accelerator
    in_pods: bool
    options: ServingOptions = ServingOptions()
    draft: bool = False
    projector: bool = False
    adapter_scales: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """Start of a runtime that has a separate process for each model."""

    command: Callable[[], list[str] | None]
    """Return the argv prefix that starts the engine on this machine, or None if it is not installed. Blocks, since it
    may read files."""
    arguments: Callable[[Serving, Listen], list[str]]
    """Render the arguments after the command. They contain no secret."""
    environment: Callable[[Mapping[str, str]], dict[str, str]]
    """Make the child's environment from ours: see `runtimes.environment`."""
    served_name: str | None = None
    """Value of `model` that the engine wants in a request; None: the service's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """One engine: its abilities, its installation, and its start."""

    name: RuntimeName
    formats: frozenset[Format]
    modes: frozenset[Mode]
    settings: frozenset[Setting] = frozenset()
    cache_types: frozenset[CacheType] = frozenset({"f16"})
    pulse: str | None = None
    """Path that the engine answers between two steps of its work, so that an answer proves that it works. Unlike a
    token, an answer evicts no cached prompt. None: the engine has no such path, and only a token is a proof."""
    process: Process | None
    """None: a daemon that serves many models; the agent calls its API instead of starting a process."""
    installed: Callable[[], bool]
    """Return whether this host has the engine. Blocks, since it may read files."""
    install_hint: str
    """Instruction to install it, for a message."""
    images: Mapping[Accelerator, str] = field(default_factory=lambda: MappingProxyType({}))
    """Container image by accelerator; without an image, the engine cannot run in a pod."""
    refusal: Callable[[RuntimeDemand], str | None] = lambda _demand: None
    """Return why the engine cannot serve a demand that the fields above allow, with the remedy, or None."""


_FIELDS: Final[Mapping[Setting, str]] = MappingProxyType(
    {
        "draft": "speculative",
        "projector": "projectorModelRef",
        "adapters": "adapters",
        "chat template": "chatTemplate",
        "parallel": "parallel",
    }
)
_FORMAT_NAMES: Final[Mapping[Format, str]] = MappingProxyType(
    {"gguf": "a GGUF file", "mlx": "a folder of MLX weights", "ollama": "a model of Ollama's library"}
)
_DEFAULTS: Final[Mapping[Format, RuntimeName]] = MappingProxyType(
    {"gguf": "llama.cpp", "mlx": "mlx-lm", "ollama": "ollama"}
)


def default_runtime(artifact_format: Format) -> RuntimeName:
    """Return the runtime of a service that names none."""
    return _DEFAULTS[artifact_format]


def refusal(runtime: Runtime, demand: RuntimeDemand) -> str | None:
    """Return why this runtime cannot serve `demand`, with the field and the remedy; None when it can."""
    checks = (_refuse_place, _refuse_settings, _refuse_arguments)
    reasons = (*(check(runtime, demand) for check in checks), runtime.refusal(demand))
    return next((reason for reason in reasons if reason is not None), None)


def _refuse_place(runtime: Runtime, demand: RuntimeDemand) -> str | None:
    if demand.format not in runtime.formats:
        able = " or ".join(_FORMAT_NAMES[each] for each in sorted(runtime.formats))
        return (
            f"runtime {runtime.name} cannot serve {_FORMAT_NAMES[demand.format]}: set runtime to "
            f"{default_runtime(demand.format)}, or give the Model {able} as its source"
        )
    if demand.in_pods and demand.accelerator not in runtime.images:
        return (
            f"runtime {runtime.name} does not run in pods, where accelerator {demand.accelerator} is: set "
            "hardware.accelerator to metal, or serve a GGUF file with runtime llama.cpp"
        )
    return None


def _refuse_settings(runtime: Runtime, demand: RuntimeDemand) -> str | None:
    name, options = runtime.name, demand.options
    if options.mode not in runtime.modes:
        return f"runtime {name} has no mode {options.mode}: use {' or '.join(sorted(runtime.modes))}, or llama.cpp"
    used: dict[Setting, bool] = {
        "draft": demand.draft,
        "projector": demand.projector,
        "adapters": bool(demand.adapter_scales),
        "chat template": options.chat_template is not None,
        "parallel": options.parallel > 1,
    }
    lacking = [_FIELDS[setting] for setting, is_used in used.items() if is_used and setting not in runtime.settings]
    if lacking:
        return f"runtime {name} cannot do {' and '.join(lacking)}: remove it, or serve a GGUF file with llama.cpp"
    for field_name, cache_type in (("cacheTypeK", options.cache_type_k), ("cacheTypeV", options.cache_type_v)):
        if cache_type not in runtime.cache_types:
            return f"runtime {name} has no {field_name} {cache_type}: use {', '.join(sorted(runtime.cache_types))}"
    return None


def _refuse_arguments(runtime: Runtime, demand: RuntimeDemand) -> str | None:
    taken = TUNING_ARGUMENTS[runtime.name]
    foreign = [each for each in demand.options.extra_args if each.startswith("-") and each not in taken]
    if not foreign:
        return None
    able = f"it takes {' '.join(taken)}" if taken else "it takes none"
    return f"runtime {runtime.name} does not take {' '.join(foreign)} in extraArgs: {able}"
