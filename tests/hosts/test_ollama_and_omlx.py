"""Behaviour that only Ollama or only oMLX has, for models of ours on a host."""

import asyncio
from datetime import datetime
from pathlib import Path

import aiohttp
import pytest

from artifacts.repositories.address_policy import parse_network
from crds.metalprocess import Artifact
from runtimes.ollama_client import Ollama
from tests.support.api_objects import GIB
from tests.support.daemons.host_daemons import OWNERS, Served, library, ollama, omlx, restart, watch_often
from tests.support.daemons.omlx import OmlxStandIn
from tests.support.eventually import eventually
from tests.support.local_host import Machine, MakeAssignment, phase
from tests.support.ollama.library import Library
from tests.support.ollama.server import OllamaServer

__all__ = ["library", "ollama", "omlx", "watch_often"]


async def test_omlx_without_memory_is_reported_with_the_way_out(omlx: Served) -> None:
    machine, daemon, make = omlx
    assert isinstance(daemon, OmlxStandIn)
    daemon.ceiling = 1
    machine.supervisor.assign([make()])
    message = await phase(machine, "Failed", "InsufficientMemory")
    assert "does not fit under the static memory ceiling" in message
    assert "limit of 1 B" in message
    assert "--memory-guard" in message
    daemon.ceiling = GIB
    await omlx.ready()


async def test_omlx_is_not_reloaded_while_that_would_unload_its_owners_model(omlx: Served) -> None:
    machine, daemon, make = omlx
    daemon.own(OWNERS, size=GIB // 2)
    machine.supervisor.assign([make()])
    message = await phase(machine, "Failed", "OwnersModelsLoaded")
    assert OWNERS in message
    assert daemon.names() == {OWNERS}
    daemon.evict(OWNERS)
    await omlx.ready()


async def test_omlx_is_not_reloaded_while_it_answers(omlx: Served) -> None:
    machine, daemon, make = omlx
    assert isinstance(daemon, OmlxStandIn)
    daemon.active_requests = 1
    machine.supervisor.assign([make()])
    await phase(machine, "Failed", "DaemonBusy")
    daemon.active_requests = 0
    await omlx.ready()


async def test_our_omlx_models_are_pinned_with_their_context_and_released_at_the_end(omlx: Served) -> None:
    machine, daemon, make = omlx
    assert isinstance(daemon, OmlxStandIn)
    machine.supervisor.assign([make(context_length=2048)])
    model = await omlx.ready()
    assert daemon.settings[model] == {"is_pinned": True, "ttl_seconds": None, "max_context_window": 2048}
    machine.supervisor.assign([])
    await phase(machine, "Stopped")
    machine.supervisor.assign([])
    await eventually(lambda: daemon.settings[model]["is_pinned"] is False)


async def test_ollama_keeps_our_model_for_ever_with_its_context(ollama: Served) -> None:
    machine, daemon, make = ollama
    assert isinstance(daemon, OllamaServer)
    machine.supervisor.assign([make(context_length=2048)])
    await ollama.ready()
    (running,) = daemon.loaded().values()
    assert running["context_length"] == 2048
    assert datetime.fromisoformat(running["expires_at"]).year > 2100


async def test_ollama_does_not_load_the_same_weights_in_turns(ollama: Served) -> None:
    machine, daemon, make = ollama
    machine.supervisor.assign([make("u1", context_length=512)])
    first = await ollama.ready("u1")
    machine.supervisor.assign([make("u1", context_length=512), make("u2", context_length=1024)])
    assert "same contextLength" in await phase(machine, "Failed", "SameWeightsLoaded", uid="u2")
    assert daemon.names() == {first}


async def test_stopped_daemon_is_reported_with_its_start_command(ollama: Served) -> None:
    machine, daemon, make = ollama
    await daemon.stop()
    await eventually(lambda: machine.known.usable() == [])
    machine.supervisor.assign([make()])
    assert "ollama serve" in await phase(machine, "Failed", "DaemonNotUsable")
    await daemon.start()
    await ollama.ready()


async def test_a_host_without_the_daemon_rejects(machine: Machine, assignment: MakeAssignment) -> None:
    machine.daemons = lambda: [Ollama({"PATH": ""})]
    await restart(machine)
    machine.supervisor.assign([assignment(runtime="ollama", extra_args=[])])
    assert "'ollama' is not installed on this host" in await phase(machine, "Rejected", "Unsupported")


async def test_copy_into_ollamas_store_is_reported_as_progress(ollama: Served) -> None:
    machine, _, make = ollama
    machine.supervisor.assign([make()])
    await ollama.ready()
    progress = machine.runners["u1"].progress
    size = (machine.file_root / "tiny.gguf").stat().st_size
    assert progress
    assert (progress.bytes, progress.total_bytes) == (size, size)


async def test_ollama_pulls_a_library_model_under_our_name_alone(ollama: Served, library: Library) -> None:
    machine, daemon, make = ollama
    assert isinstance(daemon, OllamaServer)
    weights = (machine.file_root / "tiny.gguf").read_bytes()
    library.add("qwen3:8b", weights)
    of_library = Artifact(source="ollama://qwen3:8b")
    machine.supervisor.assign([make(artifact=of_library, memory_bytes=GIB)])
    model = await ollama.ready()
    progress = machine.runners["u1"].progress
    assert progress
    assert (progress.bytes, progress.total_bytes) == (len(weights), len(weights))
    assert daemon.stored() == {model}
    machine.supervisor.assign([])
    await phase(machine, "Stopped")
    machine.supervisor.assign([])
    await eventually(lambda: daemon.blobs() == set())


@pytest.mark.parametrize("registry", ["127.0.0.1", "127.1", "localhost", "10.0.0.1"])
async def test_ollama_is_not_led_to_a_private_address(ollama: Served, registry: str) -> None:
    machine, daemon, make = ollama
    source = f"ollama://{registry}/library/qwen3:8b"
    machine.supervisor.assign([make(artifact=Artifact(source=source), memory_bytes=GIB)])
    assert "--allow-private-sources" in await phase(machine, "Failed", "SourceForbidden")
    assert ("POST", "/api/pull") not in daemon.asked


async def test_ollama_pulls_from_a_private_address_that_is_allowed(ollama: Served) -> None:
    machine, daemon, make = ollama
    machine.daemons = lambda: [Ollama({"OLLAMA_HOST": daemon.url}, (parse_network("127.0.0.0/8"),))]
    await restart(machine)
    source = "ollama://127.0.0.77/library/qwen3:8b"
    machine.supervisor.assign([make(artifact=Artifact(source=source), memory_bytes=GIB)])
    assert 'Get "https://127.0.0.77/v2/library/qwen3' in await phase(machine, "Failed", "DaemonRefused")


@pytest.mark.parametrize("source", ["qwen3:8b", "library/qwen3:8b", "registry.ollama.ai/library/Qwen3:8B"])
async def test_model_that_the_owner_has_pulled_is_not_removed(ollama: Served, source: str) -> None:
    machine, daemon, make = ollama
    assert isinstance(daemon, OllamaServer)
    daemon.own("qwen3:8b")
    of_library = make(artifact=Artifact(source=f"ollama://{source}"), memory_bytes=GIB, context_length=1024)
    machine.supervisor.assign([of_library])
    assert "ollama stop qwen3:8b" in await phase(machine, "Failed", "OwnersModelLoaded")
    assert daemon.names() == {"qwen3:8b"}
    daemon.evict("qwen3:8b")
    model = await ollama.ready()
    assert ("POST", "/api/pull") not in daemon.asked
    machine.supervisor.assign([])
    await phase(machine, "Stopped")
    machine.supervisor.assign([])
    await eventually(lambda: model not in daemon.stored())
    assert daemon.stored() == {"qwen3:8b"}


async def test_model_and_its_base_do_not_evict_each_other_in_turn_after_a_restart(ollama: Served) -> None:
    machine, daemon, make = ollama
    assert isinstance(daemon, OllamaServer)
    daemon.add("qwen3:8b")
    artifact = Artifact(source="ollama://qwen3:8b")
    machine.supervisor.assign([make(artifact=artifact, memory_bytes=GIB, context_length=1024)])
    await ollama.ready()
    await restart(machine)
    assert machine.runners["u1"].state.phase == "Ready", "adopted: this agent did not create the model"
    daemon.ask("POST", "/api/generate", {"model": "qwen3:8b"})
    assert "ollama stop qwen3:8b" in await phase(machine, "Failed", "OwnersModelLoaded")
    assert daemon.names() == {"qwen3:8b"}


async def test_weights_that_two_names_share_are_loaded_once_and_stay_for_both(ollama: Served, library: Library) -> None:
    """A file and a model of the library have the same content: /api/ps lists one of the two names."""
    machine, daemon, make = ollama
    assert isinstance(daemon, OllamaServer)
    library.add("tiny:1b", (machine.file_root / "tiny.gguf").read_bytes())
    other = make("u2", model_name="other", artifact=Artifact(source="ollama://tiny:1b"))
    machine.supervisor.assign([make("u1")])
    first = await ollama.ready("u1")
    machine.supervisor.assign([make("u1"), other])
    second = await ollama.ready("u2")
    assert first != second
    assert daemon.names() == {first}
    asked = daemon.changes()
    looks = len(daemon.asked)
    await eventually(lambda: len(daemon.asked) > looks + 5)
    assert daemon.changes() == asked
    assert sum(model.ours for model in machine.known.list_loaded()) == 1
    await restart(machine)
    assert {uid: runner.state.phase for uid, runner in machine.runners.items()} == {"u1": "Ready", "u2": "Ready"}
    machine.supervisor.assign([other])
    await phase(machine, "Stopped", uid="u1")
    looks = len(daemon.asked)
    await eventually(lambda: len(daemon.asked) > looks + 5)
    assert daemon.changes() == asked, "neither unloaded nor deleted: the other one is listed by its name"
    assert {phase for uid, phase in machine.changes if uid == "u2"} <= {"Ready"}
    machine.supervisor.assign([])
    await phase(machine, "Stopped", uid="u2")
    machine.supervisor.assign([])
    await eventually(lambda: daemon.stored() == set())
    assert daemon.names() == set()


async def test_weights_in_memory_under_the_name_of_a_deleted_model_are_loaded_once_more(ollama: Served) -> None:
    machine, daemon, make = ollama
    assert isinstance(daemon, OllamaServer)
    daemon.own(OWNERS, machine.file_root / "tiny.gguf", num_ctx=512)
    daemon.delete(OWNERS)
    machine.supervisor.assign([make()])
    model = await ollama.ready()
    assert daemon.names() == {model}


async def test_name_missing_in_ollamas_library_is_reported(ollama: Served) -> None:
    machine, _, make = ollama
    machine.supervisor.assign([make(artifact=Artifact(source="ollama://nobody/none:1b"), memory_bytes=GIB)])
    assert "file does not exist" in await phase(machine, "Failed", "DaemonRefused")


async def test_two_agents_leave_each_others_models_alone(ollama: Served, tmp_path: Path) -> None:
    machine, daemon, make = ollama
    machine.supervisor.assign([make()])
    model = await ollama.ready()
    async with aiohttp.ClientSession() as session:
        second = Machine(tmp_path / "second", machine.file_root, session)
        second.daemons = machine.daemons
        await second.start()
        second.supervisor.assign([])
        await eventually(lambda: second.known.usable() == ["ollama"])
        await asyncio.wait_for(second.known.remove_unwanted(list), 60)
        await second.stop()
    assert daemon.names() == {model}
