"""The same requests to a real Ollama and to `pomona up`: statuses, fields and types agree, but for a list of cases."""

import asyncio
import functools
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import gguf
import ollama
import pytest

from gateway.proxy.ollama_api import VERSION
from kube.resources import MODELS
from tests.support.api_objects import GIB
from tests.support.ollama.command import run_command
from tests.support.ollama.server import OllamaServer
from tests.support.refused_manifests import make_manifest
from tests.support.tiny_models import tiny_gguf
from tests.support.up_command import CALL, Start, manifest, service

HI = [{"role": "user", "content": "Who are you?"}]
CHAT = {"model": "chat", "messages": HI}
GENERATE = {"model": "chat", "prompt": "hi"}
ONE = {"stream": False}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}

SAME: list[tuple[str, str, Any]] = [
    ("GET", "/", None),
    ("HEAD", "/", None),
    ("GET", "/api/version", None),
    ("HEAD", "/api/version", None),
    ("HEAD", "/api/tags", None),
    ("GET", "/api/tags", None),
    ("POST", "/api/chat", CHAT),
    ("POST", "/api/chat", CHAT | ONE),
    ("POST", "/api/chat", CHAT | ONE | {"model": "chat:latest"}),
    ("POST", "/api/chat", CHAT | ONE | {"options": {"num_predict": 3, "num_ctx": 512, "temperature": 0, "seed": 5}}),
    ("POST", "/api/chat", CHAT | ONE | {"options": None, "format": None, "tools": None, "keep_alive": None}),
    ("POST", "/api/chat", CHAT | ONE | {"format": "json", "options": {"num_predict": 5}}),
    ("POST", "/api/chat", CHAT | ONE | {"format": {"type": "object", "properties": {}}, "options": {"num_predict": 5}}),
    ("POST", "/api/chat", CHAT | ONE | {"keep_alive": "10m", "think": False, "unknown": 1}),
    ("POST", "/api/chat", CHAT | ONE | {"logprobs": True, "top_logprobs": 2, "options": {"num_predict": 2}}),
    ("POST", "/api/chat", {"model": "chat", "messages": []}),
    ("POST", "/api/chat", {"model": "chat"}),
    ("POST", "/api/generate", GENERATE),
    ("POST", "/api/generate", GENERATE | ONE),
    ("POST", "/api/generate", GENERATE | ONE | {"system": "be brief"}),
    ("POST", "/api/generate", GENERATE | ONE | {"raw": True}),
    ("POST", "/api/generate", GENERATE | {"raw": True, "options": {"num_predict": 2}}),
    ("POST", "/api/generate", {"model": "chat", "keep_alive": -1}),
    ("POST", "/api/generate", {"model": "chat", "keep_alive": "5m", "prompt": ""}),
    ("GET", "/api/ps", None),
    ("POST", "/api/embed", {"model": "embed", "input": "hi"}),
    ("POST", "/api/embed", {"model": "embed", "input": ["hi", "you"]}),
    ("POST", "/api/embed", {"model": "embed", "input": "hi", "dimensions": 8, "truncate": True}),
    ("POST", "/api/embed", {"model": "embed"}),
    ("POST", "/api/embed", {"model": "embed", "input": [1]}),
    ("POST", "/api/embed", {"model": "embed", "input": {}}),
    ("POST", "/api/embeddings", {"model": "embed", "prompt": "hi"}),
    # Wrong requests
    ("POST", "/api/chat", b""),
    ("POST", "/api/chat", b"{"),
    ("POST", "/api/chat", {"messages": HI}),
    ("POST", "/api/chat", CHAT | {"model": "nobody"}),
    ("POST", "/api/chat", CHAT | {"messages": 5}),
    ("POST", "/api/chat", CHAT | {"messages": [{"role": "user", "content": 5}]}),
    ("POST", "/api/chat", CHAT | {"stream": "no"}),
    ("POST", "/api/chat", CHAT | {"keep_alive": "soon"}),
    ("POST", "/api/chat", CHAT | {"keep_alive": True}),
    ("POST", "/api/chat", CHAT | {"top_logprobs": 21}),
    ("POST", "/api/chat", CHAT | {"think": "much"}),
    ("POST", "/api/chat", CHAT | {"messages": [{"role": "user", "content": "", "images": ["?"]}]}),
    ("POST", "/api/generate", {"prompt": "hi"}),
    ("POST", "/api/generate", GENERATE | {"model": "nobody"}),
    ("POST", "/api/generate", GENERATE | {"suffix": "x"}),
    ("POST", "/api/generate", GENERATE | {"raw": True, "system": "x"}),
    ("POST", "/api/embed", {"model": "nobody", "input": "hi"}),
    ("POST", "/api/embeddings", {"prompt": "hi"}),
    ("POST", "/api/show", {"model": "nobody"}),
    ("POST", "/api/show", {}),
    ("POST", "/api/show", b""),
    ("POST", "/api/pull", {"model": "nobody-has-this"}),
    ("DELETE", "/api/delete", {"model": "nobody"}),
    ("POST", "/api/generate", {"model": "chat", "keep_alive": 0}),
]
"""In this order: lists show what was loaded before."""

DIFFERENT: list[tuple[str, Any, tuple[int, int]]] = [
    # Ollama answers with an empty vector.
    ("/api/embeddings", {"model": "embed", "input": "hi"}, (200, 400)),
    ("/api/embeddings", {"model": "embed", "prompt": ""}, (200, 400)),
    # llama.cpp has a form for tools with any template, and templates that think not leave it out.
    ("/api/chat", CHAT | ONE | {"tools": [TOOL]}, (400, 200)),
    ("/api/chat", CHAT | ONE | {"think": True}, (400, 200)),
    # Ollama ignores an image that the model cannot see, and reads no data URL.
    (
        "/api/chat",
        CHAT | ONE | {"messages": [{"role": "user", "content": "x", "images": ["iVBORw0KGgo="]}]},
        (200, 400),
    ),
    # The model's own template is used, and no state is kept between two requests.
    ("/api/generate", GENERATE | ONE | {"template": "{{ .Prompt }}"}, (200, 400)),
    ("/api/generate", GENERATE | ONE | {"context": [1]}, (200, 400)),
    # The client is to blame.
    ("/api/embed", {"input": "hi"}, (500, 404)),
    ("/api/chat", CHAT | ONE | {"options": {"num_predict": "5"}}, (500, 400)),
    ("/api/chat", CHAT | ONE | {"format": "yaml"}, (500, 400)),
    ("/api/chat", CHAT | ONE | {"keep_alive": "600"}, (400, 200)),
    ("/api/copy", {"source": "chat", "destination": "chat2"}, (200, 501)),
]
ONLY_OLLAMA = {
    "/api/generate": {"context"},
    "/api/show": {"tensors", "template", "parameters", "system", "license"},
}
"""Fields that are left out on purpose."""


class Sides(NamedTuple):
    """A real Ollama and a `pomona up` with the same models under the same names."""

    ollama: str
    pomona: str
    session: aiohttp.ClientSession

    async def ask(self, method: str, path: str, body: Any) -> list[tuple[int, str, Any]]:
        """Return the status, the media type and the answer of each: one object, text, or a list of lines."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        answers = []
        for url in (self.ollama, self.pomona):
            async with self.session.request(method, url + path, data=data) as response:
                text = await response.text()
                answers.append((response.status, response.content_type if text else "", read(text)))
        return answers


@pytest.fixture
async def sides(start: Start, tmp_path: Path, unused_tcp_port: int) -> AsyncIterator[Sides]:
    chat, embed = tmp_path / "chat.gguf", tmp_path / "embed.gguf"
    tiny_gguf.write(chat)
    tiny_gguf.write(embed, pooling=gguf.PoolingType.MEAN, name="embedder")
    up = start(
        manifest(
            tmp_path / "all.yaml",
            make_manifest(MODELS, name="chat", source=f"file://{chat}", memoryBytes=GIB),
            service("chat", "chat"),
            make_manifest(MODELS, name="embed", source=f"file://{embed}", memoryBytes=GIB),
            service("embed", "embed", mode="embeddings"),
        )
    )
    async with (
        OllamaServer(tmp_path / "ollama", unused_tcp_port) as daemon,
        aiohttp.ClientSession(timeout=CALL) as session,
    ):
        daemon.add("chat", chat)
        daemon.add("embed", embed)
        url = await up.url()
        for name in ("chat", "embed"):
            await up.says(f"{name}: Ready")
        yield Sides(daemon.url, url, session)


def read(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        try:
            return [json.loads(line) for line in text.splitlines()]
        except json.JSONDecodeError:
            return text


def describe(value: Any, left_out: set[str]) -> Any:
    """Return the fields and types of an answer; of a list, those of its items, each once."""
    if isinstance(value, dict):
        return {key: describe(item, left_out) for key, item in value.items() if key not in left_out}
    if isinstance(value, list):
        kinds: list[Any] = []
        for item in value:
            if (kind := describe(item, left_out)) not in kinds:
                kinds.append(kind)
        return kinds
    return "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__


@pytest.mark.long
async def test_answers_have_the_forms_of_a_real_ollama(sides: Sides) -> None:
    different: dict[str, Any] = {}
    for method, path, body in SAME:
        theirs, ours = (
            (status, kind, describe(answer, ONLY_OLLAMA.get(path, set())))
            for status, kind, answer in await sides.ask(method, path, body)
        )
        if theirs != ours:
            different[f"{method} {path} {body!r}"] = (theirs, ours)
    assert different == {}, json.dumps(different, indent=1)


@pytest.mark.long
async def test_what_differs_on_purpose_is_known(sides: Sides) -> None:
    seen = []
    for path, body, _ in DIFFERENT:
        theirs, ours = await sides.ask("POST", path, body)
        seen.append((path, body, (theirs[0], ours[0])))
        if ours[0] >= 400:
            assert set(ours[2]) == {"error"}
    assert seen == DIFFERENT


@pytest.mark.long
async def test_models_are_described_alike(sides: Sides) -> None:
    theirs, ours = (
        {m["name"]: m for m in answer["models"]} for _, _, answer in await sides.ask("GET", "/api/tags", None)
    )
    assert set(theirs) == set(ours) == {"chat:latest", "embed:latest"}
    for name, model in ours.items():
        for field in ("format", "family", "families", "parameter_size"):
            assert model["details"][field] == theirs[name]["details"][field]
        (_, _, their_show), (_, _, our_show) = await sides.ask("POST", "/api/show", {"model": name})
        left_out = ONLY_OLLAMA["/api/show"]
        assert {key for key in their_show if key not in left_out} == {key for key in our_show if key not in left_out}
        info = our_show["model_info"]
        assert set(info) <= set(their_show["model_info"])
        known = {key: their_show["model_info"][key] for key in info}
        assert info | {"llama.context_length": 0} == known | {"llama.context_length": 0}
        assert info["llama.context_length"] == 512  # what is served, and not what the model could do
        assert set(their_show["capabilities"]) <= set(our_show["capabilities"])


@pytest.mark.long
async def test_ollamas_own_client_sees_the_same(sides: Sides) -> None:
    seen = []
    for url in (sides.ollama, sides.pomona):
        async with ollama.AsyncClient(host=url) as client:
            whole = await client.chat("chat", HI)
            stream = [part async for part in await client.chat("chat", HI, stream=True)]
            pieces = [part async for part in await client.generate("chat", "hi", stream=True)]
            vectors = await client.embed("embed", ["hi", "you"])
            older = await client.embeddings("embed", "hi")
            listed = await client.list()
            loaded = await client.ps()
            refused = []
            for attempt in (client.chat("nobody", HI), client.generate("nobody", "hi"), client.show("nobody")):
                with pytest.raises(ollama.ResponseError) as error:
                    await attempt
                refused.append(error.value.status_code)
            with pytest.raises(ollama.ResponseError):
                _ = [step async for step in await client.pull("nobody-has-this", stream=True)]
        seen.append(
            {
                "whole": whole.message.content,
                "stream": "".join(part.message.content or "" for part in stream),
                "done": [part.done for part in (stream[0], stream[-1], pieces[-1])],
                "reasons": [whole.done_reason, stream[-1].done_reason, pieces[-1].done_reason],
                "pieces": "".join(part.response for part in pieces),
                "counts": whole.eval_count == stream[-1].eval_count,
                "vectors": [len(vector) for vector in (*vectors.embeddings, older.embedding)],
                "listed": sorted(model.model or "" for model in listed.models),
                "loaded": sorted(model.model or "" for model in loaded.models),
                "refused": refused,
            }
        )
        assert all(abs(sum(x * x for x in vector) - 1) < 1e-3 for vector in vectors.embeddings)
    theirs, ours = seen
    assert ours == theirs
    assert ours["whole"] == ours["stream"] == tiny_gguf.SENTENCE


@pytest.mark.long
async def test_refusals_are_said_by_ollamas_own_client(sides: Sides) -> None:
    async with ollama.AsyncClient(host=sides.pomona) as client:
        with pytest.raises(ollama.ResponseError, match="serve it with `pomona up`"):
            await client.create("x", from_="chat")
        with pytest.raises(ollama.ResponseError, match="not published"):
            await client.push("chat")
        with pytest.raises(ollama.ResponseError, match="the YAML"):
            await client.copy("chat", "x")
        with pytest.raises(ollama.ResponseError, match="was not added by a command"):
            await client.delete("chat")
        with pytest.raises(ollama.ResponseError, match="a client can add a name of `pomona catalog`"):
            _ = [step async for step in await client.pull("nobody", stream=True)]
        assert [step.status async for step in await client.pull("chat", stream=True)][-1] == "success"
    with ollama.Client(host=sides.pomona) as synchronous:
        assert (await asyncio.to_thread(synchronous.show, "chat")).capabilities
    async with sides.session.get(f"{sides.pomona}/api/version") as response:
        assert await response.json() == {"version": VERSION}


@pytest.mark.long
async def test_ollamas_own_command_works(sides: Sides, tmp_path: Path) -> None:
    run = functools.partial(run_command, sides.pomona, tmp_path)
    for command in ("list", "ps"):
        code, said = await run(command)
        assert (code, "chat:latest" in said, "embed:latest" in said) == (0, True, True), said
    code, said = await run("show", "chat")
    assert (code, "llama" in said, "completion" in said) == (0, True, True), said
    code, said = await run("run", "chat", "hi")
    assert (code, tiny_gguf.SENTENCE in said) == (0, True), said
    assert (await run("pull", "chat"))[0] == 0
    assert (await run("stop", "chat"))[0] == 0
    for words, way in (
        (("run", "nobody", "hi"), "a client can add a name"),
        (("rm", "chat"), "was not added by a command"),
        (("cp", "chat", "other"), "the YAML"),
    ):
        code, said = await run(*words)
        assert (code, way in said) == (1, True), said


@pytest.mark.long
async def test_an_ollama_may_be_the_engine(
    start: Start, tmp_path: Path, unused_tcp_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = tmp_path / "tiny.gguf"
    tiny_gguf.write(weights)
    async with OllamaServer(tmp_path / "ollama", unused_tcp_port) as daemon:
        monkeypatch.setenv("OLLAMA_HOST", daemon.url)
        model = make_manifest(MODELS, name="one", source=f"file://{weights}", memoryBytes=GIB)
        of_ollama = service("chat", "one", runtime="ollama", extraArgs=[], hardware={"accelerator": "metal"})
        up = start(manifest(tmp_path / "all.yaml", model, of_ollama))
        url = await up.url()
        await up.says("chat: Ready")
        async with ollama.AsyncClient(host=url) as client:
            stream = [part async for part in await client.chat("chat", HI, stream=True, think=False)]
            assert "".join(part.message.content or "" for part in stream) == tiny_gguf.SENTENCE
            assert (stream[-1].done, stream[-1].done_reason, stream[-1].eval_count) == (True, "stop", 18)
            raw = await client.generate("chat", "hi", raw=True, options={"num_predict": 3})
            assert (raw.done_reason, bool(raw.response)) == ("length", True)
            assert len((await client.embed("chat", ["hi", "you"])).embeddings) == 2
            assert [model.model for model in (await client.ps()).models] == ["chat:latest"]
            with pytest.raises(ollama.ResponseError, match="does not support tools"):
                await client.chat("chat", HI, tools=[TOOL])
