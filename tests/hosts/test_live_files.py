"""Edits of the files that a running `pomona up` serves, with real engines."""

import asyncio
import shutil
from pathlib import Path

import pytest

from kube.resources import MODELS
from tests.support.eventually import eventually
from tests.support.on_demand_up import MODEL_BYTES, find_engines, find_pid, room_for, write_models
from tests.support.refused_manifests import make_manifest
from tests.support.up_command import Start, ask, service


async def becomes(url: str, name: str, text: str) -> None:
    """Wait until a model gives this answer."""

    async def is_answered() -> bool:
        return await ask(url, name) == (200, text)

    await eventually(is_answered)


async def test_models_are_added_edited_and_removed_and_others_notice_nothing(start: Start, tmp_path: Path) -> None:
    up = start(write_models(tmp_path, "one", "two", scaling={"minReplicas": 1}), room_for(4))
    url = await up.url()
    await becomes(url, "one", "one speaks.")
    await becomes(url, "two", "two speaks.")
    before = find_pid(up.state, "one")

    write_models(tmp_path, "one", "two", "three", scaling={"minReplicas": 1})
    await up.says("files changed: added three")
    await becomes(url, "three", "three speaks.")

    source = (tmp_path / "two.gguf").as_uri()
    more = (
        make_manifest(MODELS, name="three", source=source, memoryBytes=MODEL_BYTES),
        service("three", "three", scaling={"minReplicas": 1}),
    )
    write_models(tmp_path, "one", "two", more=more, scaling={"minReplicas": 1})
    await up.says("files changed: edited three")
    await becomes(url, "three", "two speaks.")

    write_models(tmp_path, "one", scaling={"minReplicas": 1})
    await up.says("files changed: removed three, two")
    await eventually(lambda: sorted(find_engines(up.state).values()) == ["one"])
    assert (await ask(url, "two"))[0] == 404
    assert find_pid(up.state, "one") == before


@pytest.mark.parametrize("room", [1, 2])
async def test_requests_during_an_edit_are_all_answered(start: Start, tmp_path: Path, room: int) -> None:
    up = start(write_models(tmp_path, "one", scaling={"minReplicas": 1}), room_for(room))
    url = await up.url()
    await becomes(url, "one", "one speaks.")
    before, answers = find_pid(up.state, "one"), []

    async def keep_asking() -> None:
        while True:
            answers.append(await ask(url, "one"))

    asking = asyncio.create_task(keep_asking())
    write_models(tmp_path, "one", contextLength=1024, scaling={"minReplicas": 1})
    await up.says("files changed: edited one")
    await eventually(lambda: set(find_engines(up.state).values()) == {"one"} and before not in find_engines(up.state))
    count = len(answers)
    await eventually(lambda: len(answers) > count + 3)
    asking.cancel()
    assert set(answers) == {(200, "one speaks.")}


def edit(path: Path, old: str, new: str) -> None:
    """Replace a text in a file."""
    path.write_text(path.read_text().replace(old, new))


async def test_errors_in_a_file_are_shown_with_their_line_and_what_was_served_serves_on(
    start: Start, tmp_path: Path
) -> None:
    path = Path(write_models(tmp_path, "one"))
    up = start(str(path))
    url = await up.url()
    await becomes(url, "one", "one speaks.")

    edit(path, "contextLength: 512", "contextLength: many")
    await up.says("InferenceService one: spec.contextLength")
    await up.says("the files have errors: what was served before serves on")
    assert await ask(url, "one") == (200, "one speaks.")

    edit(path, "contextLength: many", "contextLength: 1024")
    await up.says("files changed: edited one")
    await becomes(url, "one", "one speaks.")


async def test_model_whose_new_source_is_wrong_serves_on_as_before(start: Start, tmp_path: Path) -> None:
    path = Path(write_models(tmp_path, "one", scaling={"minReplicas": 1}))
    up = start(str(path))
    url = await up.url()
    await becomes(url, "one", "one speaks.")
    before = find_pid(up.state, "one")
    edit(path, "/one.gguf", "/gone.gguf")
    await up.says("one: Ready - the last edit is not served: ")
    assert await ask(url, "one") == (200, "one speaks.")
    assert find_pid(up.state, "one") == before


async def test_file_that_is_put_into_a_folder_is_served(
    start: Start, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("served")
    shutil.move(write_models(tmp_path, "one"), folder / "one.yaml")
    up = start(str(folder))
    url = await up.url()
    await becomes(url, "one", "one speaks.")
    shutil.move(write_models(tmp_path, "two"), folder / "two.yaml")
    await becomes(url, "two", "two speaks.")


async def test_edit_just_after_the_files_were_read_is_served(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "manifests" / "models.yaml"  # in a folder in which nothing else changes
    path.parent.mkdir()
    shutil.copy(write_models(tmp_path, "one"), path)
    up = start(str(path))
    both = write_models(tmp_path, "one", "two")
    up.process.start()
    await eventually((up.state / "up.log").exists)  # made after the files were read
    shutil.copy(both, path)
    await up.says("two: Idle")
