"""Recorded outputs of tools; the values are ours, in the layout of real ones. Stands in for the tools of a Mac."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from devices import tools

FIXTURES = Path(__file__).parent / "fixtures"


def recorded(name: str) -> str:
    return (FIXTURES / name).read_text()


def stand_in(monkeypatch: pytest.MonkeyPatch, outputs: Mapping[str, str]) -> None:
    """Have each tool, by the name of its program, print what `outputs` says, and every other one fail."""

    def output(*argv: str) -> str:
        for name, text in outputs.items():
            if name in {Path(argv[0]).name, argv[-1]}:
                return text
        raise OSError(f"{argv[0]} does not tell")

    monkeypatch.setattr(tools, "output", output)
