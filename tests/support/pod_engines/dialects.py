"""The ways in which vLLM, SGLang and TGI differ to a client: options, key, model list and errors.

What is here was recorded from the real vLLM (`make test-vllm` compares it again), and read in the source of the other
two: SGLang 0.5.15.post1 (srt/utils/auth.py, entrypoints/http_server.py, managers/tokenizer_manager.py) and TGI's router
(router/src/server.rs, infer/mod.rs).
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

RECORDED: Final = Path(__file__).parent / "recorded"


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """One engine, as its command line and its clients see it."""

    engine: str
    """Its name in Pomona."""
    metrics: str
    """Name of the recording with its metrics; that with its options has the name of the engine."""
    program: str
    """Name of the program in its messages."""
    model: str
    """Option with the folder of the weights, or the name of the positional argument."""
    served_name: str | None
    host: str
    port: str
    context: str
    key_option: str
    key_variable: str | None
    guarded: Callable[[str], bool]
    """Return whether a request to this path must bring the key, if the engine has one."""
    unauthorized: str
    """Body of its answer 401."""
    owner: str
    """Value of `owned_by` in its list of models."""
    too_long: Callable[[int, int, int], Any]
    """Return the answer 400 to a request by the tokens of its prompt, those it asks for, and the context length."""

    def read_options(self) -> dict[str, Any]:
        """Return the recording of the options."""
        return read_recording(self.engine)

    def read_metrics(self) -> dict[str, str]:
        """Return the type of each metric by its name."""
        metric_types: dict[str, str] = read_recording(self.metrics)["metrics"]
        return metric_types


def read_recording(name: str) -> dict[str, Any]:
    """Return what is recorded under a name."""
    recording: dict[str, Any] = json.loads((RECORDED / f"{name}.json").read_text())
    return recording


def _vllm_too_long(prompt: int, asked: int, context: int) -> Any:
    if asked > context:
        text = f"max_tokens={asked} cannot be greater than max_model_len={context}. Please request fewer output tokens."
        text += f" (parameter=max_tokens, value={asked})"
    else:
        text = f"This model's maximum context length is {context} tokens. However, you requested {asked} output tokens "
        text += f"and your prompt contains at least {prompt} input tokens."
    return {"error": {"message": text, "type": "BadRequestError", "param": "max_tokens", "code": 400}}


def _sglang_too_long(prompt: int, asked: int, context: int) -> Any:
    text = f"Requested token count exceeds the model's maximum context length of {context} tokens. You requested a "
    text += f"total of {prompt + asked} tokens."
    return {"object": "error", "message": text, "type": "BadRequestError", "param": None, "code": 400}


def _tgi_too_long(prompt: int, asked: int, context: int) -> Any:
    text = f"`inputs` tokens + `max_new_tokens` must be <= {context}. Given: {prompt} `inputs` tokens and {asked} "
    return {"error": f"Input validation error: {text}`max_new_tokens`", "error_type": "validation"}


_GUARDED_BY_VLLM: Final = ("/v1", "/v2", "/inference", "/cohere")
_OPEN_IN_TGI: Final = ("/health", "/metrics", "/info", "/ping", "/v1/models")

_DIALECTS: Final = (
    Dialect(
        engine="vllm",
        metrics="vllm_server",
        program="vllm",
        model="model_tag",
        served_name="--served-model-name",
        host="--host",
        port="--port",
        context="--max-model-len",
        key_option="--api-key",
        key_variable="VLLM_API_KEY",
        guarded=lambda path: path.startswith(_GUARDED_BY_VLLM),
        unauthorized='{"error":"Unauthorized"}',
        owner="vllm",
        too_long=_vllm_too_long,
    ),
    Dialect(
        engine="sglang",
        metrics="sglang",
        program="launch_server.py",
        model="--model-path",
        served_name="--served-model-name",
        host="--host",
        port="--port",
        context="--context-length",
        key_option="--api-key",
        key_variable=None,
        guarded=lambda path: not path.startswith(("/health", "/metrics")),
        unauthorized='{"error":"Unauthorized"}',
        owner="sglang",
        too_long=_sglang_too_long,
    ),
    Dialect(
        engine="tgi",
        metrics="tgi",
        program="text-generation-launcher",
        model="--model-id",
        served_name=None,
        host="--hostname",
        port="--port",
        context="--max-total-tokens",
        key_option="--api-key",
        key_variable="API_KEY",
        guarded=lambda path: path not in _OPEN_IN_TGI,
        unauthorized="",
        owner="tgi",
        too_long=_tgi_too_long,
    ),
)
DIALECTS: Final[Mapping[str, Dialect]] = {dialect.engine: dialect for dialect in _DIALECTS}
"""By the name of the engine."""
