"""Weights on a claim are read where its volume is mounted, and no link leads out of it."""

from pathlib import Path
from typing import Any

import pytest

from artifacts.errors import ArtifactError
from artifacts.inspect import Inspection, inspect
from artifacts.repositories.repository import SourceAccess
from artifacts.source import parse
from tests.support.tiny_models import tiny_gguf, tiny_mlx


async def _inspect(source: str, file_root: Path | None, **options: Any) -> Inspection:
    return await inspect(parse(source), SourceAccess(file_root=file_root), **options)


@pytest.fixture
def mounted(tmp_path: Path) -> Path:
    """The root of a volume with a file, a folder, and links out of it."""
    root = tmp_path / "models"
    (root / "my llama").mkdir(parents=True)
    tiny_gguf.write(root / "my llama/tiny.gguf")
    tiny_gguf.write(tmp_path / "outside.gguf")
    tiny_mlx.write(root / "mlx")
    (root / "link.gguf").symlink_to(tmp_path / "outside.gguf")
    (root / "up").symlink_to(tmp_path)
    return root


async def test_file_and_folder_are_read_at_the_root_of_the_volume(mounted: Path) -> None:
    inspection = await _inspect("pvc://weights/my%20llama/tiny.gguf", mounted)
    assert (inspection.file, inspection.gguf.architecture) == ("tiny.gguf", "llama")
    assert (await _inspect("pvc://weights/mlx/", mounted)).file == ""


@pytest.mark.parametrize("path", ["link.gguf", "up/outside.gguf", "up/"])
async def test_link_out_of_the_volume_is_refused(mounted: Path, path: str) -> None:
    with pytest.raises(ArtifactError) as caught:
        await _inspect(f"pvc://weights/{path}", mounted)
    assert caught.value.reason == "SourceForbidden"


async def test_missing_file_is_named_by_its_source(mounted: Path) -> None:
    with pytest.raises(ArtifactError, match=r"^pvc://weights/none\.gguf: No such file") as caught:
        await _inspect("pvc://weights/none.gguf", mounted)
    assert caught.value.reason == "SourceNotFound"


async def test_claim_that_is_not_mounted_is_refused() -> None:
    with pytest.raises(ArtifactError, match="only a pod can mount a claim"):
        await _inspect("pvc://weights/tiny.gguf", None)
