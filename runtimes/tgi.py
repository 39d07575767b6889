"""Text Generation Inference (TGI) in a pod. Its upstream is frozen since March 2026: 3.3.7 is the last release.

It is here for services that already use it. It answers requests for any model name. Its launcher hands a key on to the
router as an argument, and the router ignores the case of keys; so TGI listens on loopback, and Pomona's proxy in the
same pod checks the key.
"""

from collections.abc import Mapping
from typing import Final

from runtimes.engine_errors import EngineError, ErrorTable
from runtimes.environment import PYTORCH_IN_POD
from runtimes.paged_estimate import PAGED_SPEED, DeviceBatch, PagedMemory
from runtimes.pod import EngineMetrics, EnginePod, PodServing
from runtimes.runtime import PLAIN, TEXT_ROUTES, Quantizations, Runtime

_IMAGES: Final[Mapping[str, str]] = {"nvidia": "ghcr.io/huggingface/text-generation-inference:3.3.7"}
_TUNING: Final = (
    *("--cuda-memory-fraction", "--cuda-graphs", "--waiting-served-ratio", "--max-waiting-tokens"),
    *("--max-concurrent-requests", "--max-client-batch-size", "--max-best-of", "--max-stop-sequences"),
    *("--max-top-n-tokens", "--validation-workers", "--disable-grammar-support", "--dtype", "--speculate"),
)
"""None of those that are rendered: the launcher refuses an argument that is repeated."""

_QUANTIZATIONS: Final[Quantizations] = {
    "nvidia": {
        PLAIN: "*",
        "awq": "turing+",
        "gptq": "turing+",
        "compressed-tensors": "ampere+",
        "fp8": "ada+ ~ampere",
        "bitsandbytes": "turing+",
    },
    "amd": {PLAIN: "*", "awq": "*", "gptq": "*"},
    "intel-gaudi": {PLAIN: "*", "fp8": "*"},
}
"""The page "Quantization" of TGI 3.3."""

_ROUTER: Final = "TGI 3.3: router/src/server.rs, From<InferError>"
_ERRORS: Final[ErrorTable] = (
    EngineError(424, "", 502, "failure", f"{_ROUTER}: GenerationError, the shard failed or is gone"),
    EngineError(429, "Model is overloaded", 429, "nothing", f"{_ROUTER}: Overloaded"),
    EngineError(500, "Incomplete generation", 500, "failure", f"{_ROUTER}: IncompleteGeneration"),
)


def render_arguments(pod: PodServing) -> list[str]:
    """Render the launcher's arguments.

    The prefill, the step that computes prompts, takes one whole context. A prompt is a token shorter, so that one can
    be generated. How many tokens a batch has, TGI infers after its warm-up, whatever is stated.
    """
    serving, options = pod.serving, pod.serving.options
    length = options.context_tokens
    rendered = ["--model-id", serving.model, "--hostname", pod.listen.host, "--port", str(pod.listen.port)]
    rendered += ["--max-total-tokens", str(length), "--max-input-tokens", str(length - 1)]
    rendered += ["--max-batch-prefill-tokens", str(length), "--usage-stats", "off"]
    if options.parallel is not None:
        rendered += ["--max-batch-size", str(options.parallel)]
    if pod.devices > 1:
        rendered += ["--num-shard", str(pod.devices)]
    return [*rendered, *options.extra_args]


RUNTIME: Final = Runtime(
    name="tgi",
    formats=frozenset({"safetensors"}),
    modes=frozenset({"chat"}),
    settings=frozenset({"parallel"}),
    tuning=_TUNING,
    switches=frozenset({"--disable-grammar-support"}),
    errors=_ERRORS,
    routes={"chat": TEXT_ROUTES},
    quantizations=_QUANTIZATIONS,
    speed_priors=PAGED_SPEED,
    cache_sharing="blocks",
    divides_layers=True,
    memory=PagedMemory(
        # TGI_WIGGLE_ROOM is 0.90, of the share that is set. Pomona lets one whole prompt into a batch.
        batches=(DeviceBatch(0, 0, 128),),
        share_argument="--cuda-memory-fraction",
        whole_prompts=True,
        device_percent=90,
        has_margin=True,
    ),
    pod=EnginePod(
        container="tgi",
        images=_IMAGES,
        cores=2,  # router and launcher
        arguments=render_arguments,
        environment=lambda _pod: {**PYTORCH_IN_POD, "HUGGINGFACE_HUB_CACHE": "/tmp"},  # noqa: S108 - as HOME
        metrics=EngineMetrics(
            requests_running="tgi_batch_current_size",
            requests_waiting="tgi_queue_size",
            # Histograms of tokens for each request, whose sums are the totals.
            prompt_tokens="tgi_request_input_length_sum",
            generated_tokens="tgi_request_generated_tokens_sum",
            prefixes=("tgi_",),
            requests="tgi_request_count",
            request_seconds="tgi_request_duration",
        ),
        shared_memory=True,
        warning="TGI is maintained no more since March 2026: serve this Model with runtime vllm or sglang",
    ),
)
