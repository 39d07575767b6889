"""Texts that are rendered from tables and kept in files, so that a person reads a change before it is committed."""

import os
from pathlib import Path

import pytest

from tests.controlplane.process import CHECKOUT

IS_WRITING = "WRITE_GOLDEN" in os.environ
"""True in `make golden`, which writes the files instead of comparing them."""


def check_kept_text(path: Path, text: str) -> None:
    """Compare a file with the text that it should have, or write it in `make golden`."""
    if IS_WRITING:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return
    name = path.relative_to(CHECKOUT)
    if not path.exists():
        pytest.fail(f"{name} is missing: run `make golden`, and read what it wrote")
    assert path.read_text() == text, f"{name} differs: run `make golden`, and read the difference"
