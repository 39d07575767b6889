"""The items that extraArgs accepts; each engine decides by name, and the API server by the same pattern."""

import re

import pytest

from crds.serving import EXTRA_ARGUMENT
from runtimes import llama_launcher, llama_server


@pytest.mark.parametrize("item", [*llama_server.RUNTIME.tuning, "0.5", "on", "chatml", "{% if a - b %}", "größer"])
def test_arguments_and_values_are_accepted(item: str) -> None:
    assert re.fullmatch(EXTRA_ARGUMENT, item)


@pytest.mark.parametrize("item", ["", "a\0b", "a\nb", "\n", "\x7f", "on\n", "--temp\n"])
def test_control_characters_are_refused(item: str) -> None:
    assert not re.fullmatch(EXTRA_ARGUMENT, item)


def test_launcher_has_every_accepted_argument() -> None:
    assert set(llama_server.RUNTIME.tuning) <= llama_launcher.ARGUMENTS.keys()
