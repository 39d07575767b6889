"""A pod's volumes as folders of the host: their content, their paths, and their updates.

Files of ConfigMaps, Secrets, the downward API and tokens are written as a kubelet writes them: into a new folder, to
which the link `..data` is then switched by one rename, so that a reader never sees a partial update.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kube.resources import PVCS
from tests.controlplane.kubelet.api import PERSISTENT_VOLUMES, NodeAPI
from tests.controlplane.kubelet.environment import Lookup, data, field

Obj = dict[str, Any]
Files = dict[str, tuple[bytes, int]]
"""Relative path to (content, mode)."""

TOKEN_SECONDS = 3600
# A token is replaced after this part of its lifetime.
TOKEN_RENEWAL = 0.8


class VolumeError(Exception):
    """A volume cannot be set up now (its source is missing or not bound); it may be later."""


class PodVolumes:
    """The volumes of one pod below `folder`."""

    def __init__(self, pod: Obj, folder: Path, api: NodeAPI, lookup: Lookup) -> None:
        self.pod = pod
        self.paths: dict[str, Path] = {}
        self.addresses: Mapping[str, str] = {}
        self._folder = folder
        self._api = api
        self._lookup = lookup
        self._written: dict[str, Files] = {}
        self._tokens: dict[tuple[str | None, int], tuple[bytes, float]] = {}  # token, monotonic time of its renewal

    async def refresh(self) -> None:
        """Set up all volumes, or update those that have a source.

        Raises VolumeError, ApiError, Unreachable; may be called again after any of them.
        """
        for volume in self.pod["spec"].get("volumes", []):
            name = volume["name"]
            if "persistentVolumeClaim" in volume:
                self.paths[name] = await self._claim(volume["persistentVolumeClaim"]["claimName"])
            elif "hostPath" in volume:
                self.paths[name] = _host_path(volume["hostPath"])
            else:
                self.paths[name] = self._folder / name
                self.paths[name].mkdir(parents=True, exist_ok=True)
                if "emptyDir" in volume:
                    self.paths[name].chmod(0o1777)
                    continue
                files = await self._files(volume)
                if files != self._written.get(name):
                    write_atomically(self.paths[name], files)
                    self._written[name] = files

    async def _claim(self, name: str) -> Path:
        claim = await self._api.client.get(PVCS, name, self.pod["metadata"]["namespace"])
        volume_name = claim["spec"].get("volumeName")
        if not volume_name:
            raise VolumeError(f"PersistentVolumeClaim {name} is not bound")
        spec = (await self._api.client.get(PERSISTENT_VOLUMES, volume_name))["spec"]
        source = spec.get("hostPath") or spec.get("local")
        if source is None:
            raise VolumeError(
                f"PersistentVolume {volume_name}: only hostPath and local volumes are folders of this host"
            )
        return _host_path({"path": source["path"], "type": "DirectoryOrCreate"})

    async def _files(self, volume: Obj) -> Files:
        """Return path -> (content, mode) of a volume that is made of API objects."""
        if "projected" not in volume:
            (kind,) = (key for key in volume if key != "name")
            return await self._source(kind, volume[kind], volume[kind].get("defaultMode", 0o644))
        mode = volume["projected"].get("defaultMode", 0o644)
        files: Files = {}
        for projection in volume["projected"].get("sources", []):
            for kind, source in projection.items():
                files |= await self._source(kind, source, mode)
        return files

    async def _source(self, kind: str, source: Obj, mode: int) -> Files:
        match kind:
            case "configMap":
                return await self._keys("configmaps", source["name"], source, mode)
            case "secret":
                return await self._keys("secrets", source.get("secretName") or source["name"], source, mode)
            case "downwardAPI":
                return {item["path"]: (self._field(item), item.get("mode", mode)) for item in source.get("items", [])}
            case "serviceAccountToken":
                return {source["path"]: (await self._token(source), mode)}
        raise VolumeError(f"a volume source of type {kind} is not supported by the process kubelet")

    async def _keys(self, kind: str, name: str, source: Obj, mode: int) -> Files:
        stored = await self._lookup(kind, name)
        if stored is None:
            if source.get("optional"):
                return {}
            raise VolumeError(f"{kind[:-1]} {name!r} not found")
        values = data(kind, stored)
        if "items" not in source:
            return {key: (value, mode) for key, value in values.items()}
        missing = [item["key"] for item in source["items"] if item["key"] not in values]
        if missing and not source.get("optional"):
            raise VolumeError(f"{kind[:-1]} {name!r} has no key {missing[0]!r}")
        return {
            item["path"]: (values[item["key"]], item.get("mode", mode))
            for item in source["items"]
            if item["key"] in values
        }

    def _field(self, item: Obj) -> bytes:
        return field(self.pod, item["fieldRef"]["fieldPath"], self.addresses).encode()

    async def _token(self, source: Obj) -> bytes:
        audience, seconds = source.get("audience"), source.get("expirationSeconds", TOKEN_SECONDS)
        token, renewal = self._tokens.get((audience, seconds), (b"", 0.0))
        if time.monotonic() >= renewal:
            token = (await self._api.token(self.pod, audience=audience, expiration_seconds=seconds)).encode()
            self._tokens[audience, seconds] = token, time.monotonic() + seconds * TOKEN_RENEWAL
        return token


def write_atomically(folder: Path, files: Files) -> None:
    """Replace the content of `folder` by `files` (path to content and mode) in one step."""
    link = folder / "..data"
    old = link.resolve() if link.is_symlink() else None
    generation = Path(tempfile.mkdtemp(prefix="..", dir=folder))
    generation.chmod(0o755)
    for name, (content, mode) in files.items():
        path = generation / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        path.chmod(mode)
    fresh = folder / "..data_tmp"
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(generation.name)
    fresh.replace(link)
    names = {Path(name).parts[0] for name in files}
    for entry in list(folder.iterdir()):
        if not entry.name.startswith("..") and entry.name not in names:
            entry.unlink()
    for name in names:
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(Path("..data") / name)
    if old is not None:
        shutil.rmtree(old)


def _host_path(source: Obj) -> Path:
    path, kind = Path(source["path"]), source.get("type", "")
    if kind == "DirectoryOrCreate":
        path.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        raise VolumeError(f"hostPath {path} is not a path of this host")
    return path
