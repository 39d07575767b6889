"""The table of each engine's errors: what a client gets, and what is learnt about the engine."""

import json

import pytest

from runtimes.engine_errors import EngineError, Judgement, judge_error, read_error
from runtimes.registry import RUNTIMES, find_runtime

LLAMA_CPP = {"code": 500, "type": "server_error"}


def judge(engine: str | None, status: int, answer: object) -> Judgement:
    body = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
    return judge_error(find_runtime(engine).errors, status, read_error(body).text)


@pytest.mark.parametrize(
    ("engine", "status", "answer", "expected"),
    [
        # Recorded of the real engines: by the tests in tests/hosts and tests/vllm, or of Ollama 0.17.4.
        (
            "llama.cpp",
            500,
            {"error": LLAMA_CPP | {"message": "image input is not supported - hint: x"}},
            (400, "nothing"),
        ),
        ("llama.cpp", 500, {"error": LLAMA_CPP | {"message": "Failed to parse tools: x"}}, (400, "nothing")),
        ("llama.cpp", 500, {"error": LLAMA_CPP | {"message": "Compute error."}}, (500, "failure")),
        ("llama.cpp", 500, {"error": LLAMA_CPP | {"message": "what is this"}}, (500, "failure")),
        ("llama.cpp", 501, {"error": {"code": 501, "message": "no embeddings"}}, (400, "nothing")),
        ("mlx-lm", 404, {"error": "generation thread died"}, (503, "sick")),
        ("mlx-lm", 404, {"error": "Only 'text' content type is supported."}, (400, "nothing")),
        ("mlx-lm", 404, "Not Found", (404, "nothing")),
        ("vllm", 500, {"error": {"message": "EngineCore encountered an issue. See"}}, (503, "sick")),
        ("vllm", 503, {"error": {"message": "The engine is currently busy"}}, (503, "nothing")),
        ("vllm", 500, {"error": {"message": "Internal server error"}}, (500, "failure")),
        ("sglang", 503, {"message": "The request queue is full.", "code": 503}, (503, "nothing")),
        ("sglang", 500, {"message": "Internal server error: KeyError", "code": 500}, (500, "failure")),
        ("tgi", 424, {"error": "Request failed during generation: x", "error_type": "generation"}, (502, "failure")),
        ("tgi", 422, {"error": "Input validation error: x", "error_type": "validation"}, (422, "nothing")),
        ("ollama", 503, {"error": {"message": "server busy, please try again.  maximum"}}, (503, "nothing")),
        ("ollama", 404, {"error": {"message": "model 'x' not found", "type": "api_error"}}, (503, "failure")),
        ("ollama", 404, "404 page not found", (404, "nothing")),
        ("omlx", 503, {"error": {"message": "busy"}}, (503, "nothing")),
        ("omlx", 507, {"error": {"message": "memory"}}, (503, "failure")),
        ("generic", 404, {"error": "generation thread died"}, (404, "nothing")),
        (None, 429, "slow down", (429, "nothing")),
        (None, 500, "", (500, "failure")),
    ],
)
def test_answer_of_an_engine_is_judged_by_its_table(
    engine: str | None, status: int, answer: object, expected: tuple[int, str]
) -> None:
    assert judge(engine, status, answer)[:2] == expected


def test_text_that_a_client_has_sent_is_not_taken_for_the_engines() -> None:
    """llama.cpp quotes the wrong message, and mlx-lm the wrong value."""
    quoted = {"error": LLAMA_CPP | {"message": 'Failed to parse messages: {"content": "Compute error."}'}}
    assert judge("llama.cpp", 500, quoted)[:2] == (400, "nothing")
    assert judge("mlx-lm", 404, {"error": "unknown value 'generation thread died'"})[:2] == (400, "nothing")


def test_every_engine_has_errors_and_every_row_its_source() -> None:
    assert [name for name, runtime in RUNTIMES.items() if not runtime.errors] == ["generic"]
    for engine, runtime in RUNTIMES.items():
        for number, row in enumerate(runtime.errors):
            assert row.source, (engine, row)
            # A row is reached: the rows before it do not take all that it means.
            judged = judge_error(runtime.errors[: number + 1], row.status, row.begin)
            assert judged == (row.client_status, row.lesson, row.advice)


@pytest.mark.parametrize(
    "row", [row for runtime in RUNTIMES.values() for row in runtime.errors], ids=lambda row: row.begin
)
def test_client_repeats_only_what_it_is_not_to_blame_for(row: EngineError) -> None:
    """A mistake of the client is 4xx, and what the engine has failed 5xx, whatever status the engine gave it."""
    assert (row.client_status >= 500) == (row.lesson != "nothing" or row.client_status == 503)
