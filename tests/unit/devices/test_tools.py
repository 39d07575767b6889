import pytest

from devices.tools import output, told


def test_what_a_tool_prints_without_the_owners_language() -> None:
    assert output("/bin/sh", "-c", "echo $LC_ALL $TZ") == "C UTC\n"


@pytest.mark.parametrize("argv", [("/no/such/tool",), ("/bin/sh", "-c", "echo half; exit 1"), ("/bin/sh", "-c", ":")])
def test_a_tool_that_does_not_tell_is_an_error_and_no_answer(argv: tuple[str, ...]) -> None:
    with pytest.raises(OSError, match=argv[0]):
        output(*argv)
    assert told(*argv) == ""


def test_bytes_that_are_no_text_are_no_error() -> None:
    assert output("/bin/sh", "-c", r"printf '\377\n'") == "\N{REPLACEMENT CHARACTER}\n"
