"""Facts about a shared daemon without a request to it: its address, the owners of its models, and its limits."""

import asyncio
import json
from pathlib import Path

import pytest
from aiohttp import web

from crds.serving import ServingOptions
from metal_agent import daemons
from metal_agent.daemons import SILENT_CHECKS, Daemons, SharedDaemon
from runtimes import daemon, omlx_client
from runtimes.ollama_client import Ollama, full_name
from runtimes.omlx_client import Omlx
from runtimes.registry import RUNTIMES
from runtimes.runtime import RuntimeDemand
from runtimes.runtime_choice import refuse_demand
from tests.support.stub_server import serve_stub


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("", "http://127.0.0.1:11434"),
        ("0.0.0.0", "http://127.0.0.1:11434"),
        ("0.0.0.0:1234", "http://127.0.0.1:1234"),
        (":1234", "http://127.0.0.1:1234"),
        ("http://localhost", "http://127.0.0.1:80"),
        ("https://ollama.example", "http://127.0.0.1:443"),
        ("http://127.0.0.1:1234/", "http://127.0.0.1:1234"),
        ("[::1]:1234", "http://127.0.0.1:1234"),
        ("nonsense:port", "http://127.0.0.1:11434"),
    ],
)
def test_ollama_is_contacted_on_loopback_at_the_port_of_its_owner(host: str, url: str) -> None:
    assert Ollama({"OLLAMA_HOST": host} if host else {}).url == url


async def test_no_key_of_the_owners_environment_reaches_ollama(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLLAMA_API_KEY", "sk-of-ollama-com")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    seen: dict[str, str] = {}

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        seen[request.path] = str(request.headers)
        return web.json_response({"models": [], "modelfile": "", "done": True})

    async with serve_stub(answer) as url:
        ollama = Ollama({"OLLAMA_HOST": url})
        await ollama.load("pomona-1/tiny:1-1")
        await ollama.close()
    assert seen.keys() == {"/api/show", "/api/ps", "/api/generate"}
    assert not [headers for headers in seen.values() if "sk-of-ollama-com" in headers]


def settings(folder: Path, **changed: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "settings.json").write_text(json.dumps({"version": "1.0", "unknown": {"later": 1}} | changed))


async def test_model_that_goes_while_ollama_is_asked_is_in_the_way_of_none() -> None:
    """Two looks at once: the one forgets a model of the owner's that the other has listed before."""
    listed = [["owners", "others"], [], ["pomona-1/tiny"]]

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        names = listed.pop(0) if request.path == "/api/ps" else []
        if request.path == "/api/show" and (await request.json())["model"] == "others":
            await ollama.list_loaded()
        models = [{"name": name, "digest": name} for name in names]
        return web.json_response({"models": models, "modelfile": "", "done": True})

    async with serve_stub(answer) as url:
        ollama = Ollama({"OLLAMA_HOST": url})
        try:
            await ollama.load("pomona-1/tiny")
        finally:
            await ollama.close()
    assert listed == []


def test_omlx_is_found_by_its_settings(tmp_path: Path) -> None:
    base = tmp_path / ".omlx"
    settings(base, server={"port": 8123}, model={"model_dirs": [str(tmp_path / "weights")]}, auth={"api_key": "sk-1"})
    omlx = Omlx({}, tmp_path)
    assert omlx.url == "http://127.0.0.1:8123"
    assert omlx.api_key == "sk-1"
    assert omlx._find_folder() == tmp_path / "weights"
    settings(base, auth={"api_key": "sk-2"})
    assert omlx.api_key == "sk-2", "a key that is changed is known"


def test_omlxs_app_may_keep_its_data_elsewhere(tmp_path: Path) -> None:
    pointer = tmp_path / "Library" / "Application Support" / "oMLX" / "base-path"
    pointer.parent.mkdir(parents=True)
    pointer.write_text(f"{tmp_path / 'external'}\n")
    settings(tmp_path / "external", server={"port": 8200})
    assert Omlx({}, tmp_path).url == "http://127.0.0.1:8200"
    assert Omlx({"OMLX_BASE_PATH": str(tmp_path / "none")}, tmp_path).url == "http://127.0.0.1:8000"


@pytest.mark.parametrize("text", [b"", b"{", b'{"auth": 3}', b'{"auth": {"api_key": "\xff"}}'])
def test_invalid_settings_are_ignored(tmp_path: Path, text: bytes) -> None:
    (tmp_path / ".omlx").mkdir()
    (tmp_path / ".omlx" / "settings.json").write_bytes(text)
    omlx = Omlx({}, tmp_path)
    assert (omlx.url, omlx.api_key) == ("http://127.0.0.1:8000", None)
    assert omlx._find_folder() == tmp_path / ".omlx" / "models"


def test_base_path_that_is_no_text_is_ignored(tmp_path: Path) -> None:
    folder = tmp_path / "Library" / "Application Support" / "oMLX"
    folder.mkdir(parents=True)
    (folder / "base-path").write_bytes(b"/\xff/omlx")
    assert Omlx({}, tmp_path)._find_folder() == tmp_path / ".omlx" / "models"


async def test_status_that_http_does_not_name_is_an_error_of_the_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def call(*_: object, **__: object) -> tuple[int, bytes]:
        return 520, b"web server returned an unknown error"

    monkeypatch.setattr(Omlx, "_send_request", call)
    with pytest.raises(daemon.DaemonError, match="520") as refused:
        await Omlx({}, tmp_path).load("m")
    assert refused.value.reason == "DaemonRefused"


def test_the_environment_of_the_agent_comes_first(tmp_path: Path) -> None:
    settings(tmp_path / ".omlx", auth={"api_key": "sk-1"})
    environment = {"OMLX_API_KEY": "sk-env", "OMLX_MODEL_DIR": "/a,/b", "OMLX_PORT": "9000"}
    omlx = Omlx(environment, tmp_path)
    assert (omlx.api_key, str(omlx._find_folder()), omlx.url) == ("sk-env", "/a", "http://127.0.0.1:9000")


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (b'{"error": {"message": "no room", "type": "server_error"}}', "no room"),
        (b'{"detail": "no room"}', "no room"),
        (b'{"error": "no room"}', "no room"),
        (b"<html>no room", "<html>no room"),
        (b'{"error": "\xff"}', '{"error": "\N{REPLACEMENT CHARACTER}"}'),
        (b"", "an empty answer"),
    ],
)
def test_either_form_of_an_error_is_quoted(said: bytes, words: str) -> None:
    assert omlx_client._quote_error(said) == words


def test_name_depends_on_the_model_and_on_the_agent() -> None:
    contents = {daemon.digest_content([weights], length) for weights in ("sha", "other") for length in (4096, 8192)}
    assert len(contents) == 4
    marks = [daemon.owner_mark(folder) for folder in ("/a", "/b")]
    for client in (Ollama({}), Omlx({}, Path("/none"))):
        names = {client.build_name(mark, "qwen", content) for mark in marks for content in contents}
        assert len(names) == 8
        assert all(name.startswith("pomona-") for name in names)


def test_name_is_the_same_in_each_version_of_pomona() -> None:
    """Under another name, the daemon's copy of the weights would be brought again after an update."""
    content = daemon.digest_content(["sha256:1", "sha256:2"], 4096)
    assert content == "a470a18dec-8b926d7559"


def test_omlx_runs_on_hosts_only() -> None:
    asked = RuntimeDemand(format="mlx", accelerator="cpu", in_pods=True)
    problem = refuse_demand(RUNTIMES["omlx"], asked)
    assert problem
    assert "set hardware.accelerator to metal" in problem
    assert refuse_demand(RUNTIMES["omlx"], asked._replace(accelerator="metal", in_pods=False)) is None


def test_ollama_runs_on_hosts_and_in_pods() -> None:
    asked = RuntimeDemand(format="ollama", accelerator="cpu", in_pods=True)
    assert refuse_demand(RUNTIMES["ollama"], asked._replace(options=ServingOptions(parallel=4))) is None
    assert refuse_demand(RUNTIMES["ollama"], asked._replace(accelerator="metal", in_pods=False)) is None
    assert "no image" in (refuse_demand(RUNTIMES["ollama"], asked._replace(accelerator="intel-gaudi")) or "")


def test_settings_that_only_the_owner_of_ollama_decides_are_refused() -> None:
    asked = RuntimeDemand(format="gguf", accelerator="metal", in_pods=False)
    assert "parallel" in (refuse_demand(RUNTIMES["ollama"], asked._replace(options=ServingOptions(parallel=4))) or "")
    remembering = asked._replace(options=ServingOptions(prompt_cache="1Gi"))
    assert "cannot do promptCache on a host" in (refuse_demand(RUNTIMES["ollama"], remembering) or "")
    assert refuse_demand(RUNTIMES["ollama"], asked._replace(options=ServingOptions(prompt_cache=0))) is None
    assert "takes none" in (
        refuse_demand(RUNTIMES["ollama"], asked._replace(options=ServingOptions(extra_args=["--temp", "1"]))) or ""
    )


@pytest.mark.parametrize("in_pods", [False, True])
def test_split_model_is_refused_for_ollama_with_the_way_out(in_pods: bool) -> None:
    asked = RuntimeDemand(format="gguf", accelerator="cpu" if in_pods else "metal", in_pods=in_pods, is_split=True)
    problem = refuse_demand(RUNTIMES["ollama"], asked)
    assert problem
    assert "set runtime to llama.cpp" in problem
    assert refuse_demand(RUNTIMES["llama.cpp"], asked) is None


async def test_daemon_that_is_not_installed_is_not_contacted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    async def loaded(self: Ollama) -> list[tuple[str, int | None]]:
        asked.append(self.url)
        return []

    monkeypatch.setattr(Ollama, "list_loaded", loaded)
    absent, present = Ollama({"PATH": ""}), Ollama({"PATH": "", "OLLAMA_HOST": "127.0.0.1:1"})
    for ollama in (absent, present):
        await SharedDaemon(ollama, "pomona-1", lambda: None).check_models()
    assert asked == [present.url]
    none = Daemons(tmp_path, [absent])
    await none.check_models()
    assert none.usable() == []


class _Odd(Ollama):
    """A daemon that raises unexpected errors."""

    def __init__(self) -> None:
        super().__init__({"PATH": "", "OLLAMA_HOST": "127.0.0.1:1"})
        self.defect: Exception | None = RuntimeError("nobody foresaw it")
        self.cleaned = 0

    async def list_loaded(self) -> list[tuple[str, int | None]]:
        if self.defect:
            raise self.defect
        return []

    async def list_marked(self, owner: str) -> set[str]:
        assert owner.startswith("pomona-")
        self.cleaned += 1
        if self.defect:
            raise self.defect
        return set()

    def installed(self) -> bool:
        return self.defect is not None


async def test_failed_check_ends_no_process() -> None:
    odd = _Odd()
    shared = SharedDaemon(odd, "pomona-1", lambda: None)
    await shared.check_models()
    handle = shared.adopt("pomona-1/tiny:1-1")
    assert handle
    await shared.check_models()
    ended = asyncio.ensure_future(handle.wait())
    await asyncio.sleep(0)
    assert not ended.done()
    # A daemon without an installation is still checked as long as it had one of Pomona's models.
    odd.defect = None
    await shared.check_models()
    assert (await asyncio.wait_for(ended, 5)).reason == "Unloaded"
    await shared.check_models()
    assert "not installed" in shared.problem


async def test_failed_clean_up_is_repeated(tmp_path: Path) -> None:
    odd = _Odd()
    odd.defect = None
    daemons = Daemons(tmp_path, [odd])
    shared = daemons.get("ollama")
    assert shared
    shared.problem = ""
    for odd.defect in (daemon.DaemonError(daemon.SILENT, "slow"), RuntimeError("nobody foresaw it"), None):
        await daemons.remove_unwanted(list)
    assert odd.cleaned == 3
    await daemons.remove_unwanted(list)
    assert odd.cleaned == 3


async def test_only_repeated_silence_counts_as_the_end() -> None:
    odd = _Odd()
    shared = SharedDaemon(odd, "pomona-1", lambda: None)
    silent, busy = daemon.DaemonError(daemon.SILENT, "silent"), daemon.DaemonError("DaemonBusy", "busy")

    async def ask() -> list[tuple[str, int | None]]:
        await asyncio.sleep(0)
        raise error

    odd.list_loaded = ask  # type: ignore[method-assign]
    error = silent
    await shared.check_models()
    handle = shared.adopt("pomona-1/tiny:1-1")
    assert handle
    ended = asyncio.ensure_future(handle.wait())
    await asyncio.gather(*(shared.check_models() for _ in range(SILENT_CHECKS)))
    error = busy
    for _ in range(SILENT_CHECKS):
        await shared.check_models()
    error = silent
    for _ in range(SILENT_CHECKS - 1):
        await shared.check_models()
    assert not ended.done()
    await shared.check_models()
    assert (await asyncio.wait_for(ended, 5)).reason == daemon.SILENT


async def test_requests_to_unload_back_off(monkeypatch: pytest.MonkeyPatch) -> None:
    odd, pauses = _Odd(), list[int]()
    shared = SharedDaemon(odd, "pomona-1", lambda: None)
    await shared.check_models()
    handle = shared.adopt("pomona-1/tiny:1-1")
    assert handle

    async def unload(_: str) -> None:
        raise daemon.DaemonError("DaemonRefused" if len(pauses) < 3 else daemon.NOT_RUNNING, "not now")

    def pause(failures: int, **_: float) -> float:
        pauses.append(failures)
        return 0

    monkeypatch.setattr(odd, "unload", unload)
    monkeypatch.setattr(daemons, "backoff_seconds", pause)
    await handle.end(1)
    assert pauses == [1, 2, 3]


@pytest.mark.parametrize(
    ("name", "full"),
    [
        ("llama3", "library/llama3:latest"),
        ("llama3:8b", "library/llama3:8b"),
        ("library/Llama3:8B", "library/llama3:8b"),
        ("registry.ollama.ai/library/llama3", "library/llama3:latest"),
        ("registry.ollama.ai/nobody/llama3", "nobody/llama3:latest"),
        ("nobody/llama3:8b", "nobody/llama3:8b"),
        ("hf.co/nobody/llama3-GGUF:Q4_K_M", "hf.co/nobody/llama3-gguf:q4_k_m"),
    ],
)
def test_one_model_of_ollama_has_one_full_name(name: str, full: str) -> None:
    assert full_name(name) == full
