"""`pomona up` as its owner runs it: a process of its own, real engines, one endpoint, and a graceful end."""

import contextlib
import gzip
import json
import os
import re
import shlex
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from backports import zstd

from artifacts.repositories.address_policy import NETWORKS_VARIABLE
from kube.resources import MODELS
from metal_agent.native.process import OWNER_VARIABLE
from tests.controlplane.process import CHECKOUT
from tests.support.api_objects import GIB
from tests.support.daemons.host_daemons import long_request
from tests.support.documents import list_blocks
from tests.support.eventually import eventually
from tests.support.file_server import COMMIT, FileServer
from tests.support.ollama.server import OllamaServer
from tests.support.refused_manifests import make_manifest
from tests.support.tiny_models import tiny_gguf, tiny_mlx
from tests.support.up_command import CALL, Start, Up, ask, manifest, service


async def test_services_of_a_file_answer_at_one_endpoint_by_their_names(start: Start, tmp_path: Path) -> None:
    root = tmp_path / "served"
    root.mkdir()
    tiny_gguf.write(root / "one.gguf", text="First speaks.")
    tiny_gguf.write(root / "two.gguf", text="Second speaks.")
    async with FileServer(root) as files:
        up = start(
            manifest(
                tmp_path / "all.yaml",
                make_manifest(MODELS, name="one", source=f"{files.url}/one.gguf"),
                service("first", "one", hardware={"accelerator": "cpu"}, resources={"memory": "4Gi"}),
                make_manifest(MODELS, name="two", source=f"{files.url}/two.gguf"),
                service("second", "two"),
                service("idle", "two", suspend=True),
            )
        )
        url = await up.url()
        for name in ("first", "second"):
            await up.says(f"{name}: Ready")
        assert await ask(url, "first") == (200, "First speaks.")
        assert await ask(url, "second") == (200, "Second speaks.")
        # As a program asks that was written for Docker Model Runner.
        assert await ask(f"{url}/engines/llama.cpp", "first") == (200, "First speaks.")
        status, said = await ask(url, "third")
        assert status == 404
        assert "third" in said
        async with aiohttp.ClientSession() as session, session.get(f"{url}/v1/models") as response:
            assert {model["id"] for model in (await response.json())["data"]} >= {"first", "second"}
        await up.says("idle: Suspended - spec.suspend is true")
        await up.says("first: ignored on this machine, only pods use them: spec.resources")
    assert await up.process.stop() == 0
    assert [process for process in psutil.process_iter() if _is_of(process, up.state)] == []


async def test_memory_is_divided_among_all_replicas(start: Start, weights: Path) -> None:
    async with FileServer(weights.parent) as files:
        up = start(
            manifest(
                weights.parent / "two.yaml",
                make_manifest(MODELS, name="tiny", source=f"{files.url}/tiny.gguf"),
                service("chat", "tiny", contextLength=4096, replicas=3),
                service("idle", "tiny", suspend=True),
            ),
            "--memory-budget=120MiB",
        )
        await up.url()
        await up.says("chat: Ready - 3 of 3 replicas are ready")


async def test_memory_of_a_folder_is_that_of_the_engine_that_serves_it_here(start: Start, tmp_path: Path) -> None:
    """In pods it would be vLLM, which takes gigabytes."""
    tiny_mlx.write(tmp_path / "tiny", written_for="pt")
    up = start("--model", f"{tmp_path}/tiny/", "--memory-budget=1GiB")
    url = await up.url()
    await up.says("tiny: Ready")
    assert await ask(url, "tiny") == (200, tiny_gguf.SENTENCE)


async def test_requests_of_agents_are_decoded_or_refused_with_the_way_out(start: Start, weights: Path) -> None:
    up = start("--model", str(weights))
    url = await up.url()
    await up.says("tiny: Ready")
    question = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "input": "Hi", "max_tokens": 1}
    async with aiohttp.ClientSession(timeout=CALL) as session:
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await session.ws_connect(f"{url}/v1/responses")
        assert refused.value.status == 426
        for coding, compress in (("gzip", gzip.compress), ("zstd", zstd.compress)):
            body, headers = compress(json.dumps(question).encode()), {"Content-Encoding": coding}
            async with session.post(f"{url}/v1/responses", data=body, headers=headers) as response:
                assert response.status == 200
        async with session.post(f"{url}/v1/rerank", json=question) as response:
            assert response.status == 400
            message = (await response.json())["error"]["message"]
    assert message.startswith("service default/tiny: its engine does not serve /v1/rerank (This server does not")
    assert message.endswith("/v1/messages/count_tokens, or a service with spec.mode rerank")


@pytest.mark.parametrize("document", ["docs/concepts.md", "docs/mac.md"])
async def test_manifests_of_the_documents_are_served_as_they_are(start: Start, tmp_path: Path, document: str) -> None:
    root = tmp_path / "served"
    root.mkdir()
    # Heads of 64 values, the least that real models have: a cache in q8_0 needs them.
    tiny_gguf.write(root / "tiny.gguf", n_embd=256)
    text = (CHECKOUT / document).read_text()
    blocks = re.findall(r"^```yaml\n(apiVersion.*?)^```", text, re.DOTALL | re.MULTILINE)
    async with FileServer(root) as files:
        stated, changed = re.subn(r"source: \S+", f"source: {files.url}/tiny.gguf", "---\n".join(blocks))
        assert changed == 1
        path = tmp_path / "chat.yaml"
        path.write_text(stated)
        up = start(str(path))
        url = await up.url()
        await up.says("chat: Ready")
    assert await ask(url, "chat") == (200, tiny_gguf.SENTENCE)


async def test_commands_that_serve_on_a_mac_work_word_for_word(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unused_tcp_port: int
) -> None:
    """Those of docs/mac.md, but for the port, which may be taken here."""
    weights = tmp_path / "hub" / "Qwen" / "Qwen3-8B-GGUF" / "Qwen3-8B-Q4_K_M.gguf"
    weights.parent.mkdir(parents=True)
    tiny_gguf.write(weights)
    section = (CHECKOUT / "docs" / "mac.md").read_text().partition("## 2. Serve")[2].partition("\n## ")[0]
    serve, call = list_blocks(section)
    program, verb, *options = shlex.split(serve)
    assert (program, verb) == ("pomona", "up")
    async with FileServer(tmp_path / "hub") as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv(NETWORKS_VARIABLE, "127.0.0.0/8")
        up = start(*options, port=unused_tcp_port)
        await up.url()
        await up.says("qwen3-8b-q4-k-m: Ready")
    curl, url, data, body = shlex.split(call.replace("\\\n", " "))
    assert (curl, data) == ("curl", "-d")
    headers = {"Content-Type": "application/x-www-form-urlencoded"}  # as curl sends it
    async with (
        aiohttp.ClientSession(timeout=CALL, headers=headers) as session,
        session.post(url.replace(":8080/", f":{unused_tcp_port}/"), data=body) as answer,
    ):
        assert (await answer.json())["choices"][0]["message"]["content"] == tiny_gguf.SENTENCE


async def test_ctrl_c_lets_a_running_answer_end(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "loop.gguf"
    tiny_gguf.write(path, loop=True)
    loop = make_manifest(MODELS, name="loop", source=f"file://{path}")
    up = start(manifest(tmp_path / "loop.yaml", loop, service("loop", "loop")))
    url = await up.url()
    await up.says("loop: Ready")
    question = {"model": "loop", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 400, "stream": True}
    async with aiohttp.ClientSession(timeout=CALL) as session:
        async with session.post(f"{url}/v1/chat/completions", json=question) as response:
            lines = [await response.content.readline()]
            os.kill(up.process.pid, signal.SIGINT)
            await up.says("loop: Stopping")
            lines += [line async for line in response.content]
        assert sum(line.startswith(b"data: {") for line in lines) >= 400
        assert lines[-2:] == [b"data: [DONE]\n", b"\n"]
        assert await up.ends() == 0
        with pytest.raises(aiohttp.ClientConnectorError):
            await session.get(f"{url}/v1/models")


@contextlib.asynccontextmanager
async def _endless_answer(
    start: Start, folder: Path, **spec: Any
) -> AsyncIterator[tuple[Up, str, aiohttp.ClientResponse]]:
    """Yield `pomona up`, its URL, and an answer of its service `loop` that has begun, and takes minutes."""
    path = folder / "loop.gguf"
    tiny_gguf.write(path, loop=True)
    loop = make_manifest(MODELS, name="loop", source=f"file://{path}")
    up = start(manifest(folder / "loop.yaml", loop, service("loop", "loop", contextLength=32768, **spec)))
    url = await up.url()
    await up.says("loop: Ready")
    question = {"model": "loop", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 30000, "stream": True}
    async with (
        aiohttp.ClientSession(timeout=CALL) as session,
        session.post(f"{url}/v1/chat/completions", json=question) as response,
    ):
        await response.content.readline()
        yield up, url, response


async def test_request_during_the_end_is_refused_and_delays_nothing(start: Start, tmp_path: Path) -> None:
    async with _endless_answer(start, tmp_path) as (up, url, _response):
        os.kill(up.process.pid, signal.SIGINT)
        await up.says("loop: Stopping")

        async def is_refused() -> bool:
            """Return whether the proxy knows of the end, too: a moment before it takes another request."""
            return (await ask(url, "loop", max_tokens=1))[0] == 503

        await eventually(is_refused)
        assert up.process.running
        os.kill(up.process.pid, signal.SIGINT)
        assert await up.ends() == 0


async def test_answer_that_takes_longer_than_the_drain_ends_with_an_error(start: Start, tmp_path: Path) -> None:
    async with _endless_answer(start, tmp_path, drainSeconds=1) as (up, _url, response):
        os.kill(up.process.pid, signal.SIGINT)
        *_, last = [line async for line in response.content if line.startswith(b"data: ")]
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "upstream_failed"
    assert await up.ends() == 0


async def test_second_ctrl_c_ends_although_a_daemon_unloads_nothing(
    start: Start, tmp_path: Path, weights: Path, unused_tcp_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_gguf.write(weights, loop=True, n_ctx=65536)
    async with OllamaServer(tmp_path / "ollama", unused_tcp_port) as daemon:
        monkeypatch.setenv("OLLAMA_HOST", daemon.url)
        up = start(
            manifest(
                tmp_path / "all.yaml",
                make_manifest(MODELS, name="one", source=f"file://{weights}", memoryBytes=GIB),
                service(
                    "chat",
                    "one",
                    runtime="ollama",
                    contextLength=65536,
                    extraArgs=[],
                    hardware={"accelerator": "metal"},
                ),
            )
        )
        await up.url()
        await up.says("chat: Ready")
        (model,) = daemon.names()
        async with long_request(daemon, model):
            loads = daemon.changes().count(("POST", "/api/generate"))
            os.kill(up.process.pid, signal.SIGINT)
            await eventually(lambda: daemon.changes().count(("POST", "/api/generate")) > loads)
            os.kill(up.process.pid, signal.SIGINT)
            assert await up.ends() == 0
        assert "chat: its engine has not ended" in up.said


async def test_question_is_answered_on_standard_output_and_everything_is_stopped(start: Start, weights: Path) -> None:
    up = start("--model", str(weights), "--ask", "Who are you?")
    up.process.start()
    assert await up.ends() == 0, up.said
    assert tiny_gguf.SENTENCE in up.said
    assert [process for process in psutil.process_iter() if _is_of(process, up.state)] == []


async def test_engine_is_adopted_after_a_crash_of_up(start: Start, weights: Path) -> None:
    up = start("--model", str(weights))
    await up.url()
    await up.says("tiny: Ready")
    before = [process for process in psutil.process_iter() if _is_of(process, up.state)]
    await up.process.kill()
    up.process.log.write_text("")
    url = await up.url()
    await up.says("tiny: Ready")
    assert (await ask(url, "tiny"))[0] == 200
    assert [process for process in psutil.process_iter() if _is_of(process, up.state)] == before


async def test_hub_gets_the_token_of_the_environment_and_is_not_needed_once_weights_are_stored(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "served"
    (root / "org" / "repo").mkdir(parents=True)
    tiny_gguf.write(root / "org" / "repo" / "tiny.gguf")
    async with FileServer(root) as files:
        files.token = "hub-token"
        monkeypatch.setenv("HF_ENDPOINT", files.url)
        monkeypatch.setenv("HF_TOKEN", "hub-token")
        up = start("--model", "hf://org/repo/tiny.gguf", "--ask", "Hi")
        up.process.start()
        assert await up.ends() == 0, up.said
        assert any(request.authorization == "Bearer hub-token" and COMMIT in request.path for request in files.requests)
        files.statuses.extend([429] * 99)
        up.process.start()
        assert await up.ends() == 0, up.said
        assert "tiny: Ready - Model tiny: the stored weights serve, since their source could not be asked" in up.said
    kept = "".join(
        path.read_text(errors="replace") for path in up.state.rglob("*") if path.is_file() and path.suffix != ".gguf"
    )
    assert "hub-token" not in kept + up.said


async def test_other_server_gets_no_token_although_a_manifest_names_a_secret(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "served"
    root.mkdir()
    tiny_gguf.write(root / "tiny.gguf")
    monkeypatch.setenv("HF_TOKEN", "hub-token")
    async with FileServer(root) as files:
        source = f"{files.url}/tiny.gguf"
        stated = make_manifest(MODELS, name="tiny", source=source, sourceSecretRef={"name": "hub"})
        up = start(manifest(tmp_path / "chat.yaml", stated, service("chat", "tiny")))
        await up.url()
        await up.says("chat: Ready")
        assert files.requests
        assert [request.authorization for request in files.requests if request.authorization] == []


async def test_missing_memory_is_reported_with_its_size(start: Start, weights: Path) -> None:
    up = start("--model", str(weights), f"--memory-budget={GIB // 64}", "--ask", "Hi")
    up.process.start()
    assert await up.ends() == 1
    assert re.search(r"pomona up: tiny: it needs .*, .* more than the .* of this host's budget of 16.0 MiB", up.said)


@pytest.mark.parametrize("question", [(), ("--ask", "Hi")], ids=["serve", "ask"])
async def test_foreign_port_ends_up_with_the_way_out(start: Start, weights: Path, question: tuple[str, ...]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        up = start("--model", str(weights), *question, port=port)
        up.process.start()
        assert await up.ends() == 1
        assert re.search(rf"no endpoint: Address already in use .*{port}.*; give another port with --port", up.said)
    assert not list(up.state.rglob("*tiny*.log")), "no model is loaded in vain"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("absent.gguf", "there is no such file"),
        ("bad.gguf", "chat_templates_init: error: Unknown statement: endif"),
        ("tiny.gguf", "would answer numbers without meaning"),
    ],
    ids=["no source", "engine ends", "mode"],
)
async def test_up_ends_when_nothing_can_be_served(start: Start, tmp_path: Path, source: str, says: str) -> None:
    root = tmp_path / "served"
    root.mkdir()
    tiny_gguf.write(root / "tiny.gguf")
    tiny_gguf.write(root / "bad.gguf", template="{% for m in messages %}{% endif %}")
    async with FileServer(root) as files:
        served = make_manifest(MODELS, name="tiny", source=f"{files.url}/{source}")
        wanted = service("chat", "tiny", **({"mode": "rerank"} if source == "tiny.gguf" else {}))
        idle = service("idle", "tiny", suspend=True)
        up = start(manifest(tmp_path / "all.yaml", served, wanted, idle))
        up.process.start()
        assert await up.ends() == 1
    assert re.search(rf"Error: chat: .*{re.escape(says)}", up.said), up.said


async def test_an_end_right_after_the_start_leaves_no_proxy(start: Start, tmp_path: Path, weights: Path) -> None:
    tiny = make_manifest(MODELS, name="tiny", source=f"file://{weights}", memoryBytes=GIB)
    refused = service("chat", "tiny", runtime="mlx-lm")
    up = start(manifest(tmp_path / "all.yaml", tiny, refused), "--ask", "Hi")
    up.process.start()
    assert await up.ends() == 1
    assert "cannot serve a GGUF file" in up.said
    lines = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    assert [line for line in lines if str(up.state) in line] == []


async def test_files_that_a_cluster_refuses_start_nothing(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    up = start(
        manifest(
            path, make_manifest(MODELS, source="ollama://tiny:1b", name="tiny"), service("chat", "tiny", parallel=4097)
        )
    )
    up.process.start()
    assert await up.ends() == 2
    problem = "document 1, Model tiny: spec: .*: an ollama:// source needs spec.memoryBytes"
    assert re.search(rf"{path}:\d+: {problem}", up.said)
    assert "spec.parallel: Invalid value: 4097" in up.said
    assert not up.state.exists()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("processes/u1.json", "cannot read which engines run from"),
        ("peaks.json", "cannot read or write"),
        ("up.log", "cannot read or write"),
    ],
)
async def test_state_folder_that_cannot_be_read_is_reported(start: Start, weights: Path, name: str, says: str) -> None:
    up = start("--model", str(weights))
    (up.state / name).mkdir(parents=True)
    up.process.start()
    assert await up.ends() == 1
    assert f"{says} --state-dir {up.state}" in up.said
    assert "Traceback" not in up.said


def _is_of(process: psutil.Process, folder: Path) -> bool:
    try:
        return process.environ().get(OWNER_VARIABLE) == str(folder) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
