"""llama-server from the `xllamacpp` wheel, with llama-server's argument names, exit codes and log.

The wheel contains llama.cpp's own HTTP server, with Metal on macOS, but no program and no argument parser. This module
is that program, so that `pomona[llama]` can serve with the same command line if no llama-server is installed. An
argument that is not in the table is refused, as llama-server refuses unknown arguments: to ignore a setting would be
worse than not to serve. No other module imports the wheel.
"""

import itertools
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import xllamacpp

_FAILURE = 1


class ArgumentError(ValueError):
    """An argument that this launcher refuses; `main` prints the text after `error:`, as llama-server does."""


class _Value(NamedTuple):
    """An argument with a value: the field of CommonParams that takes it, and the function that reads it."""

    field: str
    read: Callable[[str], Any]


class _Switch(NamedTuple):
    """An argument without a value: the field of CommonParams, and its new value."""

    field: str
    value: bool
    pooling: Any = None
    """The pooling type that the argument sets too, or None."""


def _split_commas(text: str) -> list[str]:
    """Return the parts of a text between commas."""
    return [part.strip() for part in text.split(",") if part.strip()]


def _one_member_of(enum: Any, prefix: str, names: str, **aliases: str) -> Callable[[str], Any]:
    """Return a function that reads a member of the wheel's enumeration from an argument's text.

    `names` are the texts, each the end of a member's name after `prefix` (in lower case); `aliases` are further texts,
    with the name that each stands for. For example: `mean` is LLAMA_POOLING_TYPE_MEAN.

    Each member is looked up when it is asked for: a wheel that lacks one serves all that do not need it.
    """
    # By text, the end of the member's name: the text itself, or what an alias stands for.
    members = {name: name for name in names.split()} | aliases

    def read(text: str) -> Any:
        """Return a member. Raises ArgumentError."""
        if text not in members:
            raise ArgumentError(f"unknown value {text!r}: use one of {', '.join(members)}")
        return getattr(enum, f"{prefix}{members[text].upper().replace('-', '_')}")

    return read


def _read_on_off(text: str) -> bool:
    """Return whether a text is `on`. Raises ArgumentError if it is neither `on` nor `off`."""
    if text not in {"on", "off"}:
        raise ArgumentError(f"unknown value {text!r}: use one of on, off")
    return text == "on"


def _read_gpu_layers(text: str) -> int:
    """Return the number of layers on devices; -1 and -2 are the wheel's auto and all."""
    return {"auto": -1, "all": -2}[text] if text in {"auto", "all"} else int(text)


def _read_scaled_adapters(text: str) -> list[Any]:
    """Return the adapters of a list of FNAME:SCALE."""
    adapters = []
    for adapter in _split_commas(text):
        path, _, scale = adapter.rpartition(":")
        if not path:
            raise ArgumentError(f"unknown value {adapter!r}: use FNAME:SCALE")
        adapters.append(xllamacpp.CommonAdapterLoraInfo(path, float(scale)))
    return adapters


def _read_keys(path: str) -> list[str]:
    """Return the keys in a file. Raises ArgumentError if there are none."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError as error:
        raise ArgumentError(f"failed to open file '{path}'") from error
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not keys:
        raise ArgumentError(f"file '{path}' holds no key, and the server would be open to all")
    return keys


_SPLIT_MODE = _one_member_of(xllamacpp.llama_split_mode, "LLAMA_SPLIT_MODE_", "none layer row tensor")
_POOLING = _one_member_of(xllamacpp.llama_pooling_type, "LLAMA_POOLING_TYPE_", "none mean cls last rank")
_CACHE_TYPE = _one_member_of(xllamacpp.ggml_type, "GGML_TYPE_", "f32 f16 bf16 q8_0 q4_0 q4_1 iq4_nl q5_0 q5_1")
_SPECULATIVE_TYPE = _one_member_of(
    xllamacpp.common_speculative_type, "COMMON_SPECULATIVE_TYPE_", "none draft-simple draft_simple"
)
_FLASH_ATTENTION = _one_member_of(
    xllamacpp.llama_flash_attn_type, "LLAMA_FLASH_ATTN_TYPE_", "", on="enabled", off="disabled", auto="auto"
)
_LOAD_MODE = _one_member_of(
    xllamacpp.llama_load_mode,
    "LLAMA_LOAD_MODE_",
    "auto none mmap mlock mmap_mlock direct_io",
    **{"mmap+mlock": "mmap_mlock", "dio": "direct_io"},
)

# Arguments that Pomona renders or an operator tunes. Names are llama-server's; a test compares them with the wheel.
_TABLE: dict[str, _Value | _Switch] = {
    "-m --model": _Value("model.path", str),
    "-a --alias": _Value("model_alias", lambda text: set(_split_commas(text))),
    "--host": _Value("hostnames", _split_commas),
    "--port": _Value("port", int),
    "--api-key-file": _Value("api_keys", _read_keys),
    "--metrics": _Switch("endpoint_metrics", value=True),
    "--slots": _Switch("endpoint_slots", value=True),
    "--no-slots": _Switch("endpoint_slots", value=False),
    "--ui --webui": _Switch("ui", value=True),
    "--no-ui --no-webui": _Switch("ui", value=False),
    "--offline": _Switch("offline", value=True),
    "--threads-http": _Value("n_threads_http", int),
    "--sse-ping-interval": _Value("sse_ping_interval", int),
    "-lv --verbosity --log-verbosity": _Value("verbosity", int),
    "-t --threads": _Value("cpuparams.n_threads", int),
    "-tb --threads-batch": _Value("cpuparams_batch.n_threads", int),
    "-c --ctx-size": _Value("n_ctx", int),
    "-np --parallel": _Value("n_parallel", int),
    "-n --predict --n-predict": _Value("n_predict", int),
    "-b --batch-size": _Value("n_batch", int),
    "-ub --ubatch-size": _Value("n_ubatch", int),
    "-ngl --gpu-layers --n-gpu-layers": _Value("n_gpu_layers", _read_gpu_layers),
    "-sm --split-mode": _Value("split_mode", _SPLIT_MODE),
    "-mg --main-gpu": _Value("main_gpu", int),
    "-fit --fit": _Value("fit_params", _read_on_off),
    "-fa --flash-attn": _Value("flash_attn_type", _FLASH_ATTENTION),
    "-ctk --cache-type-k": _Value("cache_type_k", _CACHE_TYPE),
    "-ctv --cache-type-v": _Value("cache_type_v", _CACHE_TYPE),
    "-cram --cache-ram": _Value("cache_ram_mib", int),
    "-ctxcp --ctx-checkpoints --swa-checkpoints": _Value("n_ctx_checkpoints", int),
    "--cache-reuse": _Value("n_cache_reuse", int),
    "--cache-prompt": _Switch("cache_prompt", value=True),
    "--no-cache-prompt": _Switch("cache_prompt", value=False),
    "-kvu --kv-unified": _Switch("kv_unified", value=True),
    "-no-kvu --no-kv-unified": _Switch("kv_unified", value=False),
    "--kv-unified-per-slot": _Value("kv_unified_per_slot", int),
    "--swa-full": _Switch("swa_full", value=True),
    "--context-shift": _Switch("ctx_shift", value=True),
    "--no-context-shift": _Switch("ctx_shift", value=False),
    "--warmup": _Switch("warmup", value=True),
    "--no-warmup": _Switch("warmup", value=False),
    "--jinja": _Switch("use_jinja", value=True),
    "--no-jinja": _Switch("use_jinja", value=False),
    "--chat-template": _Value("chat_template", str),
    "-mm --mmproj": _Value("mmproj.path", str),
    "--lora-scaled": _Value("lora_adapters", _read_scaled_adapters),
    "-md --model-draft --spec-draft-model": _Value("speculative.draft.mparams.path", str),
    "-ngld --gpu-layers-draft --n-gpu-layers-draft --spec-draft-ngl": _Value(
        "speculative.draft.n_gpu_layers", _read_gpu_layers
    ),
    "-ctkd --cache-type-k-draft --spec-draft-type-k": _Value("speculative.draft.cache_type_k", _CACHE_TYPE),
    "-ctvd --cache-type-v-draft --spec-draft-type-v": _Value("speculative.draft.cache_type_v", _CACHE_TYPE),
    "--spec-type": _Value("speculative.types", lambda text: [_SPECULATIVE_TYPE(name) for name in _split_commas(text)]),
    "--spec-draft-n-max": _Value("speculative.draft.n_max", int),
    "--embedding --embeddings": _Switch("embedding", value=True),
    "--rerank --reranking": _Switch(
        "embedding", value=True, pooling=xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_RANK
    ),
    "--pooling": _Value("pooling_type", _POOLING),
    "-lm --load-mode": _Value("load_mode", _LOAD_MODE),
    "-s --seed": _Value("sampling.seed", int),
    "--temp --temperature": _Value("sampling.temp", float),
    "--top-k": _Value("sampling.top_k", int),
    "--top-p": _Value("sampling.top_p", float),
    "--min-p": _Value("sampling.min_p", float),
    "--repeat-penalty": _Value("sampling.penalty_repeat", float),
}

# The only ones of llama-server's variables that are read here: as arguments, an older llama-server would refuse them.
_VARIABLES = {"LLAMA_ARG_LOAD_MODE": "-lm", "LLAMA_ARG_KV_UNIFIED_PER_SLOT": "--kv-unified-per-slot"}

ARGUMENTS = {name: option for names, option in _TABLE.items() for name in names.split()}


def parse(argv: Sequence[str]) -> Any:
    """Read llama-server arguments into the wheel's CommonParams.

    Raises:
        ArgumentError: an unknown argument, a missing or wrong value, or no model.
    """
    parameters = xllamacpp.CommonParams()
    # Web pages of this machine may see that a key is required; no other page sees anything.
    parameters.cors_origins, parameters.cors_origins_explicit = "localhost", True
    parameters.cors_credentials = False

    # Names and values come from one iterator, from which each name takes its value; arguments win over variables.
    stated = [(name, os.environ[variable]) for variable, name in _VARIABLES.items() if os.environ.get(variable)]
    remaining = iter([*itertools.chain.from_iterable(stated), *argv])
    for name in remaining:
        # A _Switch takes no value; a _Value has the function that reads its value.
        option = ARGUMENTS.get(name)
        if option is None:
            raise ArgumentError(f"invalid argument: {name}")

        # An argument without a value sets a fixed one, and may set the pooling, too.
        if isinstance(option, _Switch):
            _set_field(parameters, option.field, option.value)
            if option.pooling is not None:
                _set_field(parameters, "pooling_type", option.pooling)
            continue

        text = next(remaining, None)
        if text is None:
            raise ArgumentError(f"expected value for argument {name}")
        try:
            _set_field(parameters, option.field, option.read(text))
        except (ValueError, OverflowError) as error:
            raise ArgumentError(f"argument {name}: {error}") from error

    if not parameters.model.path:
        # Without a model, llama-server becomes a router that is healthy and serves nothing.
        raise ArgumentError("--model is required")
    return parameters


def main(argv: Sequence[str]) -> int:
    """Serve until SIGTERM or SIGINT; return 1 for a refused argument, a model that does not load or a taken port."""
    if {"-h", "--help"}.intersection(argv):
        sys.stdout.write("\n  ".join(["llama-server arguments that this launcher takes:", *sorted(ARGUMENTS)]) + "\n")
        return 0
    if "--list-devices" in argv:
        devices = _list_devices() or ["  (none)"]
        sys.stdout.write("\n".join(["Available devices:", *devices]) + "\n")
        return 0
    try:
        parameters = parse(argv)
    except ArgumentError as error:
        sys.stderr.write(f"error: {error}\n")
        return _FAILURE

    # No Python handler can run while the wheel loads a model; SIG_DFL lets SIGINT end the process, as in llama-server.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

    try:
        server = xllamacpp.Server(parameters)
    except RuntimeError as error:
        sys.stderr.write(f"error: {error}\n")
        return _FAILURE
    return _serve_until_signal(server)


def _list_devices() -> list[str]:
    """List the devices that a model can be offloaded to, as llama-server prints them."""
    cpu = xllamacpp.ggml_backend_dev_type.GGML_BACKEND_DEVICE_TYPE_CPU
    return [
        f"  {device['name']}: {device['description']} "
        f"({device['memory_total'] // 2**20} MiB, {device['memory_free'] // 2**20} MiB free)"
        for device in xllamacpp.get_device_info()
        if device["type"] != cpu
    ]


def _serve_until_signal(_server: Any) -> NoReturn:
    """Keep the server alive until a signal, then exit at once, without its destructor.

    The destructor waits for every request, for ever if a client stays, and handles no second signal meanwhile. So the
    kernel closes the sockets, clients see their streams cut short rather than ended, and draining is left to the proxy
    in front, which counts requests.
    """
    # The server lives as long as this call has it as an argument.
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    os.read(read_end, 1)  # Python writes a byte into the pipe at each signal
    os._exit(0)


def _set_field(parameters: Any, field: str, value: Any) -> None:
    """Set a field such as `speculative.draft.n_max`."""
    *parents, name = field.split(".")
    for parent in parents:
        parameters = getattr(parameters, parent)
    setattr(parameters, name, value)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
