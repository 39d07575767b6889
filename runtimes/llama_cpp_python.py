"""llama-cpp-python's server, `python -m llama_cpp.server`: how to start it on a host.

The server has no health endpoint, so only an answer shows that it works. It takes one request at a time, and by
default a new request cancels the running one. Its settings are pydantic's, so every setting is also an environment
variable with a common name (HOST, SEED, CACHE): therefore it gets only the variables that it needs.
"""

import importlib.util
import sys
from collections.abc import Mapping
from typing import Final

from crds.serving import CacheType, ServingOptions
from devices import libsystem
from runtimes.engine_errors import EngineError, ErrorTable
from runtimes.environment import PYTHON, select_environment
from runtimes.llama_estimate import LLAMA_SPEED, LlamaMemory, find_last_value
from runtimes.runtime import TEXT_ROUTES, EngineLaunch, Runtime, RuntimeDemand
from runtimes.serving import Listen, Serving

_CACHE_TYPES: Final[Mapping[CacheType, int]] = {
    "f32": 0,
    "f16": 1,
    "q4_0": 2,
    "q4_1": 3,
    "q5_0": 6,
    "q5_1": 7,
    "q8_0": 8,
    "iq4_nl": 20,
    "bf16": 30,
}
"""Numbers of `enum ggml_type` in ggml.h, which the server takes; a test compares them with the gguf package."""
_ALL_LAYERS: Final = "-1"

_ERRORS: Final[ErrorTable] = (
    EngineError(
        500, "Llama model must be created with embedding=True", 400, "nothing", "recorded of 0.3.36: its mode is chat"
    ),
)


def render_arguments(serving: Serving, listen: Listen) -> list[str]:
    """Render the arguments of llama_cpp.server."""
    options = serving.options
    rendered = ["--model", serving.model, "--model_alias", serving.service]
    rendered += ["--host", listen.host, "--port", str(listen.port), "--n_ctx", str(options.context_tokens)]
    if listen.api_key_file is not None:
        rendered += ["--api-key-file", listen.api_key_file]
    if serving.on_device:
        rendered += ["--n_gpu_layers", _ALL_LAYERS]

    # By default, a request cancels the previous request; all logits of a whole context are kept, which takes gigabytes
    # with a large vocabulary; and the weights are locked into memory if the system allows it.
    rendered += ["--interrupt_requests", "false", "--logits_all", "false", "--use_mlock", "false", "--cache", "false"]

    if options.mode == "embeddings":
        # A text is embedded in one batch.
        size = str(options.context_tokens)
        rendered += ["--embedding", "true", "--n_batch", size, "--n_ubatch", size]
    if (options.cache_type_k, options.cache_type_v) != ("f16", "f16"):
        rendered += ["--type_k", str(_CACHE_TYPES[options.cache_type_k])]
        # Quantized values need flash attention, which this server, unlike llama-server, does not turn on by itself.
        rendered += ["--type_v", str(_CACHE_TYPES[options.cache_type_v]), "--flash_attn", "true"]

    for adapter in serving.adapters:
        rendered += ["--lora_path", adapter.path]
    return [*rendered, *options.extra_args]


def find_command() -> list[str] | None:
    """Return the argv prefix that starts the server, or None if it is not installed."""
    return [*PYTHON, "runtimes.llama_cpp_launcher"] if importlib.util.find_spec("llama_cpp") else None


def build_environment(base: Mapping[str, str], platform: str = sys.platform) -> dict[str, str]:
    """Return the server's environment, without a variable that is one of its settings; on a Mac weights are not mapped.

    Mapped weights are in no process's footprint, as `runtimes.llama_server` explains.
    """
    kept, is_mac = select_environment(base), platform == "darwin"
    # By default it has half as many threads as there are cores of any kind.
    cores = libsystem.performance_cores() if is_mac else None
    return kept | ({"USE_MMAP": "false"} if is_mac else {}) | ({"N_THREADS": str(cores)} if cores else {})


def _has_flash(options: ServingOptions) -> bool:
    """Decide whether the server uses flash attention: as --flash_attn says, else only for a quantized cache."""
    stated = find_last_value(options.extra_args, {"--flash_attn"})
    if stated is None:
        return (options.cache_type_k, options.cache_type_v) != ("f16", "f16")
    return stated.lower() in {"true", "1"}


def _refuse_adapters(demand: RuntimeDemand) -> str | None:
    """Return why the server cannot have these adapters, or None."""
    if len(demand.adapter_scales) > 1 or any(float(scale) != 1 for scale in demand.adapter_scales):
        return (
            "runtime llama-cpp-python takes one adapter, with the scale that it was trained with: leave one without a "
            "scale, or set runtime to llama.cpp"
        )
    return None


RUNTIME: Final = Runtime(
    name="llama-cpp-python",
    formats=frozenset({"gguf"}),
    modes=frozenset({"chat", "embeddings"}),
    settings=frozenset({"adapters"}),
    cache_types=frozenset(_CACHE_TYPES),
    tuning=("--n_threads", "--n_threads_batch", "--n_batch", "--flash_attn", "--use_mlock", "--seed"),
    errors=_ERRORS,
    routes={"chat": TEXT_ROUTES, "embeddings": frozenset({"embeddings"})},
    speed_priors=LLAMA_SPEED,
    memory=LlamaMemory(keeps_whole_windows=True, has_flash=_has_flash),
    launch=EngineLaunch(
        command=find_command, arguments=render_arguments, environment=build_environment, package="llama-cpp-python"
    ),
    installed=lambda: find_command() is not None,
    install_hint="install Pomona's extra llama-cpp-python",
    refusal=_refuse_adapters,
)
