"""llama.cpp's `llama-server`: how to start it, wherever it runs.

The pod builder and the agent render the same arguments here, so that a service behaves alike in a container and on a
host. Settings that decide memory are always explicit: llama-server's own defaults depend on the machine and the
version, and without explicit settings llama-server reduces the context until it fits.
"""

import importlib.util
import os
import re
import sys
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Final, get_args

from crds.meta import Accelerator
from crds.serving import CacheType, Mode, ServingOptions
from crds.size import MIB
from devices import tools
from runtimes.engine_errors import EngineError, ErrorTable
from runtimes.environment import PYTHON, select_environment
from runtimes.llama_estimate import LLAMA_SPEED, LlamaMemory, count_checkpoints, find_last_value
from runtimes.pod import EngineMetrics, EnginePod
from runtimes.runtime import GGUF_QUANTIZATIONS, TEXT_ROUTES, EngineLaunch, Runtime, RuntimeDemand
from runtimes.serving import PROBE_TOKENS, Listen, Serving, count_requests, count_shared_tokens

_BUILD: Final = re.compile(r"\bversion: b?(\d{3,})\b")
"""`version: 11549 (0c1e570)`; a build outside of llama.cpp's own repository has the number 0 or 1."""
_IMAGE: Final = "ghcr.io/ggml-org/llama.cpp:server"
IMAGES: Final[Mapping[Accelerator, str]] = {
    "cpu": _IMAGE,
    "nvidia": f"{_IMAGE}-cuda",
    "amd": f"{_IMAGE}-rocm",
    "intel": f"{_IMAGE}-intel",
}
_TUNING: Final = (
    *("-t", "--threads", "-tb", "--threads-batch", "--threads-http", "-b", "--batch-size"),
    *("-ngl", "--gpu-layers", "--n-gpu-layers", "-sm", "--split-mode", "-mg", "--main-gpu"),
    *("-fa", "--flash-attn", "--swa-full", "--pooling", "-lm", "--load-mode"),
    *("--context-shift", "--no-context-shift"),
    *("--cache-prompt", "--no-cache-prompt", "--cache-reuse", "--no-slots", "--warmup", "--no-warmup"),
    *("--jinja", "--no-jinja", "-n", "--predict", "--n-predict", "-s", "--seed"),
    *("--temp", "--temperature", "--top-k", "--top-p", "--min-p", "--repeat-penalty"),
)
_SWITCHES: Final = frozenset(
    {
        *("--swa-full", "--context-shift", "--no-context-shift"),
        *("--cache-prompt", "--no-cache-prompt", "--no-slots", "--warmup", "--no-warmup", "--jinja", "--no-jinja"),
    }
)
_ALL_LAYERS: Final = "999"
"""More than any model has. A model that does not fit then fails, instead of silently running on the CPU."""

# Every llama-server argument also has an environment variable. These are set and not given as arguments, which a
# llama-server that does not know them would refuse. By default it lets every web page read its answers.
_ENVIRONMENT: Final = {"LLAMA_ARG_CORS_ORIGINS": "localhost", "LLAMA_ARG_CORS_CREDENTIALS": "0"}
# Weights that are mapped from their file are in no process's footprint, and count as in use only while the GPU works on
# them: whether they are counted never, once or twice would change by the minute. Read into memory, they are always in
# the footprint. The second name is that of llama-server before it had load modes; each ignores the other one.
_MAC_ENVIRONMENT: Final = {
    "LLAMA_ARG_LOAD_MODE": "none",
    "LLAMA_ARG_NO_MMAP": "1",
    # By default weights are wired for 180 s after the last request; then they may be compressed or paged out, and the
    # next request waits for them. Their memory is reserved, so they stay for a day.
    "GGML_METAL_RESIDENCY_KEEP_ALIVE_S": "86400",
}

_IN_HANDLER: Final = "llama.cpp b11549: its handler throws while it reads the request, which is 500 in ex_wrapper"
_ERRORS: Final[ErrorTable] = (
    EngineError(500, "image input is not supported", 400, "nothing", _IN_HANDLER),
    EngineError(500, "audio input is not supported", 400, "nothing", _IN_HANDLER),
    EngineError(500, "video input is not supported", 400, "nothing", _IN_HANDLER),
    EngineError(500, "Invalid base64 value", 400, "nothing", _IN_HANDLER),
    EngineError(500, "error: cannot make GET request", 400, "nothing", f"{_IN_HANDLER}; it fetches no media here"),
    EngineError(500, "Failed to parse messages: ", 400, "nothing", _IN_HANDLER),
    EngineError(500, "Failed to parse tools: ", 400, "nothing", _IN_HANDLER),
    EngineError(500, "'messages' is required", 400, "nothing", f"{_IN_HANDLER}; on /v1/messages only"),
    EngineError(500, "stoul", 400, "nothing", f"{_IN_HANDLER}; a number of a form that is too large"),
    EngineError(500, "stof", 400, "nothing", f"{_IN_HANDLER}; a number of a form that is too large"),
    EngineError(500, "[json.exception.", 400, "nothing", _IN_HANDLER),
    EngineError(500, "failed to process mtmd chunk", 500, "failure", "llama.cpp b11549: update_slots"),
    EngineError(500, "Compute error.", 500, "failure", "llama.cpp b11549: decode; recorded on a Mac out of memory"),
    EngineError(500, "Context size has been exceeded.", 500, "failure", "llama.cpp b11549: decode"),
    EngineError(503, "Loading model", 503, "failure", "llama.cpp b11549: middleware before the model is loaded"),
)


def render_arguments(serving: Serving, listen: Listen) -> list[str]:
    """Render llama-server's arguments, without the program's own name.

    llama-server divides `-c` among its slots, hence the product; without a stated `parallel` its slots share one cache.
    If an argument is repeated, the last one counts.
    """
    options = serving.options
    rendered = ["-m", serving.model, "--host", listen.host, "--port", str(listen.port), "-a", serving.service]
    slots, shared_tokens = count_requests(options), count_shared_tokens(options)
    if shared_tokens is None:
        rendered += ["-c", str(options.context_tokens * slots), "-np", str(slots)]
    else:
        rendered += ["-c", str(options.context_tokens + shared_tokens + PROBE_TOKENS), "-np", str(slots), "-kvu"]
    if serving.on_device:
        rendered += ["-ngl", _ALL_LAYERS]
    if serving.threads is not None:  # by itself it takes all cores of the node
        rendered += ["-t", str(serving.threads)]

    # Adjust no argument to the memory of the device.
    rendered += ["--fit", "off"]
    if listen.api_key_file is not None:
        rendered += ["--api-key-file", listen.api_key_file]

    rendered += _render_mode(options)
    rendered += _render_memory(serving)
    rendered += _render_companions(serving)

    # The ping makes the server notice within a second that a streaming client is gone, or that it must stop.
    rendered += ["--metrics", "--no-webui", "--offline", "--sse-ping-interval", "1"]
    # The slots show what others have asked.
    rendered += ["--no-slots"]
    # A request without a list of adapters, such as a probe, would begin with what was computed with those of another.
    last = ["--no-cache-prompt"] if any(adapter.request_name for adapter in serving.adapters) else []
    return [*rendered, *options.extra_args, *last]


def _render_mode(options: ServingOptions) -> list[str]:
    """Render the arguments of a server for chats, embeddings or rankings."""
    if options.mode == "chat":
        return ["--chat-template", options.chat_template] if options.chat_template else []
    # A text is embedded in one batch; with the default of 512 a longer one would be refused.
    batch_of_context = ["-b", str(options.context_tokens), "-ub", str(options.context_tokens)]
    return ["--embeddings" if options.mode == "embeddings" else "--rerank", *batch_of_context]


def _render_memory(serving: Serving) -> list[str]:
    """Render the arguments that decide the memory of the caches."""
    options, rendered = serving.options, []
    if options.cache_type_k != "f16":
        rendered += ["-ctk", options.cache_type_k]
    if options.cache_type_v != "f16":
        rendered += ["-ctv", options.cache_type_v]
    # Without these, caches beside the slots would grow to 8 GiB and more, which is not reserved.
    rendered += ["--cache-ram", str(options.prompt_cache_bytes // MIB)]
    return [*rendered, "--ctx-checkpoints", str(count_checkpoints(serving.layout, options))]


def _render_companions(serving: Serving) -> list[str]:
    """Render projector, adapters and draft."""
    rendered = []
    if serving.projector is not None:
        rendered += ["--mmproj", serving.projector]
    if serving.adapters:
        # The id of an adapter is its place; one with scale 0 is loaded, and applied to requests that choose it.
        scaled = [f"{adapter.path}:{0 if adapter.request_name else adapter.scale}" for adapter in serving.adapters]
        rendered += ["--lora-scaled", ",".join(scaled)]
    if serving.draft is not None:
        rendered += ["-md", serving.draft, "--spec-type", "draft-simple"]
        if serving.on_device:
            rendered += ["-ngld", _ALL_LAYERS]
        # The same types as the model's: the memory reserved for a draft is computed with them.
        rendered += ["-ctkd", serving.options.cache_type_k, "-ctvd", serving.options.cache_type_v]
        if serving.draft_max_tokens is not None:
            rendered += ["--spec-draft-n-max", str(serving.draft_max_tokens)]
    return rendered


def _refuse_adapters(demand: RuntimeDemand) -> str | None:
    """Return why requests cannot choose the adapters, or None."""
    if not demand.adapters_on_request:
        return None
    if demand.options.mode != "chat":
        return f"in mode {demand.options.mode} requests choose no adapters: remove onRequest of adapters"
    if demand.options.prompt_cache_bytes:  # llama.cpp b11549 finds a conversation there whatever adapters it was with
        return (
            "promptCache cannot tell apart conversations with different adapters: remove it, or onRequest of adapters"
        )
    return None


def find_command(environment: Mapping[str, str] = os.environ) -> list[str] | None:
    """Return the argv prefix that starts llama-server on this machine, or None.

    In this order: the binary that LLAMA_SERVER_BIN names; `llama-server` on PATH or of Homebrew, unless it is known to
    be older than the server in the wheel of `pomona[llama]`; that server, run by our launcher, which takes the same
    arguments.
    """
    stated = environment.get("LLAMA_SERVER_BIN")
    if stated:
        return [stated]

    # The server in the wheel, the binary, or the newer of both.
    wheel = [*PYTHON, "runtimes.llama_launcher"] if importlib.util.find_spec("xllamacpp") else None
    program = tools.find_program("llama-server", environment)
    if program is None:
        return wheel
    if wheel is None:
        return [program]
    try:
        binary_build = _read_build(program, Path(program).stat().st_mtime_ns)
    except OSError:
        return wheel
    is_older = binary_build is not None and binary_build < _read_wheel_build()
    return wheel if is_older else [program]


@lru_cache
def _read_build(binary: str, _changed_at_ns: int) -> int | None:
    """Read the build number of a llama-server; None when it was built without one. Raises OSError when it cannot run.

    `_changed_at_ns` is a part of the cache key: after an upgrade the number is read again.
    """
    match = _BUILD.search(tools.output(binary, "--version", with_errors=True))
    return int(match[1]) if match else None


def _read_wheel_build() -> int:
    """Return llama.cpp's build number, which is the last part of the wheel's own version."""
    from importlib import metadata  # noqa: PLC0415 - only beside another llama-server

    return int(metadata.version("xllamacpp").rpartition(".")[2])


def limit_slots(options: ServingOptions) -> dict[str, str]:
    """Return the variable by which no request gets more than its context of the cache that slots share."""
    is_shared = count_shared_tokens(options) is not None
    return {"LLAMA_ARG_KV_UNIFIED_PER_SLOT": str(options.context_tokens)} if is_shared else {}


def build_environment(base: Mapping[str, str], platform: str = sys.platform) -> dict[str, str]:
    """Return the server's environment, without variables of the owner's that would configure it.

    An argument such as `--load-mode` in a service's extraArgs still counts: arguments win over variables.
    """
    ours = _ENVIRONMENT | _MAC_ENVIRONMENT if platform == "darwin" else _ENVIRONMENT
    return {**ours, **select_environment(base)}


RUNTIME: Final = Runtime(
    name="llama.cpp",
    formats=frozenset({"gguf"}),
    modes=frozenset[Mode](get_args(Mode)),
    settings=frozenset({"draft", "projector", "adapters", "chat template", "parallel", "prompt cache"}),
    cache_types=frozenset[CacheType](get_args(CacheType)),
    cache_block_size=32,
    tuning=_TUNING,
    switches=_SWITCHES,
    errors=_ERRORS,
    # Requests to build 11549 in each mode, all of which answer chats; it transcribes with a projector that hears.
    routes={
        "chat": TEXT_ROUTES | {"responses", "input_tokens", "messages", "count_tokens", "transcriptions"},
        "embeddings": frozenset({"embeddings"}),
        "rerank": frozenset({"rerank"}),
    },
    # It reads `lora` of no other request: /v1/messages and forms have it dropped.
    adapter_routes=TEXT_ROUTES | {"responses", "input_tokens", "count_tokens"},
    prompt_counts={
        "chat": "/v1/chat/completions/input_tokens",
        "completions": "/tokenize",
        "messages": "/v1/messages/count_tokens",
        "responses": "/v1/responses/input_tokens",
    },
    refusal=_refuse_adapters,
    quantizations=GGUF_QUANTIZATIONS,
    speed_priors=LLAMA_SPEED,
    cache_sharing="context",
    memory=LlamaMemory(
        is_llama_server=True,
        # `auto` has it on every backend that we use.
        has_flash=lambda options: find_last_value(options.extra_args, {"-fa", "--flash-attn"}) != "off",
    ),
    # The loop that generates tokens answers this path, unlike /health.
    pulse="/metrics",
    launch=EngineLaunch(
        command=find_command,
        arguments=render_arguments,
        environment=build_environment,
        variables=limit_slots,
        package="xllamacpp",
    ),
    installed=lambda: find_command() is not None,
    install_hint="install Pomona's extra llama, or llama-server on PATH",
    pod=EnginePod(
        container="llama-server",
        images=IMAGES,
        cores=1,  # one thread decodes
        arguments=lambda pod: render_arguments(pod.serving, pod.listen),
        environment=lambda pod: limit_slots(pod.serving.options),
        # /health answers 503 while weights load, and a busy engine still answers it.
        has_slots=True,
        metrics=EngineMetrics(
            requests_running="llamacpp:requests_processing",
            requests_waiting="llamacpp:requests_deferred",
            prompt_tokens="llamacpp:prompt_tokens_total",
            generated_tokens="llamacpp:tokens_predicted_total",
            prefixes=("llamacpp:",),
        ),
    ),
)
