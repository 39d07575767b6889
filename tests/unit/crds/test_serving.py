"""The arguments that extraArgs accepts; tests/cluster/crds/test_crds.py tests the same rule in the API server."""

import re

import pytest

from crds.serving import EXTRA_ARGUMENT, TUNING_ARGUMENTS
from runtimes import llama_launcher


def takes(item: str) -> bool:
    return re.fullmatch(EXTRA_ARGUMENT, item) is not None


@pytest.mark.parametrize(
    "item", [*TUNING_ARGUMENTS["llama.cpp"], "0.5", "on", "q8_0", "chatml", "{% if a - b %}", "größer"]
)
def test_tuning_arguments_and_values_are_accepted(item: str) -> None:
    assert takes(item)


@pytest.mark.parametrize(
    "item",
    [
        *("-m", "--model", "-a", "-c", "--ctx-size", "-np", "--host", "--port", "--api-key", "--api-key-file"),
        *("--log-file", "--log_file", "--log_file=x", "--ctx_size", "--temp=0.5", "--threads_batch"),
        *("-lcs", "-lcd", "--lora", "--mmproj", "-md", "--grammar-file", "--chat-template-file", "-lv", "--rpc"),
        *("-cram", "--cache-ram", "-ub", "--ubatch-size", "--models-dir", "--slots", "--no-such-argument-yet"),
        *("", "-", "--", "-1", "a\0b", "a\nb", "\n", "\x7f", "on\n", "--temp\n"),
    ],
)
def test_other_arguments_are_refused(item: str) -> None:
    assert not takes(item)


def test_launcher_has_every_accepted_argument() -> None:
    assert set(TUNING_ARGUMENTS["llama.cpp"]) <= llama_launcher.ARGUMENTS.keys()
