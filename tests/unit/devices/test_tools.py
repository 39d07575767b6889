"""Output of system tools: without the user's locale, an error when a tool fails."""

import pytest

from devices.tools import output, output_or_empty


def test_output_is_without_the_users_locale() -> None:
    assert output("/bin/sh", "-c", "echo $LC_ALL $TZ") == "C UTC\n"


@pytest.mark.parametrize("argv", [("/no/such/tool",), ("/bin/sh", "-c", "echo half; exit 1"), ("/bin/sh", "-c", ":")])
def test_a_failing_tool_is_an_error(argv: tuple[str, ...]) -> None:
    with pytest.raises(OSError, match=argv[0]):
        output(*argv)
    assert output_or_empty(*argv) == ""


def test_bytes_that_are_no_text_are_no_error() -> None:
    assert output("/bin/sh", "-c", r"printf '\377\n'") == "\N{REPLACEMENT CHARACTER}\n"
