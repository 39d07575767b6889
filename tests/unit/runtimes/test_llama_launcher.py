"""The launcher behaves as llama-server does: refusals, exit codes, log, signals; on the real server of the wheel."""

import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection, HTTPResponse, IncompleteRead
from pathlib import Path
from types import SimpleNamespace

import pytest
import xllamacpp

from runtimes import llama_launcher
from tests.support import llama_server
from tests.support.eventually import eventually
from tests.support.tiny_models import tiny_gguf


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "endless.gguf"
    tiny_gguf.write(path, loop=True, n_ctx=1 << 17)
    return path


@pytest.fixture
def server(endless: Path) -> Iterator[llama_server.LlamaServer]:
    with llama_server.serve(endless, context_length=1 << 17) as server:
        yield server


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "runtimes.llama_launcher", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


@contextmanager
def ask(server: llama_server.LlamaServer, **body: object) -> Iterator[HTTPResponse]:
    messages = [{"role": "user", "content": "hi"}]
    with closing(HTTPConnection(server.url.removeprefix("http://"), timeout=30)) as connection:
        connection.request("POST", "/v1/chat/completions", json.dumps({"messages": messages} | body))
        with connection.getresponse() as response:
            yield response


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--no-such-flag"], "invalid argument: --no-such-flag"),
        (["-m", "m.gguf", "stray"], "invalid argument: stray"),
        (["-m"], "expected value for argument -m"),
        (["-m", "m.gguf", "--port", "http"], "argument --port: invalid literal"),
        (["-m", "m.gguf", "-ctk", "q3"], "argument -ctk: unknown value 'q3': use one of f32, f16"),
        (["-m", "m.gguf", "--fit", "yes"], "argument --fit: unknown value 'yes': use one of on, off"),
        (["-m", "m.gguf", "-fa", "1"], "argument -fa: unknown value '1': use one of on, off, auto"),
        (["-m", "m.gguf", "--api-key-file", "/nope"], "argument --api-key-file: failed to open file '/nope'"),
        (["-m", "m.gguf", "--lora-scaled", "0.5"], "argument --lora-scaled: unknown value '0.5': use FNAME:SCALE"),
        (["--port", "0"], "--model is required"),
    ],
)
def test_arguments_that_llama_server_refuses_are_refused(arguments: list[str], error: str) -> None:
    with pytest.raises(llama_launcher.ArgumentError, match="^" + re.escape(error)):
        llama_launcher.parse(arguments)


def test_wheel_that_lacks_a_value_serves_all_that_do_not_ask_for_it() -> None:
    read = llama_launcher._one_member_of(SimpleNamespace(MODE_NONE=0), "MODE_", "none direct_io")
    assert read("none") == 0
    with pytest.raises(AttributeError):
        read("direct_io")


def test_a_key_file_without_a_key_does_not_open_the_server(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# a comment\n\n")
    with pytest.raises(llama_launcher.ArgumentError, match="holds no key"):
        llama_launcher.parse(["-m", "m.gguf", "--api-key-file", str(path)])


@pytest.mark.parametrize(
    ("arguments", "field", "value"),
    [
        (["-ctk", "q8_0"], "cache_type_k", xllamacpp.ggml_type.GGML_TYPE_Q8_0),
        (["-fa", "off"], "flash_attn_type", xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED),
        (["-ngl", "all"], "n_gpu_layers", -2),
        (["--fit", "off"], "fit_params", False),
        (["--no-slots"], "endpoint_slots", False),
        (["-c", "1", "--ctx-size", "2"], "n_ctx", 2),
        (["--load-mode", "mmap+mlock"], "load_mode", xllamacpp.llama_load_mode.LLAMA_LOAD_MODE_MMAP_MLOCK),
        (["--pooling", "mean"], "pooling_type", xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_MEAN),
        (["--kv-unified-per-slot", "4096"], "kv_unified_per_slot", 4096),
        (["--rerank"], "pooling_type", xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_RANK),
    ],
)
def test_values_reach_the_wheel(arguments: list[str], field: str, value: object) -> None:
    assert getattr(llama_launcher.parse(["-m", "m.gguf", *arguments]), field) == value


def test_context_of_a_slot_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    # It must be llama-server's own variable.
    assert b"LLAMA_ARG_KV_UNIFIED_PER_SLOT\0" in Path(xllamacpp.xllamacpp.__file__).read_bytes()
    monkeypatch.setenv("LLAMA_ARG_KV_UNIFIED_PER_SLOT", "4096")
    assert llama_launcher.parse(["-m", "m.gguf"]).kv_unified_per_slot == 4096
    assert llama_launcher.parse(["-m", "m.gguf", "--kv-unified-per-slot", "1"]).kv_unified_per_slot == 1


def test_load_mode_of_the_environment_counts_unless_an_argument_states_one(monkeypatch: pytest.MonkeyPatch) -> None:
    # llama-server's own variable, which an older llama-server ignores.
    assert b"LLAMA_ARG_LOAD_MODE\0" in Path(xllamacpp.xllamacpp.__file__).read_bytes()
    monkeypatch.setenv("LLAMA_ARG_LOAD_MODE", "none")
    modes = xllamacpp.llama_load_mode
    assert llama_launcher.parse(["-m", "m.gguf"]).load_mode == modes.LLAMA_LOAD_MODE_NONE
    mapped = llama_launcher.parse(["-m", "m.gguf", "--load-mode", "mmap"])
    assert mapped.load_mode == modes.LLAMA_LOAD_MODE_MMAP


def test_every_option_can_be_set_and_is_named_as_in_llama_cpp(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("k\n")
    readable = {"--api-key-file": str(keys), "--fit": "on", "-fit": "on", "--lora-scaled": "a.gguf:0.5"}
    for name, option in llama_launcher.ARGUMENTS.items():
        candidates = [readable.get(name, "f16"), "1", "none", "auto"]
        values = [[]] if isinstance(option, llama_launcher._Switch) else [[text] for text in candidates]
        assert any(accepted([name, *value]) for value in values), name
    library = Path(xllamacpp.xllamacpp.__file__).read_bytes()
    options = {match.decode() for match in re.findall(rb"\0(--?[a-z][a-z0-9-]*)(?=\0)", library)}
    assert {name for name in llama_launcher.ARGUMENTS if name.startswith("--")} <= options
    # Compilers merge a short string into the tail of a longer one, so that it need not begin after a zero.
    assert [name for name in llama_launcher.ARGUMENTS if name.encode() + b"\0" not in library] == []


def accepted(arguments: list[str]) -> bool:
    try:
        llama_launcher.parse(["-m", "m.gguf", *arguments])
    except llama_launcher.ArgumentError:
        return False
    return True


def test_an_unknown_argument_ends_with_1() -> None:
    result = run("--no-such-flag")
    assert (result.returncode, result.stderr) == (1, "error: invalid argument: --no-such-flag\n")


def test_the_command_passes_every_argument_on() -> None:
    command = [sys.executable, "-m", "cli.main", "llama-server", "-np", "2", "-c", "512", "--help-me"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert (result.returncode, result.stderr) == (1, "error: invalid argument: --help-me\n")


def test_a_missing_model_ends_with_1_and_is_named(tmp_path: Path) -> None:
    result = run("-m", str(tmp_path / "none.gguf"), "--port", "0")
    assert result.returncode == 1
    assert f"failed to open GGUF file '{tmp_path}/none.gguf'" in result.stderr
    # llama.cpp writes its log from a thread that the end overtakes: its last line may be missing.
    assert "error: Failed to init server" in result.stderr


def test_a_taken_port_ends_with_1(endless: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = run("-m", str(endless), "-c", "512", "-t", "1", "--port", str(taken.getsockname()[1]))
    assert result.returncode == 1
    assert "couldn't bind HTTP server socket" in result.stderr


def test_the_key_is_enforced(endless: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    with llama_server.serve(endless, "--api-key-file", str(keys)) as server, ask(server, max_tokens=1) as response:
        assert response.status == 401


def catches(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal."""
    match = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return match is not None and bool(int(match[1], 16) >> (number - 1) & 1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_an_idle_server_cleanly(server: llama_server.LlamaServer, number: int) -> None:
    with ask(server, max_tokens=1) as response:
        assert response.status == 200
    # The server answers before its constructor has returned to the launcher.
    await eventually(lambda: catches(server.process.pid, number))
    server.process.send_signal(number)
    assert server.process.wait(timeout=60) == 0


async def test_a_signal_ends_a_busy_server_at_once_and_cuts_its_stream(server: llama_server.LlamaServer) -> None:
    with ask(server, stream=True, max_tokens=1 << 17) as response:
        assert response.readline().startswith(b"data: ")
        await eventually(lambda: catches(server.process.pid, signal.SIGTERM))
        server.process.terminate()
        assert server.process.wait(timeout=60) == 0
        with pytest.raises((IncompleteRead, ConnectionResetError)):
            response.read()


def test_devices_are_listed_as_by_llama_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = xllamacpp.ggml_backend_dev_type
    cpu = {"name": "CPU", "description": "Apple M4", "memory_total": 2**34, "memory_free": 2**34}
    gpu = {"name": "MTL0", "description": "Apple M4", "memory_total": 12124 * 2**20, "memory_free": 2**33}
    cpu["type"], gpu["type"] = kinds.GGML_BACKEND_DEVICE_TYPE_CPU, kinds.GGML_BACKEND_DEVICE_TYPE_GPU
    for devices, listed in [([cpu], "  (none)"), ([gpu, cpu], "  MTL0: Apple M4 (12124 MiB, 8192 MiB free)")]:
        monkeypatch.setattr(xllamacpp, "get_device_info", lambda devices=devices: devices)
        assert llama_launcher.main(["--list-devices"]) == 0
        assert capsys.readouterr().out == f"Available devices:\n{listed}\n"
