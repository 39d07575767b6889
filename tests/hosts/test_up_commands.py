"""The commands on a running `pomona up`, with real engines: what they show, load, unload, ask, fetch and end."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from kube.resources import MODELS
from metal_agent.native.process import kill_strays
from tests.support.eventually import eventually
from tests.support.file_server import FileServer, TransferFault
from tests.support.machine_commands import MachineCommands, interrupt
from tests.support.on_demand_up import MODEL_BYTES, find_engines, write_models
from tests.support.refused_manifests import make_manifest
from tests.support.terminal import CTRL_C, CTRL_D
from tests.support.tiny_models import tiny_gguf
from tests.support.up_command import Start, manifest, service


@pytest.fixture
async def pomona(tmp_path: Path) -> AsyncIterator[MachineCommands]:
    """The commands; what they start in the background ends with the test."""
    commands = MachineCommands(tmp_path / "state")
    yield commands
    ended = await commands.run("down", "--now")
    assert ended.code == 0 or "no `pomona up` runs" in ended.errors, ended
    await kill_strays(commands.state, ())


async def read_services(pomona: MachineCommands) -> dict[str, dict[str, Any]]:
    return {facts["name"]: facts for facts in json.loads(await pomona.succeed("list", "-o", "json"))}


async def test_models_are_shown_loaded_and_unloaded(start: Start, tmp_path: Path, pomona: MachineCommands) -> None:
    always = (
        make_manifest(MODELS, name="always", source=(tmp_path / "one.gguf").as_uri(), memoryBytes=MODEL_BYTES),
        service("always", "always"),
    )
    up = start(write_models(tmp_path, "one", "two", more=always))
    await up.url()
    await up.says("always: Ready")
    shown = await pomona.run("list")
    assert shown.errors == f"`pomona up` on this machine (pid {up.process.pid})\n"
    assert [line.split()[:2] for line in shown.output.splitlines()[1:]] == [
        ["always", "Ready"],
        ["one", "Idle"],
        ["two", "Idle"],
    ]

    loaded = await pomona.run("load", "one")
    assert loaded.code == 0, loaded
    assert loaded.output.startswith("one is loaded, with ")
    listed = (await pomona.succeed("ps")).splitlines()
    assert [line.split()[0] for line in listed] == ["NAME", "always", "one"]
    assert listed[0].split() == ["NAME", "PHASE", "MEMORY", "REQUESTS", "IDLE", "UNLOADED", "IN", "CONTEXT", "ENGINE"]
    facts = (await read_services(pomona))["one"]
    assert (facts["phase"], facts["onDemand"], facts["contextLength"]) == ("Ready", True, 512)
    assert 0 < facts["unloadSeconds"] <= 300
    assert facts["engines"][0]["pid"] in find_engines(up.state)
    assert facts["reservedBytes"] > 0
    assert await pomona.succeed("load", "always") == (
        "always is always loaded: its service has no spec.scaling.minReplicas: 0\n"
    )

    assert await pomona.succeed("stop", "one") == "one is unloaded; its next request loads it again\n"
    assert sorted(find_engines(up.state).values()) == ["always"]
    assert await pomona.succeed("unload", "one") == "one is not loaded\n"
    refused = await pomona.run("unload", "always")
    assert (refused.code, "spec.scaling.minReplicas: 0" in refused.errors) == (1, True)
    missing = await pomona.run("load", "onne")
    assert "no service onne here: did you mean one?" in missing.errors
    assert (await pomona.run("status", "two")).code == 0, "its first request loads it"
    assert "llama" in (await pomona.succeed("logs", "always", "--tail", "50")).lower()
    assert "two was not loaded yet" in (await pomona.run("logs", "two")).errors

    down = await pomona.run("down")
    assert (down.code, down.output) == (0, "everything is stopped\n")
    assert await up.ends() == 0


async def test_model_that_cannot_be_loaded_is_reported_to_the_one_who_loads_it(
    start: Start, tmp_path: Path, pomona: MachineCommands
) -> None:
    broken = service("broken", "one", extraArgs=["--no-such-option"], scaling={"minReplicas": 0})
    await start(write_models(tmp_path, "one", more=(broken,))).url()
    await pomona.succeed("load", "one")
    loaded = await pomona.run("load", "broken")
    assert (loaded.code, "no-such-option" in loaded.errors) == (1, True), loaded
    assert (await pomona.run("status", "broken")).code == 1


async def test_interrupted_answer_ends_in_the_engine_and_the_conversation_goes_on(
    start: Start, tmp_path: Path, pomona: MachineCommands
) -> None:
    tiny_gguf.write(tmp_path / "long.gguf", text="one two three four five", loop=True, n_ctx=1 << 16)
    models = manifest(
        tmp_path / "models.yaml",
        make_manifest(MODELS, name="long", source=(tmp_path / "long.gguf").as_uri(), memoryBytes=MODEL_BYTES),
        service("long", "long", contextLength=1 << 16, scaling={"minReplicas": 0}),
    )
    await start(models).url()

    async def is_at_work(count: int) -> bool:
        return bool((await read_services(pomona))["long"]["running"] == count)

    async with pomona.on_terminal("chat", "long") as terminal:
        for _ in range(2):
            await terminal.wait_for("> ")
            terminal.type("Hello\n")
            await terminal.wait_for("two three four five")
            assert await is_at_work(1)
            terminal.type(CTRL_C)
        await terminal.wait_for("> ")
        await eventually(lambda: is_at_work(0))
        terminal.type(CTRL_D)
        assert await terminal.end() == 0
    async with pomona.on_terminal("chat", "long") as terminal:
        await terminal.wait_for("> ")
        terminal.type(CTRL_C)
        assert await terminal.end() == 130


async def test_run_starts_an_instance_in_the_background_and_uses_it_again(
    tmp_path: Path, pomona: MachineCommands
) -> None:
    weights = tmp_path / "one.gguf"
    tiny_gguf.write(weights, text="one speaks.")
    first = await pomona.run("run", str(weights), "Hi", "--port=0")
    assert (first.code, first.output) == (0, "one speaks.\n"), first
    assert "starting one in the background" in first.errors
    facts = (await read_services(pomona))["one"]
    assert (facts["onDemand"], facts["phase"]) == (True, "Ready")

    for name in ("one", str(weights)):
        again = await pomona.run("run", name, "Hi")
        assert (again.code, again.output) == (0, "one speaks.\n"), again
        assert "starting" not in again.errors
    other = await pomona.run("run", "nothing-like-it", "Hi")
    assert (other.code, "no model and no file has this name" in other.errors) == (1, True), other
    assert await pomona.succeed("down") == "everything is stopped\n"
    assert find_engines(pomona.state) == {}
    assert (pomona.state / "up-output.log").stat().st_mode & 0o777 == 0o600


async def test_run_waits_for_a_source_that_cannot_be_reached_yet(
    tmp_path: Path, pomona: MachineCommands, unused_tcp_port: int
) -> None:
    root = tmp_path / "served"
    root.mkdir()
    tiny_gguf.write(root / "one.gguf", text="one speaks.")
    source = f"http://127.0.0.1:{unused_tcp_port}/one.gguf"
    running = await pomona.start("run", source, "Hi", "--port=0")
    assert running.stderr
    while b"one: Pending - Model one: " not in (line := await running.stderr.readline()):
        assert line
    async with FileServer(root, port=unused_tcp_port):
        output, errors = await running.communicate()
    assert (running.returncode, output) == (0, b"one speaks.\n"), errors


async def test_up_in_the_background_ends_with_its_errors_and_exit_code(tmp_path: Path, pomona: MachineCommands) -> None:
    wrong = manifest(tmp_path / "wrong.yaml", service("one", "absent"))
    ended = await pomona.run("up", wrong, "--background", "--port=0")
    assert (ended.code, "absent" in ended.errors) == (2, True), ended
    (tmp_path / "broken.gguf").write_bytes(b"no model")
    ended = await pomona.run("up", f"--model={tmp_path / 'broken.gguf'}", "--background", "--port=0")
    assert (ended.code, "broken.gguf" in ended.errors) == (1, True), ended

    started = await pomona.run("up", write_models(tmp_path, "one"), "--background", "--port=0")
    assert started.code == 0, started
    assert "endpoint http://127.0.0.1:" in started.output
    second = await pomona.run("up", write_models(tmp_path, "one"), "--background", "--port=0")
    assert (second.code, "another `pomona up`" in second.errors) == (1, True), second
    assert [*await read_services(pomona)] == ["one"]


async def test_killed_instance_counts_as_none_and_the_next_one_takes_its_socket(
    start: Start, tmp_path: Path, pomona: MachineCommands
) -> None:
    up = start(write_models(tmp_path, "one"))
    await up.url()
    await pomona.succeed("load", "one")
    await up.process.kill()
    assert (pomona.state / "up.sock").exists()
    for words in (("ps",), ("list",), ("load", "one"), ("down",)):
        ended = await pomona.run(*words)
        assert (ended.code, "no `pomona up` runs in" in ended.errors) == (1, True), ended

    up.process.start()

    async def is_adopted() -> bool:
        return (await pomona.run("ps")).output.partition("\n")[2].startswith("one ")

    await eventually(is_adopted)
    other = MachineCommands(tmp_path / "other")
    assert "no `pomona up` runs in" in (await other.run("ps")).errors, "each folder has its own"


@pytest.mark.parametrize("by", ["instance", "command"])
async def test_interrupted_pull_is_resumed(start: Start, tmp_path: Path, pomona: MachineCommands, by: str) -> None:
    root = tmp_path / "served"
    root.mkdir()
    tiny_gguf.write(root / "one.gguf", text="one speaks.")
    size = (root / "one.gguf").stat().st_size
    network = "--allow-private-sources=127.0.0.0/8"
    if by == "instance":
        await start(write_models(tmp_path, "other"), network).url()
    async with FileServer(root) as server:
        source = f"{server.url}/one.gguf"
        await pomona.run("pull", f"{server.url}/absent.gguf", network)  # the server counts requests from here on
        # The header is read by the inspection first; the connection of the download goes silent.
        server.faults.extend([TransferFault(size), TransferFault(size // 2, silent=True)])
        process = await pomona.start("pull", source, network)
        await eventually(lambda: any(path.stat().st_size for path in pomona.state.rglob("*.part")))
        ended = await interrupt(process)
        assert (ended.code, "pull it again" in ended.errors) == (130, True), ended

        done = await pomona.run("pull", source, network)
        assert done.code == 0, done
        assert "one.gguf: resumed at " in done.errors
        assert done.output.startswith(f"{source} is stored: sha256 ")
    assert (await pomona.run("pull", source, network)).code == 0, "its source is gone, and is not needed"
    listed = json.loads(await pomona.succeed("weights", "list", "-o", "json"))
    assert [facts["source"] for facts in listed] == [source]
    assert await pomona.succeed("weights", "delete", listed[0]["digest"][:9]) == (
        f"deleted {listed[0]['digest'][:12]}, {size / 1024:.1f} KiB\n"
    )


async def test_weights_of_a_service_are_not_deleted(start: Start, tmp_path: Path, pomona: MachineCommands) -> None:
    root = tmp_path / "served"
    root.mkdir()
    tiny_gguf.write(root / "one.gguf", text="one speaks.")
    async with FileServer(root) as server:
        source = f"{server.url}/one.gguf"
        models = manifest(
            tmp_path / "models.yaml",
            make_manifest(MODELS, name="one", source=source),
            service("one", "one", scaling={"minReplicas": 0}),
        )
        up = start(models, "--allow-private-sources=127.0.0.0/8")
        await up.url()
        await up.says("one: Idle")
    refused = await pomona.run("weights", "delete", source)
    assert (refused.code, "serves one: take that out of the files" in refused.errors) == (1, True), refused


async def test_followed_log_goes_on_with_the_engine(start: Start, tmp_path: Path, pomona: MachineCommands) -> None:
    await start(write_models(tmp_path, "one")).url()
    process = await pomona.start("logs", "one", "-f")
    assert process.stdout
    assert process.stderr
    while b"was not loaded yet" not in await process.stderr.readline():
        assert process.returncode is None
    await pomona.succeed("load", "one")
    assert await asyncio.wait_for(process.stdout.readline(), 60)
    assert (await interrupt(process)).code == 0


async def test_down_says_what_it_waits_for_and_now_aborts_it(
    start: Start, tmp_path: Path, pomona: MachineCommands
) -> None:
    tiny_gguf.write(tmp_path / "long.gguf", text="one two three four five", loop=True, n_ctx=1 << 16)
    models = manifest(
        tmp_path / "models.yaml",
        make_manifest(MODELS, name="long", source=(tmp_path / "long.gguf").as_uri(), memoryBytes=MODEL_BYTES),
        service("long", "long", contextLength=1 << 16, scaling={"minReplicas": 0}),
    )
    up = start(models)
    await up.url()
    asking = await pomona.start("chat", "long", "Hello")
    assert asking.stdout
    await asking.stdout.readexactly(8)
    waiting = await pomona.start("down")
    assert waiting.stderr
    while b"waits for 1 running requests" not in (line := await waiting.stderr.readline()):
        assert line
    os.kill(waiting.pid, signal.SIGINT)
    assert b"goes on stopping" in (await waiting.communicate())[1]
    assert psutil.pid_exists(up.process.pid)
    assert await pomona.succeed("down", "--now") == "everything is stopped\n"
    assert await up.ends() == 0
    assert (await asking.communicate())[0]
