"""mlx-lm's own server, `mlx_lm.server`: how to start it on a host.

Some properties of the server decide how it is started. It requires no key, lets every web page read its answers, and
loads any model that a request names: `runtimes.mlx_launcher` runs it and refuses all that. It stays alive and listens
even if it cannot load the model: only a generated token shows that it serves. It keeps caches of finished conversations
without a limit in bytes: an argument limits their number, and `runtimes.mlx_estimate` counts them.
"""

import contextlib
import importlib.util
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from crds.serving import CacheType
from devices.tools import find_program
from runtimes.engine_errors import EngineError, ErrorTable
from runtimes.environment import PYTHON, select_environment
from runtimes.mlx_estimate import MLX_SPEED, PROMPTS_AT_ONCE, MlxMemory, count_cache_entries
from runtimes.runtime import TEXT_ROUTES, EngineLaunch, Runtime, RuntimeDemand
from runtimes.serving import Listen, Serving, count_requests

_KV_BITS: Final[Mapping[CacheType, int]] = {"q8_0": 8, "q4_0": 4}
"""Groups of 64 values with two 16-bit numbers: as many bytes for each value as llama.cpp's blocks of 32 with one."""

_VERSION: Final = re.compile(r"(?P<major>\d{1,4})\.(?P<minor>\d{1,4})", re.ASCII)
_SAFE_VERSION: Final = (0, 32)
"""The first releases with the cure of CVE-2026-5843."""
_LAUNCHER: Final = "runtimes.mlx_launcher"
_SERVER: Final = "mlx-lm 0.32.2, server.py"
_ERRORS: Final[ErrorTable] = (
    EngineError(
        404, "generation thread died", 503, "sick", f"{_SERVER}, generation_available: the process stays alive"
    ),
    EngineError(404, "Not Found", 404, "nothing", f"{_SERVER}, do_POST: the path is not served"),
    EngineError(404, "", 400, "nothing", f"{_SERVER}, handle_completion: whatever the request has wrong is 404"),
)
_SHEBANG: Final = re.compile(rb"#!(/\S*python[\d.]*)\s*\n")


def render_arguments(serving: Serving, listen: Listen) -> list[str]:
    """Render the arguments of mlx_lm.server. The server has no context limit: only a request's max_tokens counts."""
    options = serving.options
    requests = count_requests(options)
    rendered = ["--model", serving.model, "--host", listen.host, "--port", str(listen.port)]
    if listen.api_key_file is not None:
        rendered += ["--api-key-file", listen.api_key_file]
    rendered += ["--decode-concurrency", str(requests), "--prompt-concurrency", str(min(requests, PROMPTS_AT_ONCE))]

    # For requests that set no limit; mlx_lm's own default of 512 would cut answers short.
    rendered += ["--max-tokens", str(options.context_tokens)]
    rendered += ["--prompt-cache-size", str(count_cache_entries(serving.layout, options))]

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
        # As one argument, because a template may begin with a dash.
        rendered += [f"--chat-template={options.chat_template}"]

    # At level DEBUG the server would log prompts.
    return [*rendered, "--log-level", "INFO", *options.extra_args]


def find_command() -> list[str] | None:
    """Return the argv prefix of our launcher, run by our Python or that of the mlx_lm.server on PATH.

    None if mlx-lm is not installed, or only a version that runs Python which a model brings (CVE-2026-5843).
    """
    # In our own Python; the folder in which the package's folder lies tells the version.
    package = importlib.util.find_spec("mlx_lm")
    if package and package.origin and is_safe_version(read_version(Path(package.origin).parents[1])):
        return [*PYTHON, _LAUNCHER]
    binary = find_program("mlx_lm.server")
    if binary is None or not is_safe_version(find_version(Path(binary))):
        return None
    python = find_python(Path(binary))
    # Isolated, because its folder has modules of ours with the names of packages.
    return [python, "-I", str(Path(__file__).with_name("mlx_launcher.py"))] if python else None


def find_python(program: Path) -> str | None:
    """Return the Python that runs the script `program`, by its first line or else beside it; None if there is none."""
    try:
        with program.open("rb") as file:
            match = _SHEBANG.match(file.readline(1024))
    except OSError:
        return None
    if match:
        return match[1].decode()
    beside = program.resolve().with_name("python3")
    return str(beside) if beside.exists() else None


def is_safe_version(text: str | None) -> bool:
    """Return whether this version loads no code of a model; a version that is not known is taken as safe.

    Models that name code are refused before they are loaded, so this is the second of two checks.
    """
    match = _VERSION.match(text or "")
    return match is None or (int(match["major"]), int(match["minor"])) >= _SAFE_VERSION


def find_version(program: Path) -> str | None:
    """Return the version of the package to which a program of an environment belongs, or None if it is not found."""
    with contextlib.suppress(OSError):
        for packages in program.resolve().parent.parent.glob("lib/python*/site-packages"):
            if version := read_version(packages):
                return version
    return None


def read_version(packages: Path) -> str | None:
    """Return the version of the package in a folder of packages, or None if it is not found.

    Without importlib.metadata, which takes a MiB of an agent's memory.
    """
    versions = (path.name.removeprefix("mlx_lm-") for path in packages.glob("mlx_lm-*.dist-info"))
    return next((version.removesuffix(".dist-info") for version in versions), None)


def build_environment(base: Mapping[str, str]) -> dict[str, str]:
    """Return the server's environment, with downloads disabled and without the owner's tokens and caches."""
    ours = select_environment(base)
    # An existing folder without models: without such a folder, GET /v1/models answers an empty body.
    ours |= {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(Path(__file__).parent)}
    if sys.platform != "darwin":
        # Otherwise MLX runs a C++ compiler and loads the result from a folder that every user may write to.
        ours["MLX_DISABLE_COMPILE"] = "1"
    return ours


def _refuse_unsupported_options(demand: RuntimeDemand) -> str | None:
    """Return why the server cannot serve with these cache types, parallel requests or adapters, or None."""
    cache_type_k, cache_type_v = demand.options.cache_type_k, demand.options.cache_type_v
    if cache_type_k != cache_type_v:
        return f"cacheTypeK {cache_type_k} and cacheTypeV {cache_type_v} differ, which runtime mlx-lm cannot do"
    if (demand.options.parallel or 1) > 1 and (demand.draft or cache_type_k != "f16"):
        cause = "speculative" if demand.draft else f"cacheTypeK {cache_type_k}"
        return f"with {cause} runtime mlx-lm serves one request at a time: set parallel to 1, or remove {cause}"
    if len(demand.adapter_scales) > 1 or any(float(scale) != 1 for scale in demand.adapter_scales):
        return "runtime mlx-lm takes one adapter with the scale that it was trained with: leave one, without a scale"
    return None


RUNTIME: Final = Runtime(
    name="mlx-lm",
    formats=frozenset({"mlx", "safetensors"}),
    modes=frozenset({"chat"}),
    settings=frozenset({"draft", "adapters", "chat template", "parallel", "prompt cache"}),
    cache_types=frozenset[CacheType]({"f16", "q8_0", "q4_0"}),
    cache_block_size=64,
    tuning=("--temp", "--top-p", "--top-k", "--min-p", "--max-tokens", "--prefill-step-size"),
    errors=_ERRORS,
    routes={"chat": TEXT_ROUTES},
    speed_priors=MLX_SPEED,
    cache_sharing="context",
    memory=MlxMemory(),
    # /health answers 503 once the generating thread is dead. A token would evict the last conversation's cached prompt.
    pulse="/health",
    launch=EngineLaunch(
        command=find_command,
        arguments=render_arguments,
        environment=build_environment,
        served_name="default_model",
        package="mlx-lm",
    ),
    installed=lambda: find_command() is not None,
    install_hint="install Pomona's extra mlx, or mlx-lm 0.32 or later: earlier ones run code that a model brings",
    refusal=_refuse_unsupported_options,
)
