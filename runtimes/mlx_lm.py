"""mlx-lm's own server, `mlx_lm.server`: how to start it on a host.

Three habits of it decide its arguments. It loads whatever model a request names, so its requests must come through
our proxy, which rewrites the name. It stays alive, and listens, on a model that it cannot load: only a generated token
shows that it serves. And it keeps caches of finished conversations without a limit in bytes: their number is ours to
set, and `fitness.mlx` counts them.
"""

import importlib.util
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from crds.serving import CacheType
from runtimes.serving import Listen, Process, Runtime, RuntimeDemand, Serving

_KV_BITS: Final[Mapping[CacheType, int]] = MappingProxyType({"q8_0": 8, "q4_0": 4})
"""Groups of 64 values with two halves: as many bytes for each value as llama.cpp's blocks of 32 with one."""

# The owner's tokens and caches, and what would point the server at another model.
_FOREIGN_ENVIRONMENT = ("HF_", "HUGGING_FACE_", "TRANSFORMERS_", "OLLAMA_")


def arguments(serving: Serving, listen: Listen) -> list[str]:
    """Render the arguments of mlx_lm.server. It has no limit of context: only a request's own max_tokens counts."""
    options = serving.options
    parallel = str(options.parallel)
    rendered = ["--model", serving.model, "--host", listen.host, "--port", str(listen.port)]
    rendered += ["--decode-concurrency", parallel, "--prompt-concurrency", parallel]
    # Of requests that set none; mlx_lm's own default of 512 would cut answers short.
    rendered += ["--max-tokens", str(options.context_length)]
    # One finished conversation for each slot, so that its next turn need not begin anew.
    rendered += ["--prompt-cache-size", parallel]
    bits = _KV_BITS.get(options.cache_type_k)
    if bits is not None:
        rendered += ["--kv-bits", str(bits), "--quantized-kv-start", "0"]
    if serving.draft is not None:
        rendered += ["--draft-model", serving.draft]
    if serving.draft_max_tokens is not None:
        rendered += ["--num-draft-tokens", str(serving.draft_max_tokens)]
    for adapter in serving.adapters:
        rendered += ["--adapter-path", adapter.path]
    if options.chat_template is not None:
        # As one argument, for a template may begin with a dash.
        rendered += [f"--chat-template={options.chat_template}"]
    # At level DEBUG it would log prompts.
    return [*rendered, "--log-level", "INFO", *options.extra_args]


def command() -> list[str] | None:
    """Return the argv prefix that starts it: the package beside us, else the program on PATH; None: not installed."""
    if importlib.util.find_spec("mlx_lm"):
        return [sys.executable, "-m", "mlx_lm", "server"]
    binary = shutil.which("mlx_lm.server")
    return [binary] if binary else None


def child_environment(base: Mapping[str, str]) -> dict[str, str]:
    """Return `base` without the owner's Hugging Face settings, and with no way to fetch anything."""
    ours = {name: value for name, value in base.items() if not name.startswith(_FOREIGN_ENVIRONMENT)}
    # A folder that is there and holds no model: without one, GET /v1/models answers an empty body.
    ours |= {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(Path(__file__).parent)}
    if sys.platform != "darwin":
        # Else it runs a C++ compiler and loads what it made from a folder that every user may write to.
        ours["MLX_DISABLE_COMPILE"] = "1"
    return ours


def _refusal(demand: RuntimeDemand) -> str | None:
    cache_type_k, cache_type_v = demand.options.cache_type_k, demand.options.cache_type_v
    if cache_type_k != cache_type_v:
        return f"cacheTypeK {cache_type_k} and cacheTypeV {cache_type_v} differ, which runtime mlx-lm cannot do"
    if demand.options.parallel > 1 and (demand.draft or cache_type_k != "f16"):
        cause = "speculative" if demand.draft else f"cacheTypeK {cache_type_k}"
        return f"with {cause} runtime mlx-lm serves one request at a time: set parallel to 1, or remove {cause}"
    if len(demand.adapter_scales) > 1 or any(float(scale) != 1 for scale in demand.adapter_scales):
        return "runtime mlx-lm takes one adapter with the scale that it was trained with: leave one, without a scale"
    return None


RUNTIME: Final = Runtime(
    name="mlx-lm",
    formats=frozenset({"mlx"}),
    modes=frozenset({"chat"}),
    settings=frozenset({"draft", "adapters", "chat template", "parallel"}),
    cache_types=frozenset[CacheType]({"f16", "q8_0", "q4_0"}),
    # It says 503 once the thread that generates is dead. A token would cost the last conversation its cached prompt.
    pulse="/health",
    process=Process(command=command, arguments=arguments, environment=child_environment, served_name="default_model"),
    installed=lambda: command() is not None,
    install_hint="install Pomona's extra mlx",
    refusal=_refusal,
)
