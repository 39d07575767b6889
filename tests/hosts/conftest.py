"""Agents with real engines and processes on one machine, without an API server."""

from pathlib import Path

import pytest

from tests.support.local_host import assignment, machine, model
from tests.support.tiny_models import tiny_gguf
from tests.support.up_command import start

__all__ = ["assignment", "machine", "model", "start"]


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    tiny_gguf.write(path)
    return path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    tiny_gguf.write(path)
    return path
