"""Recorded outputs of vendors' tools, programs that print them, and folders like those of a kernel."""

from collections.abc import Mapping
from pathlib import Path

import pytest

FIXTURES = Path(__file__).parent / "fixtures"


def recorded(name: str) -> str:
    return (FIXTURES / name).read_text()


class ToolFolder:
    """A folder on PATH with programs that answer as recorded; no other vendor's tool is found."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder / "bin"
        self.folder.mkdir()
        monkeypatch.setenv("PATH", f"{self.folder}:/usr/bin:/bin")

    def add(self, name: str, script: str) -> Path:
        """Add a program, written in the language of /bin/sh."""
        program = self.folder / name
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        return program

    def add_recorded(self, name: str, answers: Mapping[str, str]) -> Path:
        """Add a program that answers by the first of these texts that one of its arguments begins with."""
        cases = []
        for number, (argument, text) in enumerate(answers.items()):
            file = self.folder.parent / f"{name}-{number}.txt"
            file.write_text(text)
            cases.append(f'case "$*" in "{argument}"*) echo "$*" >> {self.calls(name)}; exec cat {file};; esac')
        return self.add(name, "\n".join([*cases, 'echo "unknown option: $*"; exit 6']))

    def calls(self, name: str) -> Path:
        return self.folder.parent / f"{name}.calls"

    def list_calls(self, name: str) -> list[str]:
        return self.calls(name).read_text().splitlines() if self.calls(name).exists() else []


def write_tree(root: Path, text: str) -> Path:
    """Write the files of a recording of `path: content` lines, in which `|` is the end of a line of the file."""
    for line in text.splitlines():
        name, _, content = line.partition(":")
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content.strip().replace("|", "\n") + "\n")
    return root
