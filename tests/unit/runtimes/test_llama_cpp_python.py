"""llama-cpp-python, tested with a recording of its real server, because its build takes longer than all tests."""

import importlib
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import aiohttp
import gguf
import pytest
from aiohttp import web

from crds.serving import Mode
from devices import libsystem
from runtimes import llama_cpp_launcher, llama_cpp_python
from runtimes.probe import ProbeResult, generate_token
from runtimes.registry import RUNTIMES
from tests.support.record_llama_cpp_python import CASES, rendered
from tests.support.stub_server import serve_stub
from tests.support.tiny_models.tiny_gguf import SENTENCE

RECORDING: dict[str, Any] = json.loads((Path(__file__).parent / "fixtures/llama_cpp_python.json").read_text())
SERVED = [case for case, record in RECORDING["cases"].items() if "exchanges" in record]
FLAGS = set(re.findall(r"^  (--\w+)", RECORDING["help"], re.MULTILINE))


def answer(case: str, path: str, number: int = 0) -> tuple[int, str]:
    exchanges = [exchange for exchange in RECORDING["cases"][case]["exchanges"] if exchange["path"] == path]
    return exchanges[number]["status"], exchanges[number]["answer"]


def content(case: str) -> str:
    return str(json.loads(answer(case, "/v1/chat/completions")[1])["choices"][0]["message"]["content"])


async def probe(case: str, mode: Mode) -> ProbeResult:
    """Probe a server that replays the recorded answers."""

    async def replay(request: web.BaseRequest) -> web.Response:
        status, text = answer(case, request.path)
        return web.Response(status=status, text=text, content_type="application/json")

    async with serve_stub(replay) as url, aiohttp.ClientSession() as session:
        return await generate_token(session, url, model="chat", token=None, timeout_seconds=10, mode=mode)


@pytest.mark.parametrize("case", CASES)
def test_rendered_arguments_are_the_recorded_ones(case: str) -> None:
    assert rendered(case) == RECORDING["cases"][case]["arguments"], "record anew: record_llama_cpp_python.py"


def test_real_server_accepted_all_arguments() -> None:
    assert SERVED == ["chat", "embeddings", "embeddings without pooling", "quantized cache", "adapter", "tuned"]
    for case in SERVED:
        assert RECORDING["cases"][case]["exit_code"] == -15, "as SIGTERM ends it"
    assert content("quantized cache") == content("tuned") == SENTENCE
    assert content("adapter").strip() == SENTENCE.partition("weights. ")[2]


def test_model_is_served_under_the_name_that_clients_send() -> None:
    assert json.loads(answer("chat", "/v1/models")[1])["data"][0]["id"] == "chat"


@pytest.mark.parametrize(
    ("case", "code", "says"),
    [
        ("missing model", 1, "ValueError: Model path does not exist: /weights/missing.gguf"),
        ("damaged model", 1, "ValueError: Failed to load model from file: /weights/damaged.gguf"),
        ("unknown argument", 2, "__main__.py: error: unrecognized arguments: --no_such_argument 1"),
    ],
)
def test_server_that_cannot_load_ends_with_a_reason(case: str, code: int, says: str) -> None:
    recorded = RECORDING["cases"][case]
    assert (recorded["exit_code"], recorded["last_lines"][-1]) == (code, says)


async def test_probe_classifies_recorded_answers() -> None:
    assert (await probe("chat", "chat")).reason == "Generated"
    assert (await probe("embeddings", "embeddings")).reason == "Embedded"
    refused = await probe("chat", "embeddings")
    assert (refused.ok, refused.reason) == (False, "BadAnswer")
    assert "must be created with embedding=True" in refused.message
    assert (await probe("chat", "rerank")).reason == "NotFound"
    # One list of numbers for each token is no embedding, even with status 200.
    assert (await probe("embeddings without pooling", "embeddings")).reason == "BadAnswer"


def test_server_has_no_health_and_no_metrics() -> None:
    assert answer("chat", "/health")[0] == answer("chat", "/metrics")[0] == 404


def test_tuning_arguments_exist() -> None:
    assert set(RUNTIMES["llama-cpp-python"].tuning) <= FLAGS


def test_environment_has_no_variable_that_is_a_setting() -> None:
    settings = {flag.removeprefix("--").upper() for flag in FLAGS}
    assert {"HOST", "PORT", "SEED", "CACHE"} <= settings
    stated = dict.fromkeys(settings, "1") | {"PATH": os.environ["PATH"]}
    assert llama_cpp_python.build_environment(stated, "linux") == {"PATH": os.environ["PATH"]}


async def test_launcher_adds_the_key_to_the_arguments_inside_and_lets_no_web_page_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The parts of the real package that the launcher replaces or runs, by the names that 0.3.36 has.
    (tmp_path / "llama_cpp" / "server").mkdir(parents=True)
    for name, text in {
        "__init__.py": "",
        "server/__init__.py": "",
        "server/app.py": "class CORSMiddleware:\n    pass\n",
        "server/__main__.py": "import sys\nfrom llama_cpp.server import app\napp.argv = sys.argv\n",
    }.items():
        (tmp_path / "llama_cpp" / name).write_text(text)
    (tmp_path / "key").write_text("sekret\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["pytest"])
    assert llama_cpp_launcher.main(["--model", "m", "--api-key-file", str(tmp_path / "key"), "--n_ctx", "1"]) == 0
    application: Any = importlib.import_module("llama_cpp.server.app")
    assert application.argv[1:] == ["--model", "m", "--n_ctx", "1", "--api_key", "sekret"]
    passed: list[object] = []

    async def answer(*arguments: object) -> None:
        passed.append(arguments)

    await application.CORSMiddleware(answer, allow_origins=["*"])("scope", "receive", "send")
    assert passed == [("scope", "receive", "send")]


@pytest.mark.parametrize(
    ("name", "threads"),
    [("Performance", {"N_THREADS": "12"}), ("Super", {}), (None, {})],
)
def test_weights_are_read_into_memory_on_a_mac_and_performance_cores_have_a_thread_each(
    monkeypatch: pytest.MonkeyPatch, name: str | None, threads: dict[str, str]
) -> None:
    monkeypatch.setattr(libsystem, "sysctl_text", {"hw.perflevel0.name": name}.get)
    monkeypatch.setattr(libsystem, "sysctl_int", {"hw.perflevel0.physicalcpu": 12}.get)
    assert {"--use_mmap", "--n_threads"} <= FLAGS
    assert llama_cpp_python.build_environment({}, "darwin") == {"USE_MMAP": "false"} | threads


def test_cache_types_have_ggmls_numbers() -> None:
    for name, number in llama_cpp_python._CACHE_TYPES.items():
        assert gguf.GGMLQuantizationType[name.upper()] == number
