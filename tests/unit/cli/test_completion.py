"""Shells complete commands, options and names; a cluster that does not answer completes nothing and says nothing."""

import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete, get_completion_class
from click.testing import CliRunner

from cli.completion import complete_for_kubectl
from cli.main import main

SCRIPTS = {"bash": "complete -o nosort -F _pomona_completion pomona", "zsh": "#compdef pomona", "fish": "complete"}


def complete(*words: str) -> list[str]:
    *arguments, incomplete = words
    completions = ShellComplete(main, {}, "pomona", "_POMONA_COMPLETE").get_completions(list(arguments), incomplete)
    return [item.value for item in completions]


@pytest.mark.parametrize("shell", SCRIPTS)
def test_script_of_each_shell_is_printed(shell: str) -> None:
    result = CliRunner().invoke(main, ["completion", shell])
    assert result.exit_code == 0
    assert SCRIPTS[shell] in result.output
    assert "_POMONA_COMPLETE" in result.output
    assert get_completion_class(shell) is not None


def test_commands_options_and_entries_of_the_catalog_complete() -> None:
    assert complete("de") == ["delete", "deploy"]
    assert complete("host", "") == ["cordon", "drain", "join", "list", "remove", "taint", "uncordon"]
    assert "--replicas" in complete("deploy", "--re")
    assert complete("deploy", "gemma-4-3") == ["gemma-4-31b"]
    assert complete("list", "-o", "w") == ["wide"]


def test_names_do_not_complete_without_a_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "absent"))
    assert complete("status", "c") == complete("host", "drain", "s") == []
    assert capsys.readouterr() == ("", "")


def test_kubectl_gets_completions_with_their_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["kubectl_complete-pomona", "host", "dr"])
    complete_for_kubectl()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("drain\tCordon the host NAME")
    assert lines[-1] == ":4"


def test_real_bash_completes(tmp_path: Path) -> None:
    script = (
        "source <(pomona completion bash)\nCOMP_WORDS=(pomona host dr)\nCOMP_CWORD=2\n"
        '_pomona_completion pomona\necho "${COMPREPLY[@]}"\n'
    )
    environment = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(
        ["bash", "-c", script], check=False, capture_output=True, text=True, timeout=60, env=environment
    )
    assert done.stdout.strip() == "drain", done.stderr
