"""What is served and how, in one struct that the pod builder and the agent both fill, and what a runtime is.

A runtime is data and three functions. It says which formats, modes and settings it can do, so that what it cannot do is
refused with a sentence before anything is placed, instead of by an engine that fails to start, or ignores it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

from crds.meta import Accelerator
from crds.serving import TUNING_ARGUMENTS, CacheType, Mode, RuntimeName

Format = Literal["gguf", "mlx", "ollama"]
"""Of an artifact: a GGUF file, a folder of MLX (Hugging Face) weights, or a model that Ollama pulls."""
Setting = Literal["draft", "projector", "adapters", "chat template", "parallel"]
"""What not every runtime can do; of cache types a runtime lists those that it has."""


class Adapter(NamedTuple):
    """A LoRA adapter as the engine sees it."""

    path: str
    scale: str = "1"
    """A decimal number as the user wrote it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What one engine serves; paths are as the engine sees them."""

    service: str
    """Name of the InferenceService, which clients send as `model`."""
    model: str
    """Path of the weights."""
    context_length: int
    """Tokens of context per request."""
    parallel: int
    """Requests generated at the same time, each with the whole context."""
    gpu_layers: int | None = None
    """Layers kept in accelerator memory; None leaves the choice to the engine."""
    mode: Mode = "chat"
    cache_type_k: CacheType = "f16"
    cache_type_v: CacheType = "f16"
    draft: str | None = None
    """Path of the draft model."""
    draft_max_tokens: int | None = None
    projector: str | None = None
    """Path of the projector."""
    adapters: Sequence[Adapter] = ()
    chat_template: str | None = None
    """The Jinja text itself."""
    extra: Sequence[str] = ()
    """The user's own arguments; they come last."""


class Listen(NamedTuple):
    """Where an engine listens."""

    host: str
    port: int
    """0 lets the kernel choose; `devices.sockets` then finds it."""
    api_key_file: str | None = None
    """Path of a file with the bearer token, where no proxy stands in front."""


class Wanted(NamedTuple):
    """What a service asks of a runtime, as far as a runtime may not be able to do it."""

    format: Format
    accelerator: Accelerator
    in_pods: bool
    mode: Mode = "chat"
    parallel: int = 1
    cache_types: tuple[CacheType, CacheType] = ("f16", "f16")
    draft: bool = False
    projector: bool = False
    adapter_scales: Sequence[str] = ()
    chat_template: bool = False
    extra: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """How a runtime that has a process of its own for each model is started."""

    command: Callable[[], list[str] | None]
    """Gives the argv prefix that starts it on this machine; None: it is not installed. May look at files: it blocks."""
    arguments: Callable[[Serving, Listen], list[str]]
    """Renders what follows the command. It has no secret in it."""
    environment: Callable[[Mapping[str, str]], dict[str, str]]
    """Gives the child's environment out of ours, without what would configure it behind our back."""
    served_name: str | None = None
    """What the engine wants as `model` in a request; None: the service's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """One engine: what it can do, how it comes here, and how it is started."""

    name: RuntimeName
    formats: frozenset[Format]
    modes: frozenset[Mode]
    settings: frozenset[Setting] = frozenset()
    cache_types: frozenset[CacheType] = frozenset({"f16"})
    pulse: str | None = None
    """Path that the engine answers between two steps of its work, so that an answer proves that it works, and that,
    unlike a token, costs no conversation its cached prompt. None: it has none, and only a token proves anything."""
    process: Process | None
    """None: a daemon that serves many models, and that the agent talks to instead of starting a process."""
    installed: Callable[[], bool]
    """Whether this host has it. May look at files: it blocks."""
    install_hint: str
    """What brings it here, for a message."""
    images: Mapping[Accelerator, str] = field(default_factory=lambda: MappingProxyType({}))
    """Container image by accelerator; without one it cannot be a pod."""
    refusal: Callable[[Wanted], str | None] = lambda _wanted: None
    """Gives why it cannot do what its tables alone allow, with the way out."""


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


def refusal(runtime: Runtime, wanted: Wanted) -> str | None:
    """Return why this runtime cannot serve that, with the field and the way out; None when it can."""
    reasons = (_place(runtime, wanted), _settings(runtime, wanted), _extra(runtime, wanted), runtime.refusal(wanted))
    return next((reason for reason in reasons if reason is not None), None)


def _place(runtime: Runtime, wanted: Wanted) -> str | None:
    if wanted.format not in runtime.formats:
        able = " or ".join(_FORMAT_NAMES[each] for each in sorted(runtime.formats))
        return (
            f"runtime {runtime.name} cannot serve {_FORMAT_NAMES[wanted.format]}: set runtime to "
            f"{default_runtime(wanted.format)}, or give the Model {able} as its source"
        )
    if wanted.in_pods and wanted.accelerator not in runtime.images:
        return (
            f"runtime {runtime.name} does not run in pods, where accelerator {wanted.accelerator} is: set "
            "hardware.accelerator to metal, or serve a GGUF file with runtime llama.cpp"
        )
    return None


def _settings(runtime: Runtime, wanted: Wanted) -> str | None:
    name = runtime.name
    if wanted.mode not in runtime.modes:
        return f"runtime {name} has no mode {wanted.mode}: use {' or '.join(sorted(runtime.modes))}, or llama.cpp"
    used: dict[Setting, bool] = {
        "draft": wanted.draft,
        "projector": wanted.projector,
        "adapters": bool(wanted.adapter_scales),
        "chat template": wanted.chat_template,
        "parallel": wanted.parallel > 1,
    }
    lacking = [_FIELDS[setting] for setting, is_used in used.items() if is_used and setting not in runtime.settings]
    if lacking:
        return f"runtime {name} cannot do {' and '.join(lacking)}: remove it, or serve a GGUF file with llama.cpp"
    for field_name, cache_type in zip(("cacheTypeK", "cacheTypeV"), wanted.cache_types, strict=True):
        if cache_type not in runtime.cache_types:
            return f"runtime {name} has no {field_name} {cache_type}: use {', '.join(sorted(runtime.cache_types))}"
    return None


def _extra(runtime: Runtime, wanted: Wanted) -> str | None:
    taken = TUNING_ARGUMENTS[runtime.name]
    foreign = [each for each in wanted.extra if each.startswith("-") and each not in taken]
    if not foreign:
        return None
    able = f"it takes {' '.join(taken)}" if taken else "it takes none"
    return f"runtime {runtime.name} does not take {' '.join(foreign)} in extraArgs: {able}"
