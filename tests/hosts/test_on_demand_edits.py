"""Edits of the files while models on demand share the memory, with real engines behind `pomona up`."""

import os
import signal
from pathlib import Path

from kube.resources import MODELS
from tests.support.eventually import eventually
from tests.support.on_demand_up import MODEL_BYTES, find_engines, find_pid, room_for, write_models
from tests.support.refused_manifests import make_manifest
from tests.support.up_command import Start, ask, edit, service

ALWAYS = {"minReplicas": 1}


async def test_model_whose_new_source_is_wrong_makes_room_as_before(start: Start, tmp_path: Path) -> None:
    path = write_models(tmp_path, "one", "two")
    up = start(path, room_for(1))
    url = await up.url()
    assert (await ask(url, "one"))[0] == 200
    edit(path, "/one.gguf", "/gone.gguf")
    await up.says("the last edit is not served")
    assert await ask(url, "two") == (200, "two speaks.")


async def test_request_waits_for_the_memory_of_a_model_that_was_removed(start: Start, tmp_path: Path) -> None:
    up = start(write_models(tmp_path, "one", "two"), room_for(1))
    url = await up.url()
    assert (await ask(url, "one"))[0] == 200
    os.kill(find_pid(up.state, "one"), signal.SIGSTOP)  # so that its end takes ten seconds, as a long answer may
    write_models(tmp_path, "two")
    await up.says("files changed: removed one")
    assert await ask(url, "two") == (200, "two speaks.")


async def test_model_that_was_removed_comes_back_unloaded(start: Start, tmp_path: Path) -> None:
    up = start(write_models(tmp_path, "one", "two"), room_for(2))
    url = await up.url()
    assert (await ask(url, "one"))[0] == 200
    write_models(tmp_path, "two")
    await eventually(lambda: not find_engines(up.state))
    write_models(tmp_path, "one", "two")
    await up.says("files changed: added one")
    assert (await ask(url, "two"))[0] == 200
    assert list(find_engines(up.state).values()) == ["two"]


async def test_loaded_model_that_becomes_one_on_demand_stays_loaded(start: Start, tmp_path: Path) -> None:
    path = write_models(tmp_path, "one", scaling=ALWAYS)
    up = start(path)
    url = await up.url()
    assert (await ask(url, "one"))[0] == 200
    before = find_pid(up.state, "one")
    edit(path, "minReplicas: 1", "minReplicas: 0")
    await up.says("files changed: edited one")
    assert (await ask(url, "one"))[0] == 200
    assert find_pid(up.state, "one") == before


async def test_service_that_is_always_loaded_gets_the_memory_of_models_on_demand(start: Start, tmp_path: Path) -> None:
    up = start(write_models(tmp_path, "one"), room_for(1))
    url = await up.url()
    assert (await ask(url, "one"))[0] == 200
    source = (tmp_path / "one.gguf").as_uri()
    always = make_manifest(MODELS, name="always", source=source, memoryBytes=MODEL_BYTES), service("always", "always")
    write_models(tmp_path, "one", more=always)
    await up.says("always: Ready")


async def test_edit_while_everything_is_stopped_starts_nothing(start: Start, tmp_path: Path) -> None:
    path = write_models(tmp_path, "one", "two", scaling=ALWAYS)
    up = start(path)
    await up.url()
    await up.says("two: Ready")
    await up.says("one: Ready")
    os.kill(find_pid(up.state, "one"), signal.SIGSTOP)  # so that its end takes ten seconds
    os.kill(up.process.pid, signal.SIGINT)
    await up.says("one: Stopping")
    edit(path, "/two.gguf", "/other.gguf")
    assert await up.ends() == 0
    assert find_engines(up.state) == {}
