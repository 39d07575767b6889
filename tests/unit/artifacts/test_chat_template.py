"""The form of tool calls and thoughts that a chat template shows."""

import json
import time
from typing import Any

import pytest

from artifacts.formats.chat_template import MOST_TEMPLATE_BYTES, find_chat_format
from artifacts.inspect import check_stored, inspect
from artifacts.repositories.repository import SourceAccess
from artifacts.source import parse
from tests.support.chat_templates import FAMILIES, Family, tokenizer_config
from tests.support.file_server import ALLOWED_NETWORKS, FileServer
from tests.support.tiny_models import tiny_mlx

QWEN3 = next(family for family in FAMILIES if family.name == "Qwen3")
PLAIN = next(family for family in FAMILIES if family.name == "without tools")
MISTRAL = next(family for family in FAMILIES if family.name == "Mistral")


def find(tokenizer: Any, file: str | None = None, architecture: str = "") -> str:
    configs = {"tokenizer_config.json": json.dumps(tokenizer).encode()}
    return find_chat_format(
        configs | ({"chat_template.jinja": file.encode()} if file is not None else {}), architecture
    )


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_form_is_that_of_the_family(family: Family) -> None:
    assert find(tokenizer_config(family.template, family.tokens), architecture=family.architecture) == family.form
    # With line ends and quotes as a file beside the weights has them.
    stated = tokenizer_config(None, family.tokens)
    assert find(stated, family.template, family.architecture) == family.form


def test_file_precedes_the_tokenizer_and_named_templates_are_one() -> None:
    assert find(tokenizer_config(QWEN3.template), PLAIN.template) == ""
    named = [{"name": "default", "template": PLAIN.template}, {"name": "tool_use", "template": QWEN3.template}]
    assert find(tokenizer_config(named)) == QWEN3.form


def test_token_in_the_template_is_none_of_the_tokenizer() -> None:
    template = '{%- set mark = "[TOOL_CALLS]" %}' + MISTRAL.template
    assert find(tokenizer_config(template)) == ""
    assert find(tokenizer_config(template, MISTRAL.tokens)) == MISTRAL.form


@pytest.mark.parametrize(
    "stated", [{"chat_template": 7}, {"chat_template": [1]}, {"chat_template": [{"name": "x"}]}, {}, [], "x"]
)
def test_tokenizer_of_another_shape_has_no_form(stated: Any) -> None:
    assert find(stated) == ""


def test_file_that_is_no_text_has_no_form() -> None:
    assert find_chat_format({"chat_template.jinja": b"{% if tools %}\xff"}, "") == ""


@pytest.mark.parametrize(
    "part",
    ["{%", "{% if tools ", "<tool_call>", "add_generation_prompt", "add_generation_prompt%}{{", "\\n", "<think>"],
)
def test_long_template_of_a_stranger_is_searched_in_no_time(part: str) -> None:
    begin = time.monotonic()
    assert find(tokenizer_config(part * (MOST_TEMPLATE_BYTES // len(part)))) == ""
    assert find(tokenizer_config("{% if tools %}" + part * (MOST_TEMPLATE_BYTES // len(part)))) == ""
    assert time.monotonic() - begin < 5


async def test_inspection_has_the_form_and_not_the_template(server: FileServer) -> None:
    folder = server.root / "acme" / "qwen3"
    tiny_mlx.write(folder, written_for="pt")
    (folder / "chat_template.jinja").write_text(QWEN3.template)
    access = SourceAccess(endpoint=server.url, allowed_networks=ALLOWED_NETWORKS)
    inspection = await inspect(parse("hf://acme/qwen3"), access)
    assert inspection.gguf.chat_format == "hermes-think"
    assert check_stored(parse("hf://acme/qwen3"), folder).gguf.chat_format == "hermes-think"

    # One that is too long is no fault of the weights, and the tokenizer's does not count then.
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(QWEN3.template)))
    (folder / "chat_template.jinja").write_text(QWEN3.template + " " * MOST_TEMPLATE_BYTES)
    assert (await inspect(parse("hf://acme/qwen3"), access)).gguf.chat_format == ""
    assert check_stored(parse("hf://acme/qwen3"), folder).gguf.chat_format == ""
