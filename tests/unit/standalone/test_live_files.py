"""The watch over files, the change that is reported, and names that two sources of manifests share."""

import asyncio
import contextlib
import ctypes
import os
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from crds.inferenceservice import InferenceService
from crds.model import Model
from kube.client import Obj
from kube.resources import INFERENCE_SERVICES, MODELS, ObjectKey
from standalone.live_files import LiveFiles, check_names, describe_change, merge_manifests
from standalone.manifests import ManifestError, Manifests, accept_manifest, load_manifests
from tests.support.eventually import eventually
from tests.support.on_demand_up import write_models
from tests.support.refused_manifests import make_manifest


def manifests(**contexts: int) -> Manifests:
    """Return services of one Model each, by their names, with a context length."""
    models: list[Obj] = [make_manifest(MODELS, name=name, source="hf://o/r/m.gguf") for name in contexts]
    services = [
        make_manifest(INFERENCE_SERVICES, name=name, modelRef=name, contextLength=length)
        for name, length in contexts.items()
    ]
    return Manifests(
        {ObjectKey("default", model["metadata"]["name"]): accept_manifest(model, Model) for model in models},
        {
            ObjectKey("default", service["metadata"]["name"]): accept_manifest(service, InferenceService)
            for service in services
        },
    )


@pytest.mark.parametrize(
    ("before", "after", "change"),
    [
        (manifests(a=512), manifests(a=512), ""),
        (manifests(a=512), manifests(a=512, b=512, c=512), "added b, c"),
        (manifests(a=512, b=512), manifests(a=1024), "edited a, removed b"),
    ],
)
def test_change_names_the_services(before: Manifests, after: Manifests, change: str) -> None:
    assert describe_change(before, after) == change


def test_service_is_edited_with_its_model() -> None:
    before, after = manifests(a=512, b=512), manifests(a=512, b=512)
    key = ObjectKey("default", "a")
    after.models[key] = accept_manifest(make_manifest(MODELS, name="a", source="hf://o/r/other.gguf"), Model)
    assert describe_change(before, after) == "edited a"


def test_name_of_a_source_is_refused_in_a_file() -> None:
    check_names(manifests(a=512), manifests(b=512))
    with pytest.raises(ManifestError, match="InferenceService a: the name is taken by a source of --model"):
        check_names(manifests(a=512), manifests(a=512))


def test_names_of_the_files_and_of_models_win_over_those_that_were_added() -> None:
    merged = merge_manifests(manifests(a=512), manifests(b=512), manifests(a=128, b=128, c=128))
    lengths = {key.name: service.spec.context_length for key, service in merged.services.items()}
    assert lengths == {"a": 512, "b": 512, "c": 128}


@contextlib.asynccontextmanager
async def watched(path: Path) -> AsyncIterator[list[str]]:
    """Yield a list that gets the reported lines, while the files of a path are watched."""
    reported: list[str] = []
    found, none = load_manifests([path]), Manifests()
    files = LiveFiles([path], found, none, none, served=found, replace=lambda _: None, report=reported.append)
    running = asyncio.create_task(files.run())
    yield reported
    assert not running.done(), running.exception()
    running.cancel()


@pytest.mark.parametrize("is_renamed", [True, False])
async def test_folder_that_was_replaced_is_watched(tmp_path: Path, is_renamed: bool) -> None:
    folder, old = tmp_path / "manifests", tmp_path / "old"
    folder.mkdir()
    (tmp_path / "models").mkdir()
    shutil.copy(write_models(tmp_path / "models", "one"), folder / "one.yaml")
    async with watched(folder) as reported:
        shutil.copy(write_models(tmp_path / "models", "two"), folder / "two.yaml")
        await eventually(lambda: reported == ["files changed: added two"])  # the watch has begun

        if is_renamed:
            folder.rename(old)
        else:
            shutil.copytree(folder, old)
            shutil.rmtree(folder)
        shutil.copytree(old, folder)
        (folder / "two.yaml").unlink()
        await eventually(lambda: reported[-1] == "files changed: removed two")
        shutil.copy(old / "two.yaml", folder)
        await eventually(lambda: reported[-1] == "files changed: added two")


@pytest.fixture
def no_inotify() -> Iterator[None]:
    """Take all inotify instances of this user: 128 by default, which editors and desktops use, too."""
    libc, taken = ctypes.CDLL(None), list[int]()
    while len(taken) < 100_000 and (descriptor := libc.inotify_init1(os.O_CLOEXEC)) >= 0:
        taken.append(descriptor)
    yield
    for descriptor in taken:
        os.close(descriptor)


@pytest.mark.usefixtures("no_inotify")
async def test_files_are_followed_when_the_system_watches_no_more(tmp_path: Path) -> None:
    path = Path(write_models(tmp_path, "one"))
    async with watched(path) as reported:
        write_models(tmp_path, "one", "two")
        await eventually(lambda: reported == ["files changed: added two"])


async def test_pipe_in_a_folder_holds_nothing_up(tmp_path: Path) -> None:
    write_models(tmp_path, "one")
    os.mkfifo(tmp_path / "pipe.yaml")
    async with watched(tmp_path) as reported:
        write_models(tmp_path, "one", "two")
        await eventually(lambda: reported == ["files changed: added two"])


def test_folder_that_cannot_be_listed_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path) -> list[Path]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(ManifestError, match=f"{tmp_path}: Permission denied"):
        load_manifests([tmp_path])
