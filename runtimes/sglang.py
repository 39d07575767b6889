"""SGLang in a pod: its arguments, environment, key and metrics.

SGLang takes a key only as an argument, which everyone who may read pods could read, and without one it lets every
client replace its weights. So it listens on loopback, and Pomona's proxy in the same pod checks the key.
"""

from collections.abc import Mapping
from typing import Final

from runtimes.engine_errors import EngineError, ErrorTable
from runtimes.environment import PYTORCH_IN_POD
from runtimes.output_parsers import SGLANG_PARSERS, render_parsers
from runtimes.paged_estimate import PAGED_SPEED, DeviceBatch, PagedMemory
from runtimes.pod import EngineMetrics, EnginePod, PodServing
from runtimes.runtime import PLAIN, TEXT_ROUTES, Quantizations, Runtime

_IMAGE: Final = "lmsysorg/sglang:v0.5.15.post1"
_IMAGES: Final[Mapping[str, str]] = {"amd": f"{_IMAGE}-rocm720-mi30x", "nvidia": f"{_IMAGE}-cu129"}
_TUNING: Final = (
    *("--mem-fraction-static", "--page-size", "--chunked-prefill-size", "--max-prefill-tokens"),
    *("--attention-backend", "--sampling-backend", "--schedule-policy", "--schedule-conservativeness"),
    *("--disable-radix-cache", "--disable-cuda-graph", "--disable-overlap-schedule"),
    *("--stream-interval", "--random-seed", "--load-format"),
    *("--reasoning-parser", "--tool-call-parser"),
)

_QUANTIZATIONS: Final[Quantizations] = {
    "nvidia": {
        PLAIN: "*",
        "awq": "turing+",
        "gptq": "turing+",
        "int8": "turing+",
        "compressed-tensors": "turing+",
        "fp8": "ada+ ~ampere",
        "nvfp4": "blackwell+",
        "mxfp4": "blackwell+ ~hopper",
        "quark": "ada+",
        "torchao": "ampere+",
        "bitsandbytes": "turing+",
    },
    "amd": {
        PLAIN: "*",
        "awq": "*",
        "gptq": "*",
        "int8": "*",
        "compressed-tensors": "*",
        "fp8": "cdna3 cdna4",
        "nvfp4": "~cdna2 ~cdna3",
        "mxfp4": "cdna4",
        "quark": "cdna3 cdna4",
    },
}
"""The page "Quantization" of SGLang 0.5."""

_SCHEDULER: Final = "SGLang 0.5.15.post1: managers/scheduler.py"
_SERVING: Final = "SGLang 0.5.15.post1: entrypoints/openai/serving_base.py, handle_request"
_ERRORS: Final[ErrorTable] = (
    EngineError(503, "Using priority is disabled for this server.", 400, "nothing", _SCHEDULER),
    EngineError(503, "The request queue is full.", 503, "nothing", _SCHEDULER),
    EngineError(503, "The request is aborted by a higher priority request.", 503, "nothing", _SCHEDULER),
    EngineError(
        500, "Internal server error: ", 500, "failure", f"{_SERVING}: any exception but ValueError, which is 400"
    ),
)


def render_arguments(pod: PodServing) -> list[str]:
    """Render the arguments of SGLang's server. A model's own code is never run, which is SGLang's default."""
    serving, options = pod.serving, pod.serving.options
    rendered = ["--model-path", serving.model, "--served-model-name", serving.service]
    rendered += ["--host", pod.listen.host, "--port", str(pod.listen.port)]
    rendered += ["--context-length", str(options.context_tokens), "--enable-metrics"]
    if options.parallel is not None:  # else SGLang chooses by the memory of its cache
        rendered += ["--max-running-requests", str(options.parallel)]
    if options.mode == "embeddings":
        rendered += ["--is-embedding"]
    if pod.devices > 1:
        rendered += ["--tensor-parallel-size", str(pod.devices)]
    return [*rendered, *render_parsers(pod, SGLANG_PARSERS), *options.extra_args]


RUNTIME: Final = Runtime(
    name="sglang",
    formats=frozenset({"safetensors"}),
    modes=frozenset({"chat", "embeddings"}),
    settings=frozenset({"parallel"}),
    tuning=_TUNING,
    switches=frozenset({"--disable-radix-cache", "--disable-cuda-graph", "--disable-overlap-schedule"}),
    errors=_ERRORS,
    # Its documentation, and srt/entrypoints/http_server.py; it transcribes with models that hear.
    routes={
        "chat": TEXT_ROUTES | {"responses", "messages", "count_tokens", "transcriptions"},
        "embeddings": frozenset({"embeddings"}),
    },
    quantizations=_QUANTIZATIONS,
    speed_priors=PAGED_SPEED,
    cache_sharing="blocks",
    divides_layers=True,
    memory=PagedMemory(
        # It leaves free, of the whole device: 1.5 MiB for each token, 512 MiB for attention, 128 MiB for each device, 2
        # MiB for each sequence of the largest graph, and 8 MiB for each graph of prompts.
        batches=(
            # Sequences: those of the largest graph.
            DeviceBatch(0, 2048, 8, 992),
            DeviceBatch(20, 4096, 48, 1136),
            DeviceBatch(60, 8192, 256, 1616),
            DeviceBatch(160, 16384, 512, 2256),
        ),
        share_argument="--mem-fraction-static",
        block_argument="--page-size",
        batch_argument="--chunked-prefill-size",
        eager_argument="--disable-cuda-graph",
        device_percent=100,
        context_mib=640,
        token_reserve_kib=1536,
    ),
    pod=EnginePod(
        container="sglang",
        images=_IMAGES,
        cores=2,  # HTTP and tokenizer, detokenizer
        # The image starts a shell.
        command=("python3", "-m", "sglang.launch_server"),
        arguments=render_arguments,
        environment=lambda _pod: PYTORCH_IN_POD,
        # /health answers 503 until the first token is generated.
        metrics=EngineMetrics(
            requests_running="sglang:num_running_reqs",
            requests_waiting="sglang:num_queue_reqs",
            prompt_tokens="sglang:prompt_tokens_total",
            generated_tokens="sglang:generation_tokens_total",
            prefixes=("sglang:",),
            requests="sglang:num_requests_total",
            cache_usage="sglang:token_usage",
            first_token_seconds="sglang:time_to_first_token_seconds",  # noqa: S106 - a metric
            request_seconds="sglang:e2e_request_latency_seconds",
        ),
        shared_memory=True,
        compiles=True,
    ),
)
