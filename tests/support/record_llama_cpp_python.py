"""Recorder of the reactions of llama-cpp-python's real server to rendered arguments and to requests: see `main`.

The package has no wheel, and its build takes from five minutes to half an hour, so tests use this recording. The
arguments are rendered by `runtimes.llama_cpp_python`: a test fails if they differ from the recorded ones.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import gguf

from crds.serving import ServingOptions
from devices.sockets import loopback_port
from runtimes import llama_cpp_python
from runtimes.serving import CompanionFile, Listen, Serving
from tests.support.tiny_models import tiny_companions, tiny_gguf

FIXTURE = Path(__file__).parents[1] / "unit/runtimes/fixtures/llama_cpp_python.json"
WIDE = 128
CASES: dict[str, dict[str, Any]] = {
    "chat": {},
    "embeddings": {"mode": "embeddings", "model": "/weights/embedder.gguf"},
    "embeddings without pooling": {"mode": "embeddings"},
    "quantized cache": {"cache_type_k": "q8_0", "cache_type_v": "q4_0"},
    "adapter": {"companions": (CompanionFile("adapter", "/weights/adapter.gguf"),)},
    "tuned": {"extra_args": ["--n_threads", "1", "--seed", "7"]},
    "missing model": {"model": "/weights/missing.gguf"},
    "damaged model": {"model": "/weights/damaged.gguf"},
    "unknown argument": {"extra_args": ["--no_such_argument", "1"]},
}
CHAT = {"model": "chat", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 40, "temperature": 0}
EXCHANGES: tuple[tuple[str, str, dict[str, Any] | None], ...] = (
    ("GET", "/v1/models", None),
    ("POST", "/v1/chat/completions", CHAT),
    ("POST", "/v1/chat/completions", CHAT | {"max_tokens": 1}),
    ("POST", "/v1/chat/completions", {"model": "chat"}),
    ("POST", "/v1/embeddings", {"model": "chat", "input": "Hi"}),
    ("POST", "/v1/rerank", {"model": "chat", "query": "Hi", "documents": ["Hi"]}),
    ("GET", "/health", None),
    ("GET", "/metrics", None),
)


def rendered(case: str) -> list[str]:
    """Render the arguments of a case, with the paths of the recording."""
    options = {"context_length": 512} | CASES[case]
    model, companions = options.pop("model", "/weights/model.gguf"), options.pop("companions", ())
    serving = Serving("chat", model, ServingOptions(**options), companions)
    return llama_cpp_python.render_arguments(serving, Listen("127.0.0.1", 0))


def main() -> None:
    """Record into the fixture.

    `python3 -m venv V && V/bin/pip install 'llama-cpp-python[server]==0.3.36'`, then
    `.venv/bin/python -m tests.support.record_llama_cpp_python --python V/bin/python`.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.support.record_llama_cpp_python", description=main.__doc__)
    parser.add_argument("--python", required=True, help="the interpreter that has llama-cpp-python")
    python = parser.parse_args().python
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tiny_gguf.write(folder / "model.gguf", n_embd=WIDE)
        tiny_gguf.write(folder / "embedder.gguf", n_embd=WIDE, pooling=gguf.PoolingType.MEAN)
        tiny_companions.write_adapter(folder / "adapter.gguf", first=8, n_embd=WIDE)
        (folder / "damaged.gguf").write_bytes((folder / "model.gguf").read_bytes()[:4096])
        recording = {
            "how": "made by tests/support/record_llama_cpp_python.py, whose docstring has the commands; do not edit",
            "version": _output(python, "-c", "import llama_cpp; print(llama_cpp.__version__)").strip(),
            "platform": sys.platform,
            "help": _output(python, "-m", "llama_cpp.server", "--help"),
            "cases": {case: _record(python, case, folder) for case in CASES},
        }
    FIXTURE.parent.mkdir(exist_ok=True)
    FIXTURE.write_text(json.dumps(recording, indent=1, ensure_ascii=False) + "\n")


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def _record(python: str, case: str, folder: Path) -> dict[str, Any]:
    arguments = rendered(case)
    log = folder / "log"
    environment = llama_cpp_python.build_environment(os.environ)
    recording: dict[str, Any] = {"arguments": arguments}
    with log.open("wb") as output:
        real = [argument.replace("/weights", str(folder)) for argument in arguments]
        command = [python, "-m", "llama_cpp.server", *real]
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    deadline = time.monotonic() + 60
    while (port := loopback_port(process.pid)) is None and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    if port is not None:
        recording["exchanges"] = [_exchange(port, *exchange) for exchange in EXCHANGES]
        process.send_signal(signal.SIGTERM)
    code = process.wait(timeout=60)
    recording["exit_code"] = code
    lines = log.read_text(errors="replace").replace(str(folder), "/weights").splitlines()
    # Process ids and folders of this machine are no part of the recording.
    lines = [re.sub(r'File "[^"]*/site-packages/', 'File "', re.sub(r"\d{4,}", "N", line)) for line in lines]
    recording["last_lines"] = lines[-8:]
    return recording


def _exchange(port: int, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
    with closing(HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        data = None if body is None else json.dumps(body)
        connection.request(method, path, data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = response.read().decode()
    return {"method": method, "path": path, "body": body, "status": response.status, "answer": answer}


if __name__ == "__main__":
    main()
