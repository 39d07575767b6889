"""Files behind links, as a hub's client lays them out, have the names of the links and stay below the root."""

from pathlib import Path

import pytest

from artifacts.errors import ArtifactError
from artifacts.inspect import check_stored, inspect
from artifacts.repositories.repository import SourceAccess
from artifacts.source import parse
from artifacts.weights_store import WeightsStore
from standalone.machine import StandaloneOptions
from standalone.manifests import Manifests
from standalone.single import choose_models
from tests.support.hub_cache import move_to_cache
from tests.support.tiny_models import tiny_gguf, tiny_split

FIRST = "tiny-00001-of-00003.gguf"


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    tiny_gguf.write(tmp_path / "whole-Q8.gguf")
    return move_to_cache([*tiny_split.write(tmp_path / "split"), tmp_path / "whole-Q8.gguf"], tmp_path / "cache")


@pytest.mark.parametrize("name", [FIRST, "whole-Q8.gguf"])
@pytest.mark.parametrize("scheme", ["pvc://weights/", "file://"])
async def test_linked_file_is_inspected_under_its_name(snapshot: Path, scheme: str, name: str) -> None:
    root = snapshot.parents[1]
    path = snapshot.relative_to(root) if scheme.startswith("pvc") else snapshot
    inspection = await inspect(parse(f"{scheme}{path}/{name}"), SourceAccess(file_root=root))
    assert (inspection.file, inspection.gguf.architecture) == (name, "llama")


@pytest.mark.parametrize(
    ("path", "files"),
    [(FIRST, ()), ("", ("tiny-*.gguf",)), ("whole-Q8.gguf", ()), ("", ("whole*.gguf",))],
)
async def test_engine_gets_the_name_of_the_link(
    snapshot: Path, tmp_path: Path, path: str, files: tuple[str, ...]
) -> None:
    source = parse(f"file://{snapshot}/{path}", files)
    checked = []
    held = await WeightsStore(tmp_path / "store", SourceAccess(file_root=snapshot.parents[1])).obtain(
        source,
        sha256=None,
        revision=None,
        token=None,
        on_progress=lambda _done, _total: None,
        check=lambda path: checked.append(check_stored(source, path).gguf.architecture),
    )
    name = "whole-Q8.gguf" if "whole" in str((path, files)) else FIRST
    assert (held.path, checked) == (snapshot / name, ["llama"])


async def test_part_that_leads_out_of_the_root_is_refused(snapshot: Path, tmp_path: Path) -> None:
    first, second = (snapshot / f"tiny-0000{number}-of-00003.gguf" for number in (1, 2))
    (tmp_path / "outside").write_bytes(second.read_bytes())
    second.unlink()
    second.symlink_to(tmp_path / "outside")
    store = WeightsStore(tmp_path / "store", SourceAccess(file_root=snapshot.parents[1]))
    with pytest.raises(ArtifactError, match=r"tiny-00002-of-00003\.gguf is not below --file-root") as caught:
        await store.obtain(
            parse(f"file://{first}"), sha256=None, revision=None, token=None, on_progress=lambda _done, _total: None
        )
    assert caught.value.reason == "SourceForbidden"
    with pytest.raises(ArtifactError, match=r"tiny-00002-of-00003\.gguf is not below --file-root"):
        await inspect(parse(f"file://{first.parent}/", ["tiny-*.gguf"]), SourceAccess(file_root=snapshot.parents[1]))


async def test_path_of_a_link_is_served_under_the_name_of_the_link(
    snapshot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(snapshot)
    options = StandaloneOptions(folder=tmp_path, port=0, endpoint="")
    (tmp_path / "current").symlink_to(snapshot)
    for path, name, file in (
        ("whole-Q8.gguf", "whole-q8", "whole-Q8.gguf"),
        ("../../snapshots/../blobs/../" + "/".join(snapshot.parts[-2:]) + f"/{FIRST}", FIRST[:-5], FIRST),
        (f"{tmp_path}/current/whole-Q8.gguf", "whole-q8", "whole-Q8.gguf"),
    ):
        manifests, _ = await choose_models([path], Manifests(), options, 1 << 30)
        (model,) = manifests.models.values()
        assert (model.metadata.name, model.spec.source) == (name, f"file://{snapshot}/{file}")
