"""The parsers that Pomona chooses in the real vLLM: they start, read what models write, and serve tools."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from artifacts.formats.chat_template import THINKS
from gateway.proxy.errors import translate_engine_error
from runtimes.output_parsers import VLLM_PARSERS
from tests.support.chat_templates import FAMILIES, TOOL
from tests.support.tiny_models.tiny_gguf import SENTENCE
from tests.vllm import environment, read_outputs
from tests.vllm.real_server import RealServer, serve

CHOSEN: Final = [family for family in FAMILIES if family.form and family.name != "gpt-oss"]
"""All but gpt-oss, whose answers vLLM reads by their tokens, whatever parsers are chosen."""
QUESTION: Final[dict[str, Any]] = {
    "model": "chat",
    "messages": [{"role": "user", "content": "Hi"}],
    "tools": [TOOL],
    "max_tokens": 40,
    "temperature": 0,
}


def read(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what the real parsers make of outputs."""
    program = [str(environment.folder() / "bin/python"), "-P", read_outputs.__file__]
    done = subprocess.run(program, input=json.dumps(cases), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    answers: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return answers


def case(form: str, output: str, tokens: tuple[str, ...] = ()) -> dict[str, Any]:
    tool, reasoning = VLLM_PARSERS[form.removesuffix(THINKS)]
    thinks = form.endswith(THINKS)
    return {"tool": tool, "reasoning": reasoning if thinks else "", "output": output, "tokens": tokens, "tools": [TOOL]}


def test_real_parsers_read_the_calls_and_thoughts_of_each_family() -> None:
    answers = read([case(family.form, family.thoughts + family.call, family.tokens) for family in CHOSEN])
    for family, answer in zip(CHOSEN, answers, strict=True):
        call = [["get_weather", {"city": "Rome"}]] if family.call else []
        expected = {"thoughts": "hm" if family.thoughts else "", "text": "", "calls": call}
        assert answer == expected, family.name


def test_answer_without_a_call_stays_a_text() -> None:
    answers = read([case(family.form, f"{family.thoughts}plain", family.tokens) for family in CHOSEN])
    for family, answer in zip(CHOSEN, answers, strict=True):
        assert answer == {"thoughts": "hm" if family.thoughts else "", "text": "plain", "calls": []}, family.name


def test_only_the_parsers_of_forms_with_a_token_need_one() -> None:
    forms = [form for form in VLLM_PARSERS if form != "gpt-oss"]
    answers = read([case(form + THINKS, "plain") for form in forms])
    refused = {form for form, answer in zip(forms, answers, strict=True) if "error" in answer}
    assert refused == {"mistral", "lfm2", "llama-3"}


@pytest.fixture(scope="module", params=["Qwen3", "Qwen3 Coder"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    (family,) = (family for family in FAMILIES if family.name == request.param)
    with serve(tmp_path_factory.mktemp("vllm"), "chat", family) as running:
        yield running


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_request_with_tools_is_answered(server: RealServer, choice: str) -> None:
    answer = server.ask("POST", "/v1/chat/completions", QUESTION | {"tool_choice": choice})
    assert answer.status == 200, answer.text
    message = answer.json["choices"][0]["message"]
    # The tiny model thinks as little as it calls: all that it writes are thoughts that do not end.
    assert SENTENCE in {(message["content"] or "").strip(), (message.get("reasoning") or "").strip()}


def test_model_without_a_known_form_refuses_tools_with_the_way_out(tmp_path: Path) -> None:
    with serve(tmp_path, "chat") as running:
        for choice in ("auto", "required"):
            answer = running.ask("POST", "/v1/chat/completions", QUESTION | {"tool_choice": choice})
            error = translate_engine_error(answer.status, answer.text.encode(), "chat", "vllm")
            assert error.status == 400
            assert "name vLLM's parser of it in spec.extraArgs" in str(error)
