"""The real vLLM, started on the processor with exactly what `runtimes/vllm.py` renders."""

import asyncio
import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, Final, NamedTuple

import psutil

from artifacts.inspect import check_stored
from artifacts.source import parse
from crds.serving import Mode, ServingOptions
from devices.vendors import CPU
from runtimes import vllm
from runtimes.pod import PodServing
from runtimes.serving import Listen, Serving
from tests.support.chat_templates import Family, write_template
from tests.support.eventually import eventually
from tests.support.pod_engines.dialects import RECORDED
from tests.support.tiny_models import tiny_mlx
from tests.vllm import environment

KEY: Final = "sekret"
CONTEXT: Final = 512
CACHE_BYTES: Final = 1 << 30
_STARTING_SECONDS: Final = 600.0
RECORDING: Final = RECORDED / "vllm_server.json"


class Answer(NamedTuple):
    status: int
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)


class RealServer:
    """A running vLLM."""

    def __init__(self, process: subprocess.Popen[bytes], model: Path, port: int) -> None:
        self.model = model
        self.url = f"http://127.0.0.1:{port}"
        self._process, self._port = process, port

    def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None, *, key: str | None = KEY) -> Answer:
        return self._send(method, path, json.dumps(body).encode() if body else None, key)

    def post(self, path: str, body: bytes) -> Answer:
        return self._send("POST", path, body, KEY)

    def _send(self, method: str, path: str, body: bytes | None, key: str | None) -> Answer:
        connection = HTTPConnection("127.0.0.1", self._port, timeout=120)
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        answer = Answer(response.status, response.read().decode())
        connection.close()
        return answer

    def resident_bytes(self) -> int:
        """Return the memory of all its processes, shared pages counted once."""
        parent = psutil.Process(self._process.pid)
        return sum(process.memory_full_info().pss for process in (parent, *parent.children(recursive=True)))

    def is_ready(self) -> bool:
        """Return whether it has loaded the model. Raises RuntimeError when it has ended."""
        if self._process.poll() is not None:
            raise RuntimeError(f"vLLM ended with status {self._process.returncode}")
        try:
            return self.ask("GET", "/health", key=None).status == 200
        except OSError:
            return False


def rendered(
    model: Path, port: int, mode: Mode = "chat", extra: Sequence[str] = (), chat_format: str = ""
) -> PodServing:
    """Return a service of the tiny model on the processor."""
    options = ServingOptions(context_length=CONTEXT, parallel=2, mode=mode, extra_args=[*extra])
    serving = Serving("chat", str(model), options, threads=2)
    return PodServing(serving, Listen("127.0.0.1", port), CPU, cache_bytes=CACHE_BYTES, chat_format=chat_format)


def start(pod: PodServing, home: Path, log: Path) -> subprocess.Popen[bytes]:
    """Start the real vLLM with the arguments and variables of a pod, which are only given a home of their own."""
    engine = vllm.RUNTIME.pod
    assert engine is not None
    program, *rest = engine.command
    argv = [str(environment.folder() / "bin" / program), *rest, *engine.arguments(pod)]
    variables = {**engine.environment(pod), "HOME": str(home), "PATH": os.environ["PATH"], "VLLM_API_KEY": KEY}
    with log.open("wb") as output:
        return subprocess.Popen(argv, env=variables, cwd=home, stdout=output, stderr=output)


@contextmanager
def serve(folder: Path, mode: Mode, family: Family | None = None) -> Iterator[RealServer]:
    """Serve the tiny model with the real vLLM; with the template of a family, as its inspection finds it."""
    model, log, port = folder / "model", folder / "vllm.log", _free_port()
    tiny_mlx.write(model, n_embd=128)  # with heads of 32 values, the least that its attention kernels take
    if family is not None:
        write_template(model, family)
    chat_format = check_stored(parse(f"file://{model}/"), model).gguf.chat_format
    process = start(rendered(model, port, mode, ["--enforce-eager"], chat_format), folder, log)
    server = RealServer(process, model, port)
    try:
        asyncio.run(eventually(server.is_ready, _STARTING_SECONDS))
        yield server
    except BaseException:
        print(log.read_text(errors="replace")[-4000:])
        raise
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
