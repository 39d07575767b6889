"""Models of ours in daemons that the owner of a host runs: their whole life, and that nobody else's is touched."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import NamedTuple

import aiohttp
import pytest

from crds.metalprocess import Artifact
from metal_agent import daemons
from metal_agent.assignments import Assignment
from metal_agent.exposure import Place, proxy_config
from runtimes import ollama as ollama_runtime
from runtimes import omlx as omlx_runtime
from runtimes.ollama import Ollama
from runtimes.omlx import Omlx
from runtimes.probe import generate_token
from tests import tiny_mlx
from tests.daemons.ollama import OllamaStandIn
from tests.daemons.omlx import OmlxStandIn
from tests.eventually import eventually
from tests.machine import Machine, MakeAssignment, phase
from tests.serving import GIB
from tests.web import FileServer

KEY = "sk-owner-secret"
OWNERS = "owners-own"


class Served(NamedTuple):
    """A host with a daemon, and how its processes are made."""

    machine: Machine
    daemon: OllamaStandIn | OmlxStandIn
    make: Callable[..., Assignment]

    async def ready(self, uid: str = "u1") -> str:
        """Wait until the process is Ready; returns what its model is called in the daemon."""
        runner = self.machine.runners[uid]
        await eventually(lambda: runner.state.phase == "Ready")
        assert runner.model
        return runner.model

    def ours(self) -> set[str]:
        """Names of ours that are in the daemon's memory."""
        return {name for name in self.daemon.names() if name.startswith("pomona-")}


@pytest.fixture(autouse=True)
def _watch_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemons, "WATCH_SECONDS", 0.05)
    monkeypatch.setattr(daemons, "IDLE_SECONDS", 0.1)


@pytest.fixture
async def ollama(machine: Machine, assignment: MakeAssignment, unused_tcp_port: int) -> AsyncIterator[Served]:
    async with OllamaStandIn(unused_tcp_port) as daemon:
        machine.daemons = lambda: [Ollama({"OLLAMA_HOST": daemon.url})]
        await restart(machine)

        def make(uid: str = "u1", **changes: object) -> Assignment:
            return assignment(uid, **({"runtime": "ollama", "extra_args": []} | changes))

        yield Served(machine, daemon, make)
        await machine.stop()


@pytest.fixture
async def omlx(
    machine: Machine,
    assignment: MakeAssignment,
    unused_tcp_port: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Served]:
    base = tmp_path / "omlx"
    for repo in ("tiny", "other"):
        tiny_mlx.write(tmp_path / "hub" / "pomona" / repo)
    async with OmlxStandIn(unused_tcp_port, base, KEY) as daemon, FileServer(tmp_path / "hub") as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        machine.daemons = lambda: [Omlx({"OMLX_BASE_PATH": str(base), "OMLX_PORT": str(unused_tcp_port)})]
        await restart(machine)

        def make(uid: str = "u1", repo: str = "tiny", **changes: object) -> Assignment:
            of_mlx = {"runtime": "omlx", "extra_args": [], "artifact": Artifact(source=f"hf://pomona/{repo}")}
            return assignment(uid, **(of_mlx | {"model_name": repo, "memory_bytes": GIB} | changes))

        yield Served(machine, daemon, make)
        await machine.stop()


@pytest.fixture(params=["ollama", "omlx"])
def served(request: pytest.FixtureRequest) -> Served:
    found: Served = request.getfixturevalue(request.param)
    return found


async def restart(machine: Machine) -> None:
    await machine.stop()
    await machine.start()


async def test_a_model_is_brought_loaded_asked_and_taken_out_again(served: Served) -> None:
    machine, daemon, _ = served
    daemon.own(OWNERS, size=GIB)
    if isinstance(daemon, OmlxStandIn):
        daemon.evict(OWNERS)  # or oMLX could not be told to look for ours
    machine.supervisor.assign([served.make()])
    model = await served.ready()
    runner = machine.runners["u1"]
    assert runner.url == daemon.url
    assert runner.status(18000).pid is None
    async with aiohttp.ClientSession() as session:
        found = await generate_token(session, daemon.url, model=model, token=runner.api_key, timeout_seconds=10)
    assert found.ok
    assert machine.ledger.reserved.keys() == {"u1"}

    machine.supervisor.assign([])
    await phase(machine, "Stopped")
    assert [call for call, _ in machine.exposure.calls] == ["withdraw", "drain"]
    assert served.ours() == set()
    machine.supervisor.assign([])
    await eventually(lambda: not remains(served))
    assert remains(served, "owners") == {OWNERS}
    assert machine.ledger.reserved == {}


def remains(served: Served, prefix: str = "pomona-") -> set[str]:
    """What is in the daemon's store."""
    daemon = served.daemon
    names = set(daemon.stored) if isinstance(daemon, OllamaStandIn) else {path.name for path in daemon.models.iterdir()}
    return {name for name in names if name.startswith(prefix)}


async def test_what_the_owner_loaded_is_counted_and_stays(served: Served) -> None:
    machine, daemon, make = served
    machine.supervisor.assign([make()])
    await served.ready()
    daemon.own(OWNERS, size=3 * GIB)

    def counted() -> bool:
        found = machine.known.loaded()
        return {(each.memory_bytes, each.ours) for each in found if each.name == OWNERS} == {(3 * GIB, False)}

    await eventually(counted)
    (ours,) = [each for each in machine.known.loaded() if each.ours]
    assert ours.memory_bytes
    machine.supervisor.assign([])
    await phase(machine, "Stopped")
    await machine.stop()
    assert daemon.names() == {OWNERS}
    assert not [path for method, path in daemon.changes() if OWNERS in path]


async def test_the_proxy_is_told_what_the_daemon_calls_it_and_no_status_has_the_key(
    omlx: Served, capfd: pytest.CaptureFixture[str]
) -> None:
    machine, daemon, make = omlx
    assert isinstance(daemon, OmlxStandIn)
    machine.supervisor.assign([make()])
    model = await omlx.ready()
    runner = machine.runners["u1"]
    config = proxy_config("10.77.1.1", {("team-a", "chat"): [runner]}, {("team-a", "chat"): Place(18000, "token")})
    (backend,) = config.services[0].backends
    assert (backend.url, backend.model, backend.api_key) == (daemon.url, model, KEY)
    daemon.api_key = "another"
    assert "OMLX_API_KEY" in await phase(machine, "Failed", "DaemonUnauthorized")
    record = (machine.folder / "processes").glob("*")
    seen = [repr(config), repr(runner.status(1)), *(path.read_text() for path in record), *capfd.readouterr()]
    assert not [text for text in seen if KEY in text]
    daemon.api_key = KEY
    assert await omlx.ready() == model


async def test_two_models_live_in_one_daemon_and_go_alone(served: Served) -> None:
    machine, daemon, make = served
    other = {"repo": "other"} if isinstance(daemon, OmlxStandIn) else {"artifact": gguf(machine, "other.gguf")}
    machine.supervisor.assign([make("u1"), make("u2", **other)])
    first, second = await served.ready("u1"), await served.ready("u2")
    await eventually(lambda: served.ours() == {first, second})
    machine.supervisor.assign([make("u2", **other)])
    await phase(machine, "Stopped", uid="u1")
    assert served.ours() == {second}
    assert machine.runners["u2"].state.phase == "Ready"


def gguf(machine: Machine, name: str) -> Artifact:
    """Another model beside the tiny one."""
    path = machine.file_root / name
    path.write_bytes((machine.file_root / "tiny.gguf").read_bytes() + name.encode())
    return Artifact(source=f"file://{path}")


async def test_replicas_of_the_same_share_one_model_until_the_last_is_gone(served: Served) -> None:
    machine, _, make = served
    machine.supervisor.assign([make("u1"), make("u2")])
    model = await served.ready("u1")
    assert await served.ready("u2") == model
    machine.supervisor.assign([make("u2")])
    await phase(machine, "Stopped", uid="u1")
    assert served.ours() == {model}
    machine.supervisor.assign([])
    await phase(machine, "Stopped", uid="u2")
    assert served.ours() == set()


async def test_a_daemon_that_dies_takes_the_endpoint_away_and_brings_it_back(served: Served) -> None:
    machine, daemon, make = served
    machine.supervisor.assign([make()])
    model = await served.ready()
    assert machine.known.usable() == [daemon_name(daemon)]
    await daemon.stop()
    assert "start it with" in await phase(machine, "Failed", "DaemonNotRunning")
    assert machine.runners["u1"].url is None
    await eventually(lambda: machine.known.usable() == [])
    await daemon.start()
    assert await served.ready() == model
    assert machine.runners["u1"].status(None).restarts


def daemon_name(daemon: OllamaStandIn | OmlxStandIn) -> str:
    return "ollama" if isinstance(daemon, OllamaStandIn) else "omlx"


async def test_the_death_of_a_daemon_is_heard_of_without_looking(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemons, "WATCH_SECONDS", 3600.0)
    machine, daemon, make = served
    machine.supervisor.assign([make()])
    await served.ready()
    looks = len(daemon.asked)
    await daemon.stop()
    await phase(machine, "Failed", "DaemonNotRunning")
    assert len(daemon.asked) == looks


async def test_a_daemon_that_hangs_serves_nobody_and_one_that_is_slow_still_does(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    for runtime in (ollama_runtime, omlx_runtime):
        monkeypatch.setattr(runtime, "_LOOK", aiohttp.ClientTimeout(total=0.1))
    machine, daemon, make = served
    machine.supervisor.assign([make()])
    model = await served.ready()
    daemon.answering.clear()
    looks = len(daemon.asked)
    await eventually(lambda: len(daemon.asked) >= looks + 2)
    assert machine.runners["u1"].state.phase == "Ready"
    await phase(machine, "Failed", "DaemonSilent")
    assert len(daemon.asked) >= looks + daemons.SILENT_LOOKS
    daemon.answering.set()
    assert await served.ready() == model


async def test_a_model_that_the_daemon_evicts_is_loaded_again(served: Served) -> None:
    machine, daemon, make = served
    machine.supervisor.assign([make()])
    model = await served.ready()
    daemon.evict(model)
    assert "loaded no more" in await phase(machine, "Failed", "Unloaded")
    assert await served.ready() == model


async def test_a_model_that_somebody_deleted_is_brought_again(ollama: Served) -> None:
    machine, daemon, make = ollama
    assert isinstance(daemon, OllamaStandIn)
    machine.supervisor.assign([make()])
    model = await ollama.ready()
    del daemon.stored[model]
    daemon.evict(model)
    await phase(machine, "Failed", "ModelMissing")
    assert await ollama.ready() == model


async def test_the_next_agent_adopts_what_is_loaded_and_loads_nothing(served: Served) -> None:
    machine, daemon, make = served
    machine.supervisor.assign([make()])
    model = await served.ready()
    await machine.stop()
    assert served.ours() == {model}
    before = daemon.changes()
    await machine.start()
    assert machine.runners["u1"].state.phase == "Ready"
    machine.supervisor.assign([make()])
    assert await served.ready() == model
    assert {change for change in machine.changes if change[1] != "Ready"} == set(), "it never stopped being Ready"
    assert daemon.changes() == before
    assert machine.ledger.reserved.keys() == {"u1"}


async def test_the_next_agent_adopts_all_that_one_model_serves(served: Served) -> None:
    machine, daemon, make = served
    machine.supervisor.assign([make("u1"), make("u2")])
    assert await served.ready("u1") == await served.ready("u2")
    await machine.stop()
    before = daemon.changes()
    await machine.start()
    assert {uid: runner.state.phase for uid, runner in machine.runners.items()} == {"u1": "Ready", "u2": "Ready"}
    assert daemon.changes() == before


async def test_an_agent_that_comes_back_after_its_model_left_loads_it_anew(served: Served) -> None:
    machine, daemon, make = served
    machine.supervisor.assign([make()])
    model = await served.ready()
    await machine.stop()
    daemon.evict(model)
    await machine.start()
    assert machine.runners == {}
    machine.supervisor.assign([make()])
    assert await served.ready() == model


async def test_what_an_agent_left_without_a_record_is_removed_and_nothing_else(served: Served) -> None:
    machine, daemon, make = served
    machine.supervisor.assign([make()])
    model = await served.ready()
    await machine.stop()
    (machine.folder / "processes" / "u1.json").unlink()
    anothers = "pomona-0badcafe/tiny:1-1" if isinstance(daemon, OllamaStandIn) else "pomona-0badcafe-tiny-1-1"
    daemon.own(anothers, size=GIB)
    await machine.start()
    machine.supervisor.assign([])
    await eventually(lambda: model not in daemon.names() | remains(served))
    assert anothers in daemon.names()
    assert anothers in remains(served)


async def test_a_deletion_while_it_loads_ends_it(served: Served) -> None:
    machine, daemon, make = served
    daemon.loading.clear()
    machine.supervisor.assign([make()])
    await eventually(lambda: machine.runners["u1"].state.exists)
    machine.supervisor.assign([])
    await phase(machine, "Stopped")
    daemon.loading.set()
    assert served.ours() == set()


async def test_a_daemon_that_is_slow_to_unload_keeps_its_memory_reserved(ollama: Served) -> None:
    machine, daemon, make = ollama
    assert isinstance(daemon, OllamaStandIn)
    machine.supervisor.assign([make()])
    model = await ollama.ready()
    daemon.unloads = False
    machine.supervisor.assign([])
    await eventually(lambda: daemon.changes()[-1] == ("POST", "/api/generate"))
    await phase(machine, "Stopping")
    assert machine.ledger.reserved.keys() == {"u1"}
    daemon.evict(model)
    await phase(machine, "Stopped")
    assert machine.ledger.reserved == {}


async def test_omlx_without_memory_says_what_helps(omlx: Served) -> None:
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


async def test_omlx_is_not_told_to_reload_while_that_would_unload_its_owners_model(omlx: Served) -> None:
    machine, daemon, make = omlx
    daemon.own(OWNERS, size=GIB // 2)
    machine.supervisor.assign([make()])
    message = await phase(machine, "Failed", "OwnersModelsLoaded")
    assert OWNERS in message
    assert daemon.names() == {OWNERS}
    daemon.evict(OWNERS)
    await omlx.ready()


async def test_omlx_is_not_told_to_reload_while_it_answers(omlx: Served) -> None:
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
    assert isinstance(daemon, OllamaStandIn)
    machine.supervisor.assign([make(context_length=2048)])
    await ollama.ready()
    (running,) = daemon.running.values()
    assert (running.context_length, running.stays) == (2048, True)


async def test_ollama_does_not_load_the_same_weights_in_turns(ollama: Served) -> None:
    machine, daemon, make = ollama
    machine.supervisor.assign([make("u1", context_length=512)])
    first = await ollama.ready("u1")
    machine.supervisor.assign([make("u1", context_length=512), make("u2", context_length=1024)])
    assert "same contextLength" in await phase(machine, "Failed", "SameWeightsLoaded", uid="u2")
    assert daemon.names() == {first}


async def test_a_host_whose_daemon_does_not_run_says_how_to_start_it(ollama: Served) -> None:
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


async def test_copying_into_ollamas_store_is_told(ollama: Served) -> None:
    machine, _, make = ollama
    machine.supervisor.assign([make()])
    await ollama.ready()
    progress = machine.runners["u1"].progress
    size = (machine.file_root / "tiny.gguf").stat().st_size
    assert progress
    assert (progress.bytes, progress.total_bytes) == (size, size)


async def test_ollama_pulls_what_is_in_its_library_and_keeps_it_for_us_alone(ollama: Served) -> None:
    machine, daemon, make = ollama
    assert isinstance(daemon, OllamaStandIn)
    daemon.registry["qwen3:8b"] = b"weights" * 1000
    of_library = Artifact(source="ollama://qwen3:8b")
    machine.supervisor.assign([make(artifact=of_library, memory_bytes=GIB)])
    model = await ollama.ready()
    progress = machine.runners["u1"].progress
    assert progress
    assert (progress.bytes, progress.total_bytes) == (7000, 7000)
    assert set(daemon.stored) == {model}
    machine.supervisor.assign([])
    await phase(machine, "Stopped")
    machine.supervisor.assign([])
    await eventually(lambda: daemon.blobs == {})


async def test_a_model_that_the_owner_has_pulled_stays_the_owners(ollama: Served) -> None:
    machine, daemon, make = ollama
    assert isinstance(daemon, OllamaStandIn)
    daemon.own("qwen3:8b", size=GIB)
    of_library = make(artifact=Artifact(source="ollama://qwen3:8b"), memory_bytes=GIB, context_length=8192)
    machine.supervisor.assign([of_library])
    assert "ollama stop qwen3:8b" in await phase(machine, "Failed", "OwnersModelLoaded")
    assert daemon.names() == {"qwen3:8b"}
    daemon.evict("qwen3:8b")
    model = await ollama.ready()
    assert ("POST", "/api/pull") not in daemon.asked
    machine.supervisor.assign([])
    await phase(machine, "Stopped")
    machine.supervisor.assign([])
    await eventually(lambda: model not in daemon.stored)
    assert set(daemon.stored) == {"qwen3:8b"}


async def test_a_name_that_ollamas_library_has_not_says_so(ollama: Served) -> None:
    machine, _, make = ollama
    machine.supervisor.assign([make(artifact=Artifact(source="ollama://nobody/none:1b"), memory_bytes=GIB)])
    assert "file does not exist" in await phase(machine, "Failed", "DaemonRefused")


async def test_no_key_of_the_owners_environment_reaches_ollama(ollama: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLLAMA_API_KEY", "sk-of-ollama-com")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    machine, daemon, make = ollama
    assert isinstance(daemon, OllamaStandIn)
    machine.supervisor.assign([make()])
    await ollama.ready()
    assert daemon.headers_seen
    assert not [headers for headers in daemon.headers_seen if "sk-of-ollama-com" in headers]


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
        await asyncio.wait_for(second.known.clean(list), 10)
        await second.stop()
    assert daemon.names() == {model}
