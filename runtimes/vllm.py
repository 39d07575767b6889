"""vLLM in a pod: its arguments, environment, key and metrics, on every vendor that has an image.

vLLM's own key guards only some of its paths: `/invocations` and `/tokenize` answer without one (`make test-vllm` shows
it). So vLLM listens on loopback, and Pomona's proxy in the same pod checks the key.
"""

from collections.abc import Mapping
from typing import Final

from runtimes.engine_errors import EngineError, ErrorTable
from runtimes.environment import PYTORCH_IN_POD
from runtimes.output_parsers import VLLM_PARSERS, render_parsers
from runtimes.paged_estimate import PAGED_SPEED, DeviceBatch, PagedMemory
from runtimes.pod import EngineMetrics, EnginePod, PodServing
from runtimes.runtime import PLAIN, TEXT_ROUTES, Quantizations, Runtime

_VERSION: Final = "v0.33.0"
_IMAGES: Final[Mapping[str, str]] = {
    "amd": f"vllm/vllm-openai-rocm:{_VERSION}",
    "cpu": f"vllm/vllm-openai-cpu:{_VERSION}-x86_64",
    "nvidia": f"vllm/vllm-openai:{_VERSION}",
}
"""Users name the others, in spec.image or the vendors file: the names of Intel's images for Gaudi change with each
release, and for Intel GPUs no official image is documented."""
_CPU_CACHE_BYTES: Final = 4 << 30
"""KV cache on the processor if its size is unknown: without an argument vLLM takes nine tenths of the node's memory."""
_GAUDI: Final = "habana.ai/gaudi"
_GAUDI_SEQUENCES: Final = 128
_TUNING: Final = (
    *("--block-size", "--gpu-memory-utilization", "--max-num-batched-tokens"),
    *("--enforce-eager", "--no-enforce-eager", "--seed"),
    *("--enable-prefix-caching", "--no-enable-prefix-caching"),
    *("--enable-chunked-prefill", "--no-enable-chunked-prefill"),
    *("--async-scheduling", "--no-async-scheduling", "--scheduling-policy"),
    *("--load-format", "--safetensors-load-strategy"),  # not --model-loader-extra-config: it names files and servers
    *("--enable-auto-tool-choice", "--tool-call-parser", "--reasoning-parser", "--max-logprobs"),
)
_SWITCHES: Final = frozenset(
    {
        *("--enforce-eager", "--no-enforce-eager", "--enable-prefix-caching", "--no-enable-prefix-caching"),
        *("--enable-chunked-prefill", "--no-enable-chunked-prefill", "--async-scheduling", "--no-async-scheduling"),
        "--enable-auto-tool-choice",
    }
)

_QUANTIZATIONS: Final[Quantizations] = {
    "nvidia": {
        PLAIN: "*",
        "awq": "turing+",
        "gptq": "volta+",
        "int8": "turing+",
        "compressed-tensors": "turing+",
        "fp8": "ada+ ~turing ~ampere",
        "nvfp4": "blackwell+ ~turing ~ampere ~ada ~hopper",
        "mxfp4": "blackwell+ ~ampere ~ada ~hopper",
        "quark": "ada+",
        "torchao": "turing+",
    },
    "amd": {
        PLAIN: "*",
        "awq": "*",
        "gptq": "*",
        "int8": "cdna2 cdna3 cdna4",
        "compressed-tensors": "*",
        "fp8": "cdna3 cdna4 rdna4",
        "nvfp4": "~cdna2 ~cdna3 ~cdna4",
        "mxfp4": "cdna4",
        "mxfp6": "cdna4",
        "quark": "cdna3 cdna4",
        "torchao": "*",
    },
    "intel-gaudi": {PLAIN: "*", "gptq": "*", "int8": "*", "compressed-tensors": "*", "fp8": "*", "inc": "*"},
    "intel": {PLAIN: "*", "awq": "*", "gptq": "*", "fp8": "*", "mxfp4": "*", "inc": "*"},
    "cpu": {PLAIN: "*", "awq": "*", "gptq": "*", "int8": "*", "compressed-tensors": "*"},
}
"""vLLM 0.32's own lists (`platforms/`, `get_min_capability`) and its page "Quantization", and the release notes of its
Gaudi plugin. Where they disagree the stricter one counts: the page denies AWQ on Gaudi, which the plugin lists. GGUF
and bitsandbytes are not in vLLM any more, but in plugins that its images lack."""

_HANDLERS: Final = "vLLM 0.32.0: entrypoints/serve/exception_handling"
_IN_RENDERER: Final = "vLLM 0.32.0: renderers/online_renderer.py"
_NO_PARSER: Final = (
    "the form of the model's tool calls is not known: name vLLM's parser of it in spec.extraArgs of the service, for "
    "example [--enable-auto-tool-choice, --tool-call-parser, hermes]"
)
_ERRORS: Final[ErrorTable] = (
    EngineError(400, '"auto" tool choice requires', 400, "nothing", _IN_RENDERER, _NO_PARSER),
    EngineError(400, "tool_choice=", 400, "nothing", _IN_RENDERER, _NO_PARSER),
    EngineError(503, "", 503, "nothing", f"{_HANDLERS}: QueueOverflowError, RetryableRequestError"),
    EngineError(
        500, "EngineCore encountered an issue", 503, "sick", "vLLM 0.32.0: v1/engine/exceptions.py, EngineDeadError"
    ),
    EngineError(500, "Internal server error", 500, "failure", f"{_HANDLERS}: GenerationError, which names no cause"),
)


def render_arguments(pod: PodServing) -> list[str]:
    """Render the arguments of `vllm serve`. A model's own code is never run, which is vLLM's default."""
    serving, options = pod.serving, pod.serving.options
    rendered = [serving.model, "--served-model-name", serving.service]
    rendered += ["--host", pod.listen.host, "--port", str(pod.listen.port)]
    rendered += ["--max-model-len", str(options.context_tokens)]
    # Without a limit, vLLM chooses by the device. On Gaudi it would warm up for each number of requests for hours.
    limit = options.parallel or (_GAUDI_SEQUENCES if pod.vendor.resource == _GAUDI else None)
    if limit is not None:
        rendered += ["--max-num-seqs", str(limit)]
    rendered += ["--runner", "generate" if options.mode == "chat" else "pooling"]
    if pod.devices > 1:
        rendered += ["--tensor-parallel-size", str(pod.devices)]
    if pod.vendor.resource is None:  # on a processor, where vLLM would take most of the node's memory
        rendered += ["--kv-cache-memory-bytes", str(pod.cache_bytes or _CPU_CACHE_BYTES)]
    rendered += render_parsers(pod, VLLM_PARSERS, ["--enable-auto-tool-choice"])
    return [*rendered, *options.extra_args]


def build_environment(pod: PodServing) -> dict[str, str]:
    """Return vLLM's variables: it sends no usage statistics, and its processes connect to each other on loopback."""
    variables = {**PYTORCH_IN_POD, "VLLM_NO_USAGE_STATS": "1", "VLLM_HOST_IP": "127.0.0.1"}
    if pod.vendor.resource is None and (threads := pod.serving.threads) is not None:
        # By default, each pod binds threads to the same cores: all of a NUMA node but one, which schedules.
        variables |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(max(1, threads - 1))}
    return variables


RUNTIME: Final = Runtime(
    name="vllm",
    formats=frozenset({"safetensors"}),
    modes=frozenset({"chat", "embeddings", "rerank"}),
    settings=frozenset({"parallel"}),
    tuning=_TUNING,
    switches=_SWITCHES,
    errors=_ERRORS,
    # The list of a vLLM 0.32 with a chat model; those for audio are added for models that hear, and embeddings compare
    # documents, too (entrypoints/openai/speech_to_text and entrypoints/pooling).
    routes={
        "chat": TEXT_ROUTES | {"responses", "messages", "count_tokens", "transcriptions", "translations"},
        "embeddings": frozenset({"embeddings", "rerank"}),
        "rerank": frozenset({"rerank"}),
    },
    quantizations=_QUANTIZATIONS,
    speed_priors=PAGED_SPEED,
    cache_sharing="blocks",
    divides_layers=True,
    memory=PagedMemory(
        # get_batch_defaults of an API server; from 70 GiB on, but for an A100. --gpu-memory-utilization is 0.92.
        batches=(DeviceBatch(0, 2048, 256), DeviceBatch(70, 8192, 1024), DeviceBatch(160, 16384, 1024)),
        share_argument="--gpu-memory-utilization",
        block_argument="--block-size",
        batch_argument="--max-num-batched-tokens",
        whole_prompts_argument="--no-enable-chunked-prefill",
        eager_argument="--enforce-eager",
        has_windows=True,
        has_states=True,
        has_latents=True,
        # `request_memory` in v1/worker/utils.py.
        needs_free_share=True,
    ),
    pod=EnginePod(
        container="vllm",
        images=_IMAGES,
        cores=2,  # vLLM's page "Optimization": one for HTTP, one for the engine core
        # There is another one for arm64, under a name of its own.
        architectures={_IMAGES["cpu"]: "amd64"},
        # Images of some vendors start a shell.
        command=("vllm", "serve"),
        arguments=render_arguments,
        environment=build_environment,
        metrics=EngineMetrics(
            requests_running="vllm:num_requests_running",
            requests_waiting="vllm:num_requests_waiting",
            prompt_tokens="vllm:prompt_tokens_total",
            generated_tokens="vllm:generation_tokens_total",
            # Others than the first one are those of prometheus_client and of its middleware for HTTP.
            prefixes=("vllm:", "http_", "process_", "python_"),
            requests="vllm:request_success_total",
            cache_usage="vllm:kv_cache_usage_perc",
            first_token_seconds="vllm:time_to_first_token_seconds",  # noqa: S106 - a metric
            request_seconds="vllm:e2e_request_latency_seconds",
        ),
        shared_memory=True,
        compiles=True,
        slow_on_processor=(
            "runtime vllm runs on the processor, which is slow: set hardware.accelerator if the cluster has devices, "
            "or serve a GGUF file with runtime llama.cpp"
        ),
    ),
)
