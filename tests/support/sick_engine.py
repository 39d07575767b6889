"""A stand-in of llama-server that gets sick on command, which the real one does only on a Mac without memory.

It answers as llama.cpp does after a Metal out-of-memory error, by recorded facts: 500 with `Compute error.` to every
completion, while /health and /metrics answer 200. A process gets sick when it finds a file `<model>.sick`, whose text
is `failing` or `hung`, and deletes the file: the next process is sound. If the text is `picky`, it fails only requests
with a seed, as a sound engine may fail what one client sends.
"""

import json
import os
import stat
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
FAILING = {"error": {"code": 500, "message": "Compute error.", "type": "server_error"}}
UNKNOWN = {"error": {"code": 500, "message": "no idea", "type": "server_error"}}
"""An error that no table knows."""


def write_program(folder: Path) -> Path:
    """Write an executable that is the stand-in, for LLAMA_SERVER_BIN; return its path."""
    path = folder / "llama-server"
    path.write_text(f"#!/bin/sh\nPYTHONPATH='{ROOT}' exec '{sys.executable}' -m tests.support.sick_engine \"$@\"\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def make_sick(model: Path, how: str) -> None:
    """Make the engine that serves `model` sick from its next request on."""
    temporary = model.with_suffix(".new")
    temporary.write_text(how)
    temporary.rename(f"{model}.sick")


class SickEngine(ThreadingHTTPServer):
    """The server; `sickness` is empty while it is sound."""

    daemon_threads = True

    def __init__(self, model: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self._mark = Path(f"{model}.sick")
        self.sickness = ""

    def catch_sickness(self) -> str:
        if self._mark.exists():
            self.sickness = self._mark.read_text()
            self._mark.unlink()
        return self.sickness


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: SickEngine

    def do_GET(self) -> None:
        self._answer(200 if self.path in {"/health", "/metrics"} else 404, {"status": "ok"})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        match self.server.catch_sickness():
            case "failing":
                self._answer(500, FAILING)
            case "picky" if "seed" in asked:
                self._answer(500, UNKNOWN)
            case "hung":
                threading.Event().wait()
            case _:
                message = {"role": "assistant", "content": "Hello"}
                choice = {"index": 0, "message": message, "finish_reason": "length"}
                usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
                self._answer(200, {"model": asked["model"], "choices": [choice], "usage": usage})

    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def _answer(self, status: int, body: object) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


if __name__ == "__main__":
    os.chdir("/")
    SickEngine(sys.argv[sys.argv.index("-m") + 1]).serve_forever()
