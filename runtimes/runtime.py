"""The type of a runtime, and the refusal of what it cannot serve.

A runtime is data and a few functions. It lists the formats, modes and settings that it supports, so that a service that
it cannot serve is refused with a message before anything is placed. Otherwise an engine would fail to start or ignore a
setting.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple

from crds.meta import Accelerator
from crds.model import WeightsFormat
from crds.pods import ContainerOptions
from crds.serving import CacheType, Mode, RuntimeName, ServingOptions
from devices.vendors import CPU, Vendor
from runtimes.pod import EnginePod
from runtimes.serving import Listen, Serving, Setting


class RuntimeDemand(NamedTuple):
    """The abilities that a service demands of a runtime."""

    format: WeightsFormat
    accelerator: Accelerator
    in_pods: bool
    options: ServingOptions = ServingOptions()
    draft: bool = False
    projector: bool = False
    adapter_scales: Sequence[str] = ()
    vendor: Vendor = CPU
    """The vendor's entry, for a service in pods."""
    has_image: bool = False
    """True if the service states the container image."""
    is_split: bool = False
    """True if the weights are known to be a GGUF model in several files."""
    container: ContainerOptions | None = None
    """The container that the service states, for an engine that Pomona does not know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLaunch:
    """Launch of a runtime on hosts that has a separate process for each model."""

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
    formats: frozenset[WeightsFormat]
    modes: frozenset[Mode]
    settings: frozenset[Setting] = frozenset()
    cache_types: frozenset[CacheType] = frozenset({"f16"})
    tuning: tuple[str, ...] = ()
    """Arguments that a user may set in extraArgs. All others are refused, unknown ones too: they could change arguments
    that Pomona renders, open the engine to the network, name files of its machine, log prompts, or take memory that is
    not reserved."""
    pulse: str | None = None
    """Path that the engine answers between two steps of its work, so that an answer proves that it works. Unlike a
    token, an answer evicts no cached prompt. None: the engine has no such path, and only a token is a proof."""
    on_hosts: bool = True
    """False for an engine that runs in pods only."""
    launch: EngineLaunch | None = None
    """Its launch on hosts. None: a daemon that serves many models, whose API the agent calls instead of starting a
    process; or an engine for pods only."""
    installed: Callable[[], bool] = lambda: False
    """Return whether this host has the engine. Blocks, since it may read files."""
    install_hint: str = "it runs in pods only"
    """Instruction to install it, for a message."""
    pod: EnginePod | None = None
    """Its start in pods; None: it runs on hosts only."""
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
_FORMAT_NAMES: Final[Mapping[WeightsFormat, str]] = MappingProxyType(
    {
        "gguf": "a GGUF file",
        "safetensors": "a folder of safetensors weights",
        "mlx": "a folder of MLX weights",
        "ollama": "a model of Ollama's library",
    }
)
_DEFAULTS: Final[Mapping[WeightsFormat, RuntimeName]] = MappingProxyType(
    {"gguf": "llama.cpp", "safetensors": "vllm", "mlx": "mlx-lm", "ollama": "ollama"}
)
_HOST_DEFAULTS: Final[Mapping[WeightsFormat, RuntimeName]] = MappingProxyType({"safetensors": "mlx-lm"})
"""Where the default on hosts is another one."""


def default_runtime(artifact_format: WeightsFormat, *, in_pods: bool) -> RuntimeName:
    """Return the runtime of a service that names none."""
    host_default = None if in_pods else _HOST_DEFAULTS.get(artifact_format)
    return host_default or _DEFAULTS[artifact_format]


def refuse_demand(runtime: Runtime, demand: RuntimeDemand) -> str | None:
    """Return why this runtime cannot serve `demand`, with the field and the remedy; None when it can."""
    checks = (_refuse_format, _refuse_place, _refuse_container, _refuse_settings, _refuse_arguments)
    reasons = (*(check(runtime, demand) for check in checks), runtime.refusal(demand))
    return next((reason for reason in reasons if reason is not None), None)


def _refuse_format(runtime: Runtime, demand: RuntimeDemand) -> str | None:
    if demand.format in runtime.formats:
        return None
    able = " or ".join(_FORMAT_NAMES[each] for each in sorted(runtime.formats))
    return (
        f"runtime {runtime.name} cannot serve {_FORMAT_NAMES[demand.format]}: set runtime to "
        f"{default_runtime(demand.format, in_pods=demand.in_pods)}, or give the Model {able} as its source"
    )


def _refuse_place(runtime: Runtime, demand: RuntimeDemand) -> str | None:
    name, accelerator = runtime.name, demand.accelerator
    if not demand.in_pods:
        if runtime.on_hosts:
            return None
        return (
            f"runtime {name} runs in pods only, and accelerator {accelerator} is outside of the cluster: set "
            f"hardware.accelerator to {_list_vendors(runtime)}, or runtime to "
            f"{default_runtime(demand.format, in_pods=False)}"
        )
    if runtime.pod is None:
        return (
            f"runtime {name} does not run in pods, where accelerator {accelerator} is: set hardware.accelerator to "
            f"metal, or runtime to {default_runtime(demand.format, in_pods=True)}"
        )
    if demand.has_image or runtime.pod.image(accelerator, demand.vendor, name) is not None:
        return None
    return (
        f"runtime {name} has no image for accelerator {accelerator}: set hardware.accelerator to "
        f"{_list_vendors(runtime)}, choose another runtime, or name an image in spec.image"
    )


def _list_vendors(runtime: Runtime) -> str:
    return " or ".join(sorted(runtime.pod.images)) if runtime.pod and runtime.pod.images else "an accelerator in pods"


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


def _refuse_container(runtime: Runtime, demand: RuntimeDemand) -> str | None:
    if demand.container is None or (runtime.pod and runtime.pod.from_container):
        return None
    return f"runtime {runtime.name} has a container of its own: remove container, or set runtime to generic"


def _refuse_arguments(runtime: Runtime, demand: RuntimeDemand) -> str | None:
    foreign = [each for each in demand.options.extra_args if each.startswith("-") and each not in runtime.tuning]
    if not foreign:
        return None
    able = f"it takes {' '.join(runtime.tuning)}" if runtime.tuning else "it takes none"
    return f"runtime {runtime.name} does not take {' '.join(foreign)} in extraArgs: {able}"
