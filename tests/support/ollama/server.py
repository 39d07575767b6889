"""A real Ollama with a store of its own, as the owner of a host runs it.

The owner's own requests are synchronous: they go to another process, and take milliseconds.
"""

import contextlib
import hashlib
import http.client
import json
import os
import re
import signal
import time
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

import psutil

from tests.controlplane.process import Process
from tests.support import certificates
from tests.support.daemons.daemon import Daemon
from tests.support.eventually import eventually
from tests.support.live_processes import is_alive
from tests.support.ollama.program import ensure_ollama
from tests.support.tiny_models import tiny_gguf

NO_LIBRARY: Final = "http://127.0.0.1:9"
"""A proxy that does not exist: no test asks the Internet."""
_CALL_SECONDS: Final = 60
_SHOWN_REQUEST: Final = re.compile(r'^\[GIN\] .*\| (\d{3}) \|.*\| (\w+) +"([^"]+)"', re.MULTILINE)


def build_environment(folder: Path, address: str, library_proxy: str = NO_LIBRARY) -> dict[str, str]:
    """Return the variables of an Ollama that listens at HOST:PORT, and pulls from a `Library` by that one's proxy."""
    return {
        "HOME": str(folder),
        "HTTPS_PROXY": library_proxy,
        "NO_PROXY": "",
        "OLLAMA_HOST": address,
        "OLLAMA_MODELS": str(folder / "models"),
        "OLLAMA_NO_CLOUD": "1",
        "SSL_CERT_FILE": certificates.LIBRARY.certificate,
    }


class RefusedError(Exception):
    """Ollama has refused a request; the message has its status and answer."""


class OllamaServer(Daemon):
    """An Ollama that a test starts, kills and freezes, always at the same port, and uses as its owner."""

    def __init__(self, folder: Path, port: int, library_proxy: str = NO_LIBRARY) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._later_requests = 0
        super().__init__(port)
        self._process = Process(
            "ollama",
            [str(ensure_ollama()), "serve"],
            folder / "ollama.log",
            build_environment(folder, f"127.0.0.1:{port}", library_proxy),
        )

    async def start(self) -> None:
        self._process.start()

        def answers() -> bool:
            assert self._process.running, self._process.tail(20)
            with contextlib.suppress(OSError):
                return "version" in self.ask("GET", "/api/version")
            return False

        await eventually(answers)

    async def stop(self) -> None:
        """Kill it with its engines: the memory is free at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()

    def freeze(self) -> None:
        """Stop the daemon, which then hangs: connections are accepted, and nothing is answered."""
        os.kill(self._process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def engines(self) -> list[psutil.Process]:
        """Return the processes that have the models in memory."""
        return psutil.Process(self._process.pid).children()

    def hang(self, name: str) -> Callable[[], bool]:
        """Make the engine of the only model in memory hang; return a function that tells whether it was ended."""
        assert self.names() == {name}
        (engine,) = self.engines()
        engine.suspend()
        return lambda: not is_alive(engine)

    def own(self, name: str, path: Path | None = None, *, size: int = 0, **parameters: Any) -> None:
        """Add a model of the owner, from a file, or with weights of its own; then load it.

        `size` is what the stand-in of oMLX reports; Ollama finds out the size by itself.
        """
        assert size >= 0
        self.add(name, path, **parameters)
        self.ask("POST", "/api/generate", {"model": name})

    def add(self, name: str, path: Path | None = None, **parameters: Any) -> None:
        """Add a model, and do not load it."""
        if path is None:
            path = self.folder / "weights.gguf"
            tiny_gguf.write(path, name=name)
        weights = path.read_bytes()
        digest = f"sha256:{hashlib.sha256(weights).hexdigest()}"
        self._send("POST", f"/api/blobs/{digest}", weights)
        body = {"model": name, "files": {path.name: digest}, "parameters": parameters, "stream": False}
        self.ask("POST", "/api/create", body)

    def evict(self, name: str) -> None:
        """Unload a model, which has no request."""
        self.ask("POST", "/api/generate", {"model": name, "keep_alive": 0})
        _wait_until(lambda: name not in self.names(), f"{name} is still loaded")

    def delete(self, name: str) -> None:
        self.ask("DELETE", "/api/delete", {"model": name})

    def loaded(self) -> dict[str, Any]:
        """Return what it lists of each model in memory, by name."""
        return {model["name"]: model for model in self.ask("GET", "/api/ps")["models"]}

    def names(self) -> set[str]:
        """Return the names of the models in memory."""
        return set(self.loaded())

    def stored(self) -> set[str]:
        """Return the names of the models in the store."""
        return {model["name"] for model in self.ask("GET", "/api/tags")["models"]}

    def blobs(self) -> set[str]:
        """Return the names of the files in the store."""
        return {path.name for path in (self.folder / "models" / "blobs").glob("*")}

    @property
    def asked(self) -> list[tuple[str, str]]:
        """Method and path of each request in its log; the line follows the last part of a streamed answer."""
        return [(method, path) for _, method, path in _SHOWN_REQUEST.findall(self._process.log.read_text())]

    def changes(self) -> list[tuple[str, str]]:
        """Return the requests that change something, in order, once the log has the line of a later request."""
        self._later_requests += 1
        mark = f"/later/{self._later_requests}"
        with contextlib.suppress(RefusedError):
            self.ask("GET", mark)
        _wait_until(lambda: ("GET", mark) in self.asked, f"the log has no {mark}")
        return [(method, path) for method, path in self.asked if method not in {"GET", "HEAD"} and path != "/api/show"]

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Return the answer to a request; a refusal raises RefusedError."""
        answer = self._send(method, path, json.dumps(body).encode() if body is not None else None)
        return json.loads(answer) if answer else None

    def _send(self, method: str, path: str, body: bytes | None) -> bytes:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=_CALL_SECONDS)) as client:
            client.request(method, path, body)
            response = client.getresponse()
            answer = response.read()
        if response.status >= HTTPStatus.BAD_REQUEST:
            raise RefusedError(f"{method} {path}: {response.status} {answer.decode()}")
        return answer


def _wait_until(condition: Callable[[], bool], otherwise: str) -> None:
    for _ in range(_CALL_SECONDS * 20):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError(otherwise)
