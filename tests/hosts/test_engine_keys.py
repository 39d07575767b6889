"""Only the proxy and the agent can use an engine: the real servers refuse everything without the key of the process."""

import os
import stat
from pathlib import Path

import aiohttp
import psutil
import pytest

from tests.support.engine_process import start_engine
from tests.support.eventually import eventually
from tests.support.local_host import Machine, MakeAssignment, ready
from tests.support.tiny_models import tiny_gguf, tiny_mlx

EVIL = "http://evil.example"
PATHS = (
    ("GET", "/metrics"),
    ("GET", "/slots"),
    ("GET", "/props"),
    ("POST", "/props"),
    ("POST", "/lora-adapters"),
    ("GET", "/v1/models"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
)
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}


@pytest.fixture(params=["llama.cpp", "mlx-lm"])
def weights(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    """Runtime and model of each server that runs here."""
    if request.param == "mlx-lm":
        tiny_mlx.write(tmp_path / "tiny")
        return request.param, tmp_path / "tiny"
    tiny_gguf.write(tmp_path / "tiny.gguf")
    return request.param, tmp_path / "tiny.gguf"


@pytest.mark.parametrize("key", [None, "Bearer", "Bearer wrong"])
async def test_requests_without_the_key_are_refused_and_web_pages_read_nothing(
    tmp_path: Path, weights: tuple[str, Path], key: str | None
) -> None:
    runtime, model = weights
    headers = {"Origin": EVIL, "Content-Type": "text/plain"} | ({"Authorization": key} if key else {})
    async with start_engine(tmp_path, model, runtime=runtime) as engine, aiohttp.ClientSession() as page:
        assert (await engine.ready()).ok
        for method, path in PATHS:
            async with page.request(
                method, f"{engine.url}{path}", json=CHAT if method == "POST" else None, headers=headers
            ) as response:
                assert response.status == 401, (method, path)
                assert _allowed(response) == {}, (method, path)
        preflight = {"Origin": EVIL, "Access-Control-Request-Method": "POST"}
        async with page.options(f"{engine.url}/v1/chat/completions", headers=preflight) as response:
            assert "Access-Control-Allow-Origin" not in response.headers


async def test_key_opens_inference_and_no_slots(tmp_path: Path) -> None:
    tiny_gguf.write(tmp_path / "tiny.gguf")
    async with start_engine(tmp_path, tmp_path / "tiny.gguf") as engine:
        assert (await engine.ready()).ok
        assert "llamacpp:" in await engine.get("/metrics")
        assert (await engine.chat())["choices"]
        key = {"Authorization": f"Bearer {engine.token}"}
        async with aiohttp.ClientSession(headers=key) as session:
            async with session.get(f"{engine.url}/slots") as response:
                assert response.status == 501
            async with session.post(f"{engine.url}/props", json={}) as response:
                assert response.status == 501


@pytest.mark.parametrize(
    "named", [{"model": "/etc"}, {"adapters": "/etc"}, {"draft_model": "/etc"}, {"model": "org/another"}]
)
async def test_mlx_server_loads_nothing_that_a_request_names(tmp_path: Path, named: dict[str, str]) -> None:
    tiny_mlx.write(tmp_path / "tiny")
    async with start_engine(tmp_path, tmp_path / "tiny", runtime="mlx-lm") as engine:
        assert (await engine.ready()).ok
        refused = await engine.ask("/v1/chat/completions", **CHAT | {"model": "default_model"} | named)
        assert next(iter(named)) in refused["error"]
        assert (await engine.chat())["choices"], "it serves on"


async def test_key_is_in_a_private_file_and_nowhere_else(machine: Machine, assignment: MakeAssignment) -> None:
    machine.supervisor.assign([assignment()])
    process = psutil.Process(await ready(machine))
    runner = machine.runners["u1"]
    (path,) = (machine.folder / "keys").iterdir()
    key = path.read_text().strip()
    assert runner.api_key == key
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    record = (machine.folder / "processes" / "u1.json").read_text()
    seen = [*process.cmdline(), *process.environ().values(), record, repr(runner.build_status(1)), repr(runner.record)]
    assert not [text for text in seen if key in text]
    machine.supervisor.assign([])
    await eventually(lambda: not path.exists())


async def test_each_process_has_another_key(machine: Machine, assignment: MakeAssignment) -> None:
    machine.supervisor.assign([assignment()])
    first = await ready(machine)
    before = machine.runners["u1"].api_key
    psutil.Process(first).kill()
    await eventually(lambda: machine.runners["u1"].state.phase == "Failed")
    await ready(machine)
    assert machine.runners["u1"].api_key not in {before, None}
    assert len(list((machine.folder / "keys").iterdir())) == 1


async def test_next_agent_knows_key_of_the_engine_that_it_adopts(machine: Machine, assignment: MakeAssignment) -> None:
    machine.supervisor.assign([assignment()])
    pid = await ready(machine)
    key = machine.runners["u1"].api_key
    await machine.stop()
    await machine.start()
    assert (machine.runners["u1"].state.pid, machine.runners["u1"].api_key) == (pid, key)
    await machine.runners["u1"].check_liveness()
    assert machine.runners["u1"].is_answering


async def test_engine_whose_key_is_lost_is_started_again(machine: Machine, assignment: MakeAssignment) -> None:
    machine.supervisor.assign([assignment()])
    pid = await ready(machine)
    await machine.stop()
    (path,) = (machine.folder / "keys").iterdir()
    path.unlink()
    await machine.start()
    machine.supervisor.assign([assignment()])
    assert await ready(machine) != pid
    assert not psutil.pid_exists(pid)


async def test_engine_gets_no_credential_of_the_agents_environment(
    machine: Machine, assignment: MakeAssignment, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = ("KUBECONFIG", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY", "HF_TOKEN", "GITHUB_TOKEN", "OMLX_API_KEY")
    for name in secrets:
        monkeypatch.setenv(name, "a-secret")
    monkeypatch.setenv("GGML_METAL_TUNED", "kept")
    machine.supervisor.assign([assignment()])
    environment = psutil.Process(await ready(machine)).environ()
    assert not environment.keys() & set(secrets)
    assert "a-secret" not in environment.values()
    assert environment["GGML_METAL_TUNED"] == "kept"
    assert environment["PATH"] == os.environ["PATH"]


def _allowed(response: aiohttp.ClientResponse) -> dict[str, str]:
    return {name: value for name, value in response.headers.items() if name.startswith("Access-Control-")}
