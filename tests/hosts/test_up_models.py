"""The Models of `pomona up`: local files, names, and weights in the caches of other programs; engines are real."""

from pathlib import Path

from kube.resources import MODELS
from tests.support.refused_manifests import make_manifest
from tests.support.tiny_models import tiny_gguf, tiny_mlx
from tests.support.up_command import Start, ask, manifest, service


async def test_local_files_of_a_manifest_state_no_memory(start: Start, tmp_path: Path) -> None:
    tiny_gguf.write(tmp_path / "tiny.gguf")
    tiny_mlx.write(tmp_path / "folder", written_for="pt")
    up = start(
        manifest(
            tmp_path / "local.yaml",
            make_manifest(MODELS, name="tiny", source=f"file://{tmp_path}/tiny.gguf"),
            service("chat", "tiny", contextLength=None),
            make_manifest(MODELS, name="folder", source=f"file://{tmp_path}/folder/"),
            service("other", "folder", extraArgs=[]),
        )
    )
    url = await up.url()
    for name in ("chat", "other"):
        await up.says(f"{name}: Ready")
        assert await ask(url, name) == (200, tiny_gguf.SENTENCE)
