"""The lifecycle of our models in daemons that the owner of a host runs; other models are not touched."""

import aiohttp
import pytest

from kube.resources import ObjectKey
from metal_agent import daemons, lifecycle
from metal_agent.traffic.exposure import ServicePort, proxy_config
from runtimes import ollama_client, omlx_client
from runtimes.probe import generate_token
from tests.support.api_objects import GIB
from tests.support.daemons.host_daemons import (
    KEY,
    OWNERS,
    Served,
    daemon_name,
    endless,
    gguf,
    library,
    long_request,
    ollama,
    omlx,
    remains,
    served,
    watch_often,
)
from tests.support.daemons.omlx import OmlxStandIn
from tests.support.eventually import eventually
from tests.support.local_host import phase
from tests.support.ollama.server import OllamaServer

__all__ = ["library", "ollama", "omlx", "served", "watch_often"]


async def test_model_is_added_loaded_served_and_removed_again(served: Served) -> None:
    machine, daemon, _ = served
    daemon.own(OWNERS, size=GIB)
    if isinstance(daemon, OmlxStandIn):
        daemon.evict(OWNERS)  # oMLX finds ours by a reload, which would unload it
    machine.supervisor.assign([served.make()])
    model = await served.ready()
    runner = machine.runners["u1"]
    assert runner.url == daemon.url
    assert runner.build_status(18000).pid is None
    async with aiohttp.ClientSession() as session:
        result = await generate_token(session, daemon.url, model=model, token=runner.api_key, timeout_seconds=60)
    assert result.ok
    assert machine.ledger.reserved.keys() == {"u1"}

    machine.supervisor.assign([])
    await phase(machine, "Stopped")
    assert [call for call, _ in machine.exposure.calls] == ["withdraw", "drain"]
    assert served.ours() == set()
    machine.supervisor.assign([])
    await eventually(lambda: not remains(served))
    assert remains(served, "owners") == {OWNERS}
    assert machine.ledger.reserved == {}


async def test_model_of_the_owner_is_counted_and_stays(served: Served) -> None:
    machine, daemon, make = served
    machine.supervisor.assign([make()])
    await served.ready()
    daemon.own(OWNERS, size=3 * GIB)
    size = daemon.loaded()[OWNERS]["size"] if isinstance(daemon, OllamaServer) else 3 * GIB

    def counted() -> bool:
        models = machine.known.list_loaded()
        return {(model.memory_bytes, model.ours) for model in models if model.name == OWNERS} == {(size, False)}

    await eventually(counted)
    (ours,) = [loaded_model for loaded_model in machine.known.list_loaded() if loaded_model.ours]
    assert ours.memory_bytes
    machine.supervisor.assign([])
    await phase(machine, "Stopped")
    await machine.stop()
    assert daemon.names() == {OWNERS}
    assert not [path for method, path in daemon.changes() if OWNERS in path]


async def test_proxy_gets_the_daemons_model_name_and_no_status_has_the_key(
    omlx: Served, capfd: pytest.CaptureFixture[str]
) -> None:
    machine, daemon, make = omlx
    assert isinstance(daemon, OmlxStandIn)
    machine.supervisor.assign([make()])
    model = await omlx.ready()
    runner = machine.runners["u1"]
    chat = ObjectKey("team-a", "chat")
    config = proxy_config("10.77.1.1", {chat: [runner]}, {chat: ServicePort(18000, "token")})
    (backend,) = config.services[0].backends
    assert (backend.url, backend.model, backend.api_key) == (daemon.url, model, KEY)
    daemon.api_key = "another"
    assert "OMLX_API_KEY" in await phase(machine, "Failed", "DaemonUnauthorized")
    record = (machine.folder / "processes").glob("*.json")
    seen = [repr(config), repr(runner.build_status(1)), *(path.read_text() for path in record), *capfd.readouterr()]
    assert not [text for text in seen if KEY in text]
    daemon.api_key = KEY
    assert await omlx.ready() == model


async def test_two_models_in_one_daemon_are_unloaded_separately(served: Served) -> None:
    machine, daemon, make = served
    other = {"repo": "other"} if isinstance(daemon, OmlxStandIn) else {"artifact": gguf(machine, "other.gguf")}
    machine.supervisor.assign([make("u1"), make("u2", **other)])
    first, second = await served.ready("u1"), await served.ready("u2")
    await eventually(lambda: served.ours() == {first, second})
    machine.supervisor.assign([make("u2", **other)])
    await phase(machine, "Stopped", uid="u1")
    assert served.ours() == {second}
    assert machine.runners["u2"].state.phase == "Ready"


async def test_replicas_share_one_model_until_the_last_is_gone(served: Served) -> None:
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


async def test_endpoint_is_gone_with_its_daemon_and_returns_with_it(served: Served) -> None:
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
    assert machine.runners["u1"].build_status(None).restarts


async def test_hung_daemon_fails_process_and_slow_one_does_not(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, daemon, make = served
    machine.supervisor.assign([make()])
    model = await served.ready()
    for runtime in (ollama_client, omlx_client):
        monkeypatch.setattr(runtime, "_QUERY_TIMEOUT", aiohttp.ClientTimeout(total=0.1))
    shared = machine.known.get(daemon_name(daemon))
    assert shared
    checks, asked, list_loaded = 0, list[int](), shared.daemon.list_loaded

    async def loaded() -> list[tuple[str, int | None]]:
        nonlocal checks
        checks += 1
        return await list_loaded()

    monkeypatch.setattr(shared.daemon, "list_loaded", loaded)
    machine.on_change = lambda _runner: asked.append(checks)
    daemon.freeze()
    before = checks
    await phase(machine, "Failed", "DaemonSilent")
    # One check may have been under way before they were counted.
    assert asked[0] >= before + daemons.SILENT_CHECKS - 1, "it changed before"
    daemon.thaw()
    assert await served.ready() == model


async def test_a_model_that_the_daemon_evicts_is_loaded_again(served: Served) -> None:
    machine, daemon, make = served
    machine.supervisor.assign([make()])
    model = await served.ready()
    daemon.evict(model)
    assert "has unloaded" in await phase(machine, "Failed", "Unloaded")
    assert await served.ready() == model


async def test_deleted_model_is_added_again(ollama: Served) -> None:
    machine, daemon, make = ollama
    assert isinstance(daemon, OllamaServer)
    machine.supervisor.assign([make()])
    model = await ollama.ready()
    daemon.evict(model)
    daemon.delete(model)
    await phase(machine, "Failed", "ModelMissing")
    assert await ollama.ready() == model


async def test_next_agent_adopts_a_loaded_model_and_loads_nothing(served: Served) -> None:
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


async def test_next_agent_adopts_all_processes_of_one_model(served: Served) -> None:
    machine, daemon, make = served
    machine.supervisor.assign([make("u1"), make("u2")])
    assert await served.ready("u1") == await served.ready("u2")
    await machine.stop()
    before = daemon.changes()
    await machine.start()
    assert {uid: runner.state.phase for uid, runner in machine.runners.items()} == {"u1": "Ready", "u2": "Ready"}
    assert daemon.changes() == before


async def test_next_agent_loads_an_unloaded_model_again(served: Served) -> None:
    machine, daemon, make = served
    machine.supervisor.assign([make()])
    model = await served.ready()
    await machine.stop()
    daemon.evict(model)
    await machine.start()
    assert machine.runners == {}
    machine.supervisor.assign([make()])
    assert await served.ready() == model


async def test_model_without_a_record_is_removed_and_no_other(served: Served) -> None:
    machine, daemon, make = served
    machine.supervisor.assign([make()])
    model = await served.ready()
    await machine.stop()
    (machine.folder / "processes" / "u1.json").unlink()
    anothers = "pomona-0badcafe/tiny:1-1" if isinstance(daemon, OllamaServer) else "pomona-0badcafe-tiny-1-1"
    daemon.own(anothers, size=GIB)
    await machine.start()
    machine.supervisor.assign([])
    await eventually(lambda: model not in daemon.names() | remains(served))
    assert anothers in daemon.names()
    assert anothers in remains(served)


async def test_deletion_ends_a_loading_model(served: Served) -> None:
    machine, daemon, make = served
    machine.supervisor.assign([make()])
    runner = machine.runners["u1"]
    machine.on_change = lambda _runner: daemon.freeze() if runner.state.phase == "Starting" else None
    await eventually(lambda: runner.state.phase == "Starting")
    machine.supervisor.assign([])
    await eventually(lambda: runner.state.phase == "Stopping")
    daemon.thaw()
    await phase(machine, "Stopped")
    assert served.ours() == set()
    assert "Ready" not in {change for _, change in machine.changes}


async def test_model_that_is_never_unloaded_blocks_nothing_and_its_memory_stays_reserved(
    ollama: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "UNLOAD_LIMIT_SECONDS", -9.5)
    machine, daemon, make = ollama
    machine.supervisor.assign([make(artifact=endless(machine))])
    model = await ollama.ready()
    async with long_request(daemon, model):
        machine.supervisor.assign([])
        assert f"ollama has not unloaded {model}" in await phase(machine, "Stopped", "EngineNotEnded")
        machine.supervisor.assign([])
        assert machine.ledger.reserved.keys() == {"u1"}
    await eventually(lambda: machine.ledger.reserved == {})
    machine.supervisor.assign([])
    assert machine.runners == {}


async def test_daemon_that_is_removed_from_the_machine_counts_no_model_any_more(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, daemon, _ = served
    daemon.own(OWNERS, size=GIB)
    await eventually(lambda: [model.name for model in machine.known.list_loaded()] == [OWNERS])
    changed: list[str] = []
    machine.known.subscribe(changed.append)
    shared = machine.known.get(daemon_name(daemon))
    assert shared
    monkeypatch.setattr(shared.daemon, "installed", lambda: False)
    await eventually(lambda: machine.known.list_loaded() == [])
    assert (machine.known.usable(), changed) == ([], [daemon_name(daemon)])


async def test_a_daemon_that_is_slow_to_unload_keeps_its_memory_reserved(ollama: Served) -> None:
    machine, daemon, make = ollama
    machine.supervisor.assign([make(artifact=endless(machine))])
    model = await ollama.ready()
    async with long_request(daemon, model):
        machine.supervisor.assign([])
        await eventually(lambda: daemon.changes()[-1] == ("POST", "/api/generate"))
        await phase(machine, "Stopping")
        assert machine.ledger.reserved.keys() == {"u1"}
    await phase(machine, "Stopped")
    assert machine.ledger.reserved == {}
