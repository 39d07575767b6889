"""Recorded outputs of tools, with invented values in the real layout; a stand-in for the tools of a Mac."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from devices import tools

FIXTURES = Path(__file__).parent / "fixtures"


def recorded(name: str) -> str:
    return (FIXTURES / name).read_text()


def stand_in(monkeypatch: pytest.MonkeyPatch, outputs: Mapping[str, str]) -> None:
    """Replace each tool in `outputs`, which is keyed by its program, by this output; any other tool fails."""

    def output(*argv: str) -> str:
        for name, text in outputs.items():
            if name in {Path(argv[0]).name, argv[-1]}:
                return text
        raise OSError(f"{argv[0]} does not tell")

    monkeypatch.setattr(tools, "output", output)
