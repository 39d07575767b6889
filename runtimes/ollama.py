"""Ollama: in pods, and as the daemon of a host's owner, which `runtimes/ollama_client.py` calls.

In a pod it cannot check a key, so Pomona's proxy runs in front of it, and brings the model
(`runtimes/ollama_client.py`). All its settings are variables; an Ollama that its owner runs on a host has other ones,
and is never started by Pomona.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from artifacts.repositories.address_policy import Networks
from crds.meta import Accelerator
from crds.size import MIB
from devices.tools import find_program
from runtimes.daemon import Daemon, DaemonError, OnProgress, digest_content
from runtimes.engine_errors import EngineError, ErrorTable, SchemaLimits
from runtimes.llama_estimate import LLAMA_SPEED, LlamaMemory
from runtimes.pod import EnginePod, PodModel, PodServing
from runtimes.runtime import GGUF_QUANTIZATIONS, TEXT_ROUTES, Runtime, RuntimeDemand
from runtimes.serving import Serving

OWNER: Final = "pomona"
"""Namespace of the models that Pomona makes in the Ollama of a pod."""
PORT: Final = 11434
_STORE: Final = "/ollama"
_VERSION: Final = "0.31.0"
_IMAGE: Final = f"ollama/ollama:{_VERSION}"
IMAGES: Final[Mapping[Accelerator, str]] = {"cpu": _IMAGE, "nvidia": _IMAGE, "amd": f"{_IMAGE}-rocm", "intel": _IMAGE}
_APP: Final = Path("/Applications/Ollama.app")
NO_SPLIT: Final = (
    "runtime ollama cannot serve a GGUF model in several files: set runtime to llama.cpp, or give the Model one file, "
    "which `llama-gguf-split --merge` makes of them"
)
_RECORDED: Final = "Ollama 0.17.4"
_ERRORS: Final[ErrorTable] = (
    EngineError(503, "server busy, please try again", 503, "nothing", f"{_RECORDED}: server/sched.go, ErrMaxQueue"),
    EngineError(500, "invalid format: ", 400, "nothing", f"{_RECORDED}: llm/server.go, Completion"),
    EngineError(500, "invalid JSON schema in format", 400, "nothing", f"{_RECORDED}: llm/server.go, no grammar of it"),
    # A schema without end, or the lack of memory; Ollama starts it again at the next request.
    EngineError(
        500, "model runner has unexpectedly stopped", 503, "failure", f"{_RECORDED}: recorded, its engine ended"
    ),
    # Clients do not name the model of the daemon: it is gone there.
    EngineError(404, "model '", 503, "failure", f"{_RECORDED}: recorded answer to an unknown model on /v1"),
    EngineError(404, 'model "', 503, "failure", f"{_RECORDED}: server/routes.go, handleScheduleError"),
)
_ONLY_BY_VULKAN: Final = "gpu.intel.com/"
"""Beginning of the resource of devices that Ollama uses by Vulkan, which has to be turned on."""


def render_name(owner: str, model: str, content: str) -> str:
    """Return a name with the owner's mark as namespace, the Model as model, and the digest of its content as tag."""
    return f"{owner}/{model}:{content}"


def build_model_name(serving: Serving) -> str:
    """Return the model's name inside the Ollama of a pod: other weights or another context are another model."""
    return render_name(OWNER, serving.service, digest_content([serving.model], serving.options.context_tokens))


def build_environment(pod: PodServing) -> dict[str, str]:
    """Return the environment of `ollama serve`."""
    options = pod.serving.options
    # Ollama finds some devices (_ONLY_BY_VULKAN: Intel's) by Vulkan only, which is off by default.
    needs_vulkan = pod.devices > 0 and (pod.vendor.resource or "").startswith(_ONLY_BY_VULKAN)
    vulkan = {"OLLAMA_VULKAN": "1"} if needs_vulkan else {}
    return vulkan | {
        "HOME": _STORE,
        "OLLAMA_HOST": f"{pod.listen.host}:{pod.listen.port}",
        "OLLAMA_MODELS": f"{_STORE}/models",
        # Keep the model in memory for ever.
        "OLLAMA_KEEP_ALIVE": "-1",
        "OLLAMA_CONTEXT_LENGTH": str(options.context_tokens),
        "OLLAMA_NUM_PARALLEL": str(options.parallel or 1),
        "OLLAMA_MAX_LOADED_MODELS": "1",
        # Its runner is llama.cpp's server, which would remember conversations in 8 GiB that are not reserved.
        "LLAMA_ARG_CACHE_RAM": str(options.prompt_cache_bytes // MIB),
        # The proxy queues. A small number here would refuse a request that follows some that were cancelled.
        "OLLAMA_MAX_QUEUE": "512",
        "OLLAMA_LOAD_TIMEOUT": "60m",
        # Weights that were uploaded just before the container ended are no model yet, and would be deleted.
        "OLLAMA_NOPRUNE": "1",
        "OLLAMA_NO_CLOUD": "1",
    }


def is_installed(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether Ollama is installed here, or OLLAMA_HOST is set."""
    return "OLLAMA_HOST" in environment or find_program("ollama", environment) is not None or _APP.exists()


def connect(allowed_networks: Networks) -> Daemon:
    """Return the Ollama of this machine; models may be pulled from these private networks."""
    from runtimes.ollama_client import Ollama  # noqa: PLC0415 - aiohttp, which a proxy does without

    return Ollama(allowed_networks=allowed_networks)


async def prepare(model: PodModel, on_progress: OnProgress, on_failure: Callable[[DaemonError], None]) -> None:
    """Make the Ollama of a pod pull or create its one model; see `prepare_model`."""
    from runtimes.ollama_client import prepare_model  # noqa: PLC0415 - aiohttp, which other proxies do without

    await prepare_model(model, on_progress, on_failure)


def _refuse_unsupported_options(demand: RuntimeDemand) -> str | None:
    """Return why Ollama cannot serve this, or None: a split model, or on a host what the owner of its Ollama sets."""
    if demand.is_split:
        return NO_SPLIT
    # In pods, Pomona itself sets the number of requests and the memory for conversations.
    options = demand.options
    fields = {"parallel": (options.parallel or 1) > 1, "promptCache": options.prompt_cache_bytes > 0}
    stated = next((name for name, is_stated in fields.items() if is_stated and not demand.in_pods), None)
    remedy = "on a host, where its owner sets it: remove it, or serve it in pods"
    return f"runtime ollama cannot do {stated} {remedy}" if stated else None


RUNTIME: Final = Runtime(
    name="ollama",
    formats=frozenset({"gguf", "ollama"}),
    modes=frozenset({"chat"}),
    settings=frozenset({"parallel", "prompt cache"}),
    installed=is_installed,
    install_hint="install Ollama from ollama.com and start it",
    daemon=connect,
    errors=_ERRORS,
    # server/routes.go; it transcribes since 2026, with models that hear.
    routes={"chat": TEXT_ROUTES | {"embeddings", "responses", "messages", "transcriptions"}},
    # More are refused by llama-grammar.cpp (MAX_REPETITION_THRESHOLD), which ends the process of the model. Groups such
    # as (?:a) and stray signs such as ^*$ end Ollama itself, others such as ^\\S$ the process of the model.
    schema_limits=SchemaLimits(most_repetitions=2000, takes_patterns=False),
    quantizations=GGUF_QUANTIZATIONS,
    speed_priors=LLAMA_SPEED,
    # It decides by model and device, so the larger size is assumed.
    memory=LlamaMemory(has_flash=lambda _options: False),
    pod=EnginePod(
        container="ollama",
        images=IMAGES,
        cores=1,  # as llama.cpp, which it runs
        arguments=lambda _pod: ["serve"],
        environment=build_environment,
        # It has no /health; this path answers before a model is loaded, which the proxy waits for by itself.
        health_path="/api/version",
        port=PORT,
        served_name=build_model_name,
        store=_STORE,
        prepare=prepare,
        has_slots=True,
    ),
    refusal=_refuse_unsupported_options,
)
