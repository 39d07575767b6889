"""The choice of the runtime of a service that names none, and the refusal of what a runtime cannot serve.

A service that its runtime cannot serve is refused with a message before anything is placed. Otherwise an engine would
fail to start or ignore a setting.
"""

import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Final

from crds.serving import RuntimeName
from crds.weights_header import WeightsFormat
from devices.vendors import CPU, Vendors
from runtimes.header_fit import refuse_header
from runtimes.registry import RUNTIMES
from runtimes.runtime import Runtime, RuntimeDemand
from runtimes.serving import Setting

_MOST_WHOLE_CONTEXTS: Final = 64
_FIELDS: Final[Mapping[Setting, str]] = {
    "draft": "speculative",
    "projector": "projectorModelRef",
    "adapters": "adapters",
    "chat template": "chatTemplate",
    "parallel": "parallel",
    "prompt cache": "promptCache",
}
_FORMAT_NAMES: Final[Mapping[WeightsFormat, str]] = {
    "gguf": "a GGUF file",
    "safetensors": "a folder of safetensors weights",
    "mlx": "a folder of MLX weights",
    "ollama": "a model of Ollama's library",
}
_LOAD_FORMATS: Final = ("auto", "safetensors", "fastsafetensors", "instanttensor", "runai_streamer")
_NUMBER: Final = re.compile(r"-[0-9.]+")


def choose_runtime(demand: RuntimeDemand) -> RuntimeName:
    """Return the runtime of a service that names none: the first in the registry that takes the format and fits.

    On a host, the first that runs on hosts. In pods, the first with an image for the accelerator; if there is none, or
    the service states the image, the first that runs in pods. If none runs in that place, the first of all, which is
    then refused with a reason.
    """
    fitting = [runtime for runtime in RUNTIMES.values() if demand.format in runtime.formats]
    anywhere = fitting[0].name
    if not demand.in_pods:
        return next((runtime.name for runtime in fitting if runtime.on_hosts), anywhere)

    # A service that describes its engine in spec.container names it in spec.runtime.
    pods = {runtime.name: runtime.pod for runtime in fitting if runtime.pod and not runtime.pod.from_container}
    default = next(iter(pods), anywhere)  # the first one in pods
    if demand.has_image or demand.accelerator not in demand.vendors:
        return default
    vendor = demand.vendors[demand.accelerator]

    # The first with an image for the accelerator.
    for name, pod in pods.items():
        if pod.find_image(demand.accelerator, vendor, name) is not None:
            return name
    return default


def refuse_demand(runtime: Runtime, demand: RuntimeDemand) -> str | None:
    """Return why this runtime cannot serve `demand`, with the field and the remedy; None when it can."""
    checks = (_refuse_format, _refuse_place, _refuse_container, _refuse_settings, _refuse_arguments)
    reasons = [check(runtime, demand) for check in checks]
    # Beside the checks by its fields, a runtime has a check of its own.
    reasons += [runtime.refusal(demand), refuse_header(runtime, demand)]
    return next((reason for reason in reasons if reason is not None), None)


def _refuse_format(runtime: Runtime, demand: RuntimeDemand) -> str | None:
    """Return why the engine cannot load the weights, or None."""
    if demand.format in runtime.formats:
        return None
    formats = " or ".join(_FORMAT_NAMES[file_format] for file_format in sorted(runtime.formats))
    return (
        f"runtime {runtime.name} cannot serve {_FORMAT_NAMES[demand.format]}: set runtime to "
        f"{choose_runtime(demand)}, or give the Model {formats} as its source"
    )


def _refuse_place(runtime: Runtime, demand: RuntimeDemand) -> str | None:
    """Return why the engine does not run where the accelerator is, in pods or on hosts; or None.

    In pods it needs an image for the accelerator, which the service may state.
    """
    name, accelerator = runtime.name, demand.accelerator
    # On hosts.
    if not demand.in_pods:
        if runtime.on_hosts:
            return None
        return (
            f"runtime {name} runs in pods only, and accelerator {accelerator} is outside of the cluster: set "
            f"hardware.accelerator to {_list_vendors(runtime, demand.vendors)}, or runtime to "
            f"{choose_runtime(demand)}"
        )

    # In pods.
    if runtime.pod is None:
        return (
            f"runtime {name} does not run in pods, where accelerator {accelerator} is: set hardware.accelerator to "
            f"metal, or runtime to {choose_runtime(demand)}"
        )

    # An accelerator that is not in the table counts as a processor.
    vendor = demand.vendors.get(accelerator, CPU)
    if demand.has_image or runtime.pod.find_image(accelerator, vendor, name) is not None:
        return None
    return (
        f"runtime {name} has no image for accelerator {accelerator}: set hardware.accelerator to "
        f"{_list_vendors(runtime, demand.vendors)}, choose another runtime, or name an image in spec.image"
    )


def _list_vendors(runtime: Runtime, vendors: Vendors) -> str:
    """Return the accelerators for which this runtime has an image, built in or of the administrator's file."""
    pod = runtime.pod
    names = [name for name, vendor in vendors.items() if pod and pod.find_image(name, vendor, runtime.name)]
    return " or ".join(sorted(names)) or "an accelerator in pods"


def _refuse_settings(runtime: Runtime, demand: RuntimeDemand) -> str | None:
    """Return which setting the engine does not have, or None."""
    name, options = runtime.name, demand.options
    if options.mode not in runtime.modes:
        return f"runtime {name} has no mode {options.mode}: use {' or '.join(sorted(runtime.modes))}, or llama.cpp"

    if (options.parallel or 1) > _MOST_WHOLE_CONTEXTS and runtime.cache_sharing != "blocks":
        most = f"at most {_MOST_WHOLE_CONTEXTS} requests at once, each with a whole context"
        return f"runtime {name} serves {most}: lower parallel of {options.parallel}"

    # By setting that not every engine has, whether the service uses it.
    used: dict[Setting, bool] = {
        "draft": demand.draft,
        "projector": demand.projector,
        "adapters": bool(demand.adapter_scales),
        "chat template": options.chat_template is not None,
        "parallel": (options.parallel or 1) > 1,
        "prompt cache": options.prompt_cache is not None,
    }
    missing = [_FIELDS[setting] for setting, is_used in used.items() if is_used and setting not in runtime.settings]
    if missing:
        return f"runtime {name} cannot do {' and '.join(missing)}: remove it, or serve a GGUF file with llama.cpp"

    if demand.adapters_on_request and not runtime.adapter_routes:
        way = "remove onRequest of adapters, or serve a GGUF file with llama.cpp"
        return f"runtime {name} applies its adapters to each request: {way}"

    for field_name, cache_type in (("cacheTypeK", options.cache_type_k), ("cacheTypeV", options.cache_type_v)):
        if cache_type not in runtime.cache_types:
            return f"runtime {name} has no {field_name} {cache_type}: use {', '.join(sorted(runtime.cache_types))}"
    return None


def _refuse_container(runtime: Runtime, demand: RuntimeDemand) -> str | None:
    """Return why the service cannot state the container of the engine, or None."""
    if demand.container is None or (runtime.pod and runtime.pod.from_container):
        return None
    return f"runtime {runtime.name} has a container of its own: remove container, or set runtime to generic"


def _refuse_arguments(runtime: Runtime, demand: RuntimeDemand) -> str | None:
    """Return which of extraArgs the engine does not take, or which entry lacks its option or value; None if all fit."""
    arguments = demand.options.extra_args
    # `tuning`: the options that a user may set; `switches`: those of them that take no value.
    foreign = [argument for argument in arguments if _is_option(argument) and argument not in runtime.tuning]
    if foreign:
        remedy = f"it takes {' '.join(runtime.tuning)}" if runtime.tuning else "it takes none"
        return f"runtime {runtime.name} does not take {' '.join(foreign)} in extraArgs: {remedy}"

    # Each argument with the one before it, which may be the option that takes it as value. The empty texts stand before
    # the first and after the last.
    for option, argument in pairwise(("", *arguments, "")):
        takes_value = option in runtime.tuning and option not in runtime.switches
        if takes_value and (not argument or _is_option(argument)):
            return f"{option} in extraArgs has no value: write one after it, as an entry of its own"
        if option == "--load-format" and argument not in _LOAD_FORMATS:
            return f"{option} in extraArgs takes {', '.join(_LOAD_FORMATS)}: others do not read the model's volume"
        if argument and not takes_value and not _is_option(argument):
            where = f"after {option}, which takes no value" if option in runtime.switches else "without an option"
            return f"extraArgs has {argument} {where}: remove {argument}"
    return None


def _is_option(argument: str) -> bool:
    """Return whether an argument is an option, not a value such as -1."""
    return argument.startswith("-") and not _NUMBER.fullmatch(argument)
