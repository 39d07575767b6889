"""Output of system tools: without the user's locale, an error when a tool fails."""

from pathlib import Path

import pytest

from devices import tools
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


def test_programs_of_homebrew_are_found_without_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # launchd starts an agent with /usr/bin:/bin:/usr/sbin:/sbin.
    brewed, own = tmp_path / "homebrew" / "engine", tmp_path / "bin" / "engine"
    for program in (brewed, own):
        program.parent.mkdir()
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
    monkeypatch.setattr(tools, "_HOMEBREW", (str(brewed.parent),))
    assert tools.find_program("engine", {"PATH": "/usr/bin:/bin"}) == str(brewed)
    assert tools.find_program("engine", {"PATH": str(own.parent)}) == str(own), "PATH comes first"
    assert tools.find_program("no-such-engine", {}) is None
