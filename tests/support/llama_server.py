"""llama.cpp's real HTTP server as a child process, for tests that need real tokens."""

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import IO, NamedTuple

from crds.serving import ServingOptions
from runtimes import llama_server
from runtimes.environment import PYTHON
from runtimes.serving import Listen, Serving


class LlamaServer(NamedTuple):
    url: str
    process: subprocess.Popen[str]


@contextmanager
def serve(model: Path, *extra: str, service: str = "tiny", context_length: int = 2048) -> Iterator[LlamaServer]:
    """Serve `model` with one thread and one slot on a free port; kill the server at the end."""
    options = ServingOptions(context_length=context_length, extra_args=["-t", "1", *extra])
    with serve_as(Serving(service, str(model), options)) as server:
        yield server


@contextmanager
def serve_as(serving: Serving) -> Iterator[LlamaServer]:
    """Start the server for `serving` on a free port; kill it at the end."""
    arguments = llama_server.render_arguments(serving, Listen("127.0.0.1", 0))
    command = [*PYTHON, "runtimes.llama_launcher", *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr
            url = _listening_url(process.stderr)
            reader = Thread(target=process.stderr.read, daemon=True)  # a full pipe would stop the server
            reader.start()
            yield LlamaServer(url, process)
        finally:
            process.kill()
            process.wait()
            reader.join()


def _listening_url(log: IO[str]) -> str:
    seen = []
    for line in log:
        seen.append(line)
        if url := re.search(r"listening on (http://\S+)", line):
            return url[1]
    raise AssertionError("llama-server ended:\n" + "".join(seen))
