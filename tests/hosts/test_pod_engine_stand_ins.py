"""The stand-ins of vLLM, SGLang and TGI: they take what Pomona renders, and answer as the real engines do."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest

from crds.serving import ServingOptions
from devices.sockets import loopback_port
from devices.vendors import VENDORS
from runtimes.pod import EnginePod, PodServing
from runtimes.registry import RUNTIMES
from runtimes.serving import Listen, Serving
from tests.controlplane.kubelet import images
from tests.support.eventually import eventually
from tests.support.pod_engines.dialects import DIALECTS, read_recording
from tests.support.pod_engines.stand_in import SENTENCE
from tests.support.tiny_models import tiny_mlx

CHAT: Final[dict[str, Any]] = {"model": "chat", "messages": [{"role": "user", "content": "Hi"}]}
KEY: Final = "sekret"


def pod_of(engine: str) -> EnginePod:
    pod = RUNTIMES[engine].pod
    assert pod is not None
    return pod


def command(engine: str, arguments: Sequence[str]) -> list[str]:
    """Return the command line of the container, as the kubelet makes it of the pod and the image."""
    pod = pod_of(engine)
    image = images.find(pod.images["nvidia"])
    assert image is not None
    return [*(pod.command or image.entrypoint), *arguments]


def variables(engine: str) -> dict[str, str]:
    image = images.find(pod_of(engine).images["nvidia"])
    assert image is not None
    return dict(image.environment)


def arguments(engine: str, model: Path, extra: Sequence[str] = ()) -> list[str]:
    options = ServingOptions(context_length=512, parallel=2, extra_args=[*extra])
    serving = Serving("chat", str(model), options)
    return pod_of(engine).arguments(PodServing(serving, Listen("127.0.0.1", 0), VENDORS["nvidia"], 2))


@asynccontextmanager
async def serve(
    engine: str, model: Path, environment: Mapping[str, str] | None = None, extra: Sequence[str] = ()
) -> AsyncIterator[aiohttp.ClientSession]:
    argv = [*command(engine, arguments(engine, model)), *extra]
    process = await asyncio.create_subprocess_exec(*argv, env={**variables(engine), **(environment or {})})
    try:
        port = await eventually(lambda: _port(process))
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
            yield session
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0


def _port(process: asyncio.subprocess.Process) -> int | None:
    if process.returncode is not None:
        raise RuntimeError(f"it ended with status {process.returncode}")
    return loopback_port(process.pid)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tiny_mlx.write(tmp_path / "model", n_embd=128)
    return tmp_path / "model"


@pytest.mark.parametrize("engine", DIALECTS)
async def test_stand_in_takes_what_is_rendered_and_answers(engine: str, model: Path) -> None:
    async with serve(engine, model) as session:
        assert (await session.get(pod_of(engine).health_path)).status == 200
        answer = await (await session.post("/v1/chat/completions", json=CHAT)).json()
        assert answer["choices"][0]["message"]["content"] == SENTENCE
        text = await (await session.post("/v1/chat/completions", json=CHAT | {"stream": True})).text()
        lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
        assert lines[-1] == "[DONE]"
        deltas = [choice["delta"] for line in lines[:-1] for choice in json.loads(line)["choices"]]
        assert "".join(delta["content"] for delta in deltas) == SENTENCE
        metrics = pod_of(engine).metrics
        assert metrics is not None
        counted = dict(line.rsplit(" ", 1) for line in (await (await session.get("/metrics")).text()).splitlines())
        assert float(counted[str(metrics.generated_tokens)]) == 2 * len(SENTENCE.split())
        assert counted[str(metrics.requests_running)] == "0"
        assert (await (await session.get("/v1/models")).json())["data"][0]["max_model_len"] == 512


@pytest.mark.parametrize(
    ("engine", "says"),
    [
        ("vllm", "vllm: error: unrecognized arguments: --no-such-option"),
        ("sglang", "launch_server.py: error: unrecognized arguments: --no-such-option"),
        ("tgi", "error: unexpected argument '--no-such-option' found"),
    ],
)
async def test_unknown_option_is_refused_in_the_words_of_the_engine(engine: str, says: str, model: Path) -> None:
    argv = [*command(engine, arguments(engine, model)), "--no-such-option"]
    process = await asyncio.create_subprocess_exec(*argv, env=variables(engine), stderr=asyncio.subprocess.PIPE)
    _output, errors = await process.communicate()
    assert process.returncode == 2
    assert says in errors.decode()


@pytest.mark.parametrize("engine", DIALECTS)
async def test_folder_without_weights_is_refused(engine: str, tmp_path: Path) -> None:
    argv = command(engine, arguments(engine, tmp_path))
    process = await asyncio.create_subprocess_exec(*argv, env=variables(engine), stderr=asyncio.subprocess.PIPE)
    assert b"has no config.json" in (await process.communicate())[1]
    assert process.returncode == 1


@pytest.mark.parametrize(
    ("engine", "environment", "extra"),
    [
        ("vllm", {"VLLM_API_KEY": KEY}, ()),
        ("sglang", {}, ("--api-key", KEY)),
        ("tgi", {"API_KEY": KEY}, ()),
    ],
)
async def test_stand_in_checks_the_key_as_the_engine_does(
    engine: str, environment: Mapping[str, str], extra: Sequence[str], model: Path
) -> None:
    async with serve(engine, model, environment, extra) as session:
        assert (await session.get("/health")).status == (await session.get("/metrics")).status == 200
        assert (await session.post("/v1/chat/completions", json=CHAT)).status == 401
        with_key = {"Authorization": f"Bearer {KEY}"}
        assert (await session.post("/v1/chat/completions", json=CHAT, headers=with_key)).status == 200
        open_status = (await session.post("/invocations", json=CHAT)).status
        assert open_status == (200 if engine == "vllm" else 401)


async def test_stand_in_of_vllm_answers_as_was_recorded(model: Path) -> None:
    async with serve("vllm", model, {"VLLM_API_KEY": KEY}) as session:
        for exchange in read_recording("vllm_server")["answers"]:
            headers = {"Authorization": f"Bearer {KEY}"} if exchange["with_key"] else {}
            asked = session.request(exchange["method"], exchange["path"], json=exchange["body"], headers=headers)
            async with asked as response:
                assert response.status == exchange["status"]
                _compare(await response.text(), exchange["answer"])


def _compare(answer: str, recorded: str) -> None:
    """Assert that an error is the recorded one, and that each field of another answer is one that was recorded."""
    if not recorded.startswith("{"):
        kinds = [[line.partition(":")[0] for line in text.splitlines()] for text in (answer, recorded)]
        assert set(kinds[0]) == set(kinds[1])
        return
    ours, theirs = json.loads(answer), json.loads(recorded)
    if "error" in theirs:
        assert ours == theirs
    else:
        _compare_fields(ours, theirs)


def _compare_fields(ours: Any, theirs: Any) -> None:
    if isinstance(ours, dict):
        for name, value in ours.items():
            assert name in theirs
            _compare_fields(value, theirs[name])
    elif isinstance(ours, list):
        for our, their in zip(ours, theirs, strict=True):
            _compare_fields(our, their)
    else:
        assert type(ours) is type(theirs) or ours is None or theirs is None
