"""Promises of the documentation about volumes: their files, and updates that are never visible in part."""

import base64
from pathlib import Path
from typing import Any, cast

import pytest

from tests.controlplane.kubelet.api import NodeAPI
from tests.controlplane.kubelet.volumes import PodVolumes, VolumeError, write_atomically

OBJECTS: dict[tuple[str, str], dict[str, Any]] = {
    ("configmaps", "settings"): {"data": {"a": "1", "b": "2"}},
    ("secrets", "keys"): {"data": {"token": base64.b64encode(b"\x00secret").decode()}},
}


class Tokens:
    """A node's API with the only method that these volumes use."""

    def __init__(self) -> None:
        self.issued = 0

    async def token(self, _pod: dict[str, Any], *, audience: str | None, expiration_seconds: int) -> str:
        self.issued += 1
        return f"{audience}:{expiration_seconds}:{self.issued}"


def volumes(folder: Path, *sources: dict[str, Any], objects: Any = None) -> PodVolumes:
    async def lookup(kind: str, name: str) -> dict[str, Any] | None:
        stored: dict[str, Any] | None = (OBJECTS if objects is None else objects).get((kind, name))
        return stored

    pod = {
        "metadata": {"name": "p", "namespace": "n", "labels": {"app": "web"}},
        "spec": {"volumes": [{"name": f"v{number}", **source} for number, source in enumerate(sources)]},
    }
    return PodVolumes(pod, folder, cast("NodeAPI", Tokens()), lookup)


def files(folder: Path) -> dict[str, bytes]:
    visible = [path for path in folder.rglob("*") if path.is_file() and path.relative_to(folder).parts[0][:2] != ".."]
    return {str(path.relative_to(folder)): path.read_bytes() for path in visible}


async def test_a_config_map_is_one_file_for_each_key(tmp_path: Path) -> None:
    setup = volumes(tmp_path, {"configMap": {"name": "settings"}})
    await setup.refresh()
    assert files(setup.paths["v0"]) == {"a": b"1", "b": b"2"}


async def test_items_choose_keys_paths_and_modes(tmp_path: Path) -> None:
    items = [{"key": "a", "path": "deep/er/x", "mode": 0o400}]
    setup = volumes(tmp_path, {"configMap": {"name": "settings", "items": items}})
    await setup.refresh()
    assert (setup.paths["v0"] / "deep/er/x").read_bytes() == b"1"
    assert (setup.paths["v0"] / "deep/er/x").stat().st_mode & 0o777 == 0o400
    assert not (setup.paths["v0"] / "b").exists()


async def test_a_secret_is_decoded_and_has_the_default_mode(tmp_path: Path) -> None:
    setup = volumes(tmp_path, {"secret": {"secretName": "keys", "defaultMode": 0o440}})
    await setup.refresh()
    assert files(setup.paths["v0"]) == {"token": b"\x00secret"}
    assert (setup.paths["v0"] / "token").stat().st_mode & 0o777 == 0o440


async def test_a_projected_volume_joins_its_sources(tmp_path: Path) -> None:
    sources = [
        {"configMap": {"name": "settings", "items": [{"key": "a", "path": "a"}]}},
        {"secret": {"name": "keys"}},
        {"downwardAPI": {"items": [{"path": "ns", "fieldRef": {"fieldPath": "metadata.namespace"}}]}},
        {"serviceAccountToken": {"path": "jwt", "audience": "api", "expirationSeconds": 900}},
    ]
    setup = volumes(tmp_path, {"projected": {"sources": sources}})
    await setup.refresh()
    assert files(setup.paths["v0"]) == {"a": b"1", "token": b"\x00secret", "ns": b"n", "jwt": b"api:900:1"}


async def test_a_token_is_kept_until_most_of_its_life_is_over(tmp_path: Path) -> None:
    projected = {"projected": {"sources": [{"serviceAccountToken": {"path": "jwt"}}]}}
    setup = volumes(tmp_path, projected)
    await setup.refresh()
    await setup.refresh()
    assert files(setup.paths["v0"]) == {"jwt": b"None:3600:1"}


async def test_a_missing_source_is_an_error_unless_it_is_optional(tmp_path: Path) -> None:
    with pytest.raises(VolumeError, match="configmap 'nope' not found"):
        await volumes(tmp_path, {"configMap": {"name": "nope"}}).refresh()
    with pytest.raises(VolumeError, match="has no key 'c'"):
        await volumes(tmp_path, {"configMap": {"name": "settings", "items": [{"key": "c", "path": "c"}]}}).refresh()
    setup = volumes(tmp_path, {"configMap": {"name": "nope", "optional": True}})
    await setup.refresh()
    assert files(setup.paths["v0"]) == {}


async def test_a_mounted_config_map_follows_its_source(tmp_path: Path) -> None:
    objects = {("configmaps", "settings"): {"data": {"a": "1", "old": "x"}}}
    setup = volumes(tmp_path, {"configMap": {"name": "settings"}}, objects=objects)
    await setup.refresh()
    objects["configmaps", "settings"] = {"data": {"a": "2", "new": "y"}}
    await setup.refresh()
    assert files(setup.paths["v0"]) == {"a": b"2", "new": b"y"}


def test_an_update_appears_all_at_once(tmp_path: Path) -> None:
    write_atomically(tmp_path, {"a": (b"1", 0o644), "b": (b"1", 0o644)})
    with (tmp_path / "..data").resolve().joinpath("b").open() as reader_of_the_old:
        write_atomically(tmp_path, {"a": (b"2", 0o644), "b": (b"2", 0o644)})
        assert reader_of_the_old.read() == "1"
    assert (tmp_path / "a").readlink() == Path("..data/a")
    assert files(tmp_path) == {"a": b"2", "b": b"2"}
    assert len(list(tmp_path.glob("..*"))) == 2, "the older generation is gone"


async def test_an_empty_dir_is_empty_and_everyone_may_write_to_it(tmp_path: Path) -> None:
    setup = volumes(tmp_path, {"emptyDir": {}})
    await setup.refresh()
    assert files(setup.paths["v0"]) == {}
    assert setup.paths["v0"].stat().st_mode & 0o777 == 0o777
