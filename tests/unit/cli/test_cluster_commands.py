"""Each command that talks to a cluster ends every failure with one line that has the way out, and no traceback."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner, Result

from cli.main import main

COMMANDS = (
    ["list"],
    ["status", "chat"],
    ["logs", "chat"],
    ["chat", "chat", "Hello"],
    ["bench", "chat"],
    ["endpoint"],
    ["delete", "chat"],
    ["deploy", "chat", "--model", "tiny"],
    ["deploy", "qwen3-8b"],
    ["queue"],
    ["queue", "explain", "chat"],
    ["fit", "qwen3-8b"],
    ["simulate", "qwen3-8b"],
    ["cost"],
    ["plan", "drain", "studio-1"],
    ["plan", "add", "--accelerator", "metal", "--memory", "64Gi"],
    ["plan", "-f", "examples/model.yaml"],
    ["key", "create", "app"],
    ["key", "list"],
    ["key", "rotate", "app"],
    ["key", "delete", "app"],
    ["hosts"],
    ["host", "list"],
    ["host", "join", "studio-1", "--server", "https://192.0.2.1"],
    ["host", "remove", "studio-1", "--yes"],
    ["host", "cordon", "studio-1"],
    ["host", "uncordon", "studio-1"],
    ["host", "drain", "studio-1"],
    ["host", "taint", "studio-1", "dedicated:NoSchedule"],
)
GROUP = {"cordon", "create", "delete", "drain", "join", "list", "remove", "rotate", "taint", "uncordon"}
IDS = [" ".join(command) for command in COMMANDS]
NOT_FOUND = (404, "404 page not found\n")
"""The answer of an API server to a kind that it does not know: no object of the kind Status."""
UNAUTHORIZED = (401, json.dumps({"kind": "Status", "code": 401, "reason": "Unauthorized", "message": "Unauthorized"}))

Serve = Callable[[int, str], str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """`serve(status, body)` returns the URL of a server that always answers so."""
    servers: list[ThreadingHTTPServer] = []

    def start(status: int, body: str) -> str:
        class Handler(BaseHTTPRequestHandler):
            def _answer(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body.encode())

            do_GET = do_PATCH = do_DELETE = do_POST = _answer  # noqa: N815 - names of the library

            def log_message(self, *_arguments: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def write_kubeconfig(path: Path, server: str) -> Path:
    config = {
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": {"token": "hunter2"}}],
        "contexts": [{"name": "main", "context": {"cluster": "c", "user": "u", "namespace": "team"}}],
        "current-context": "main",
    }
    path.write_text(json.dumps(config))
    return path


def run(command: list[str], kubeconfig: Path, *more: str) -> Result:
    return CliRunner().invoke(main, [*command, "--kubeconfig", str(kubeconfig), *more], prog_name="pomona")


def assert_one_line(result: Result, text: str) -> None:
    assert result.exit_code == 1, result.output
    assert result.output.startswith("Error: "), result.output
    assert len(result.output.splitlines()) == 1, result.output
    assert text in result.output
    assert "hunter2" not in result.output


@pytest.mark.parametrize("command", COMMANDS, ids=IDS)
def test_missing_kubeconfig_is_named(command: list[str], tmp_path: Path) -> None:
    assert_one_line(run(command, tmp_path / "config"), "config: no such file; pass --kubeconfig or set KUBECONFIG")


@pytest.mark.parametrize("command", COMMANDS, ids=IDS)
def test_server_that_does_not_answer_is_named(command: list[str], tmp_path: Path) -> None:
    config = write_kubeconfig(tmp_path / "config", "http://127.0.0.1:9")
    assert_one_line(run(command, config), "the API server http://127.0.0.1:9 does not answer (")


@pytest.mark.parametrize("command", COMMANDS, ids=IDS)
def test_refused_credentials_are_named(command: list[str], serve: Serve, tmp_path: Path) -> None:
    config = write_kubeconfig(tmp_path / "config", serve(*UNAUTHORIZED))
    assert_one_line(run(command, config), "refuses these credentials: log in again")


@pytest.mark.parametrize("command", COMMANDS, ids=IDS)
def test_kinds_that_are_not_installed_are_named(command: list[str], serve: Serve, tmp_path: Path) -> None:
    config = write_kubeconfig(tmp_path / "config", serve(*NOT_FOUND))
    assert_one_line(run(command, config), "does not know the kinds of inference.pomona.dev: install Pomona")


def test_credentials_that_cannot_be_used_are_no_fault_of_the_server(tmp_path: Path) -> None:
    config = write_kubeconfig(tmp_path / "config", "http://127.0.0.1:9")
    plugin = {"apiVersion": "client.authentication.k8s.io/v1", "command": "absent", "interactiveMode": "Never"}
    config.write_text(config.read_text().replace('{"token": "hunter2"}', json.dumps({"exec": plugin})))
    result = run(["list"], config)
    assert_one_line(result, f"kubeconfig {config}, context main: the plugin gave neither token nor certificate")
    assert "does not answer" not in result.output


@pytest.mark.parametrize("command", [words for words in COMMANDS if words[0] in {"status", "logs", "chat", "delete"}])
def test_name_with_its_kind_is_refused_with_the_name_alone(command: list[str], serve: Serve, tmp_path: Path) -> None:
    config = write_kubeconfig(tmp_path / "config", serve(*NOT_FOUND))
    result = run([command[0], "isvc/chat", *command[2:]], config)
    assert_one_line(result, "isvc/chat is not a name: give the name of the InferenceService alone, chat")


def test_answer_of_another_server_is_told(serve: Serve, tmp_path: Path) -> None:
    config = write_kubeconfig(tmp_path / "config", serve(200, "<html>log in</html>"))
    assert_one_line(run(["list"], config), "the answer is not what the API sends")


def test_unknown_context_is_refused_with_those_that_exist(tmp_path: Path) -> None:
    config = write_kubeconfig(tmp_path / "config", "http://127.0.0.1:9")
    assert_one_line(run(["list"], config, "--context", "other"), "contexts has no entry named 'other': there are main")


def test_namespace_is_that_of_the_context_unless_stated(serve: Serve, tmp_path: Path) -> None:
    empty = json.dumps({"metadata": {"resourceVersion": "1"}, "items": []})
    config = write_kubeconfig(tmp_path / "config", serve(200, empty))
    assert "no service in namespace team:" in run(["list"], config).output
    assert "no service in namespace ours:" in run(["list"], config, "-n", "ours").output
    assert json.loads(run(["list"], config, "-o", "json").stdout) == {"apiVersion": "v1", "kind": "List", "items": []}


@pytest.mark.parametrize(
    "words",
    [
        *(["status"], ["logs"], ["chat"], ["delete"], ["list", "-n"], ["deploy", "chat", "--model"]),
        *(["queue", "explain"], ["plan", "drain"], ["endpoint", "--key"]),
        *(["host", "cordon"], ["host", "uncordon"], ["host", "drain"], ["host", "taint"], ["host", "remove"]),
    ],
    ids=" ".join,
)
def test_names_complete(words: list[str], serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    items = [{"metadata": {"name": name}} for name in ("chat", "studio-1", "studio-2")]
    answer = json.dumps({"metadata": {"resourceVersion": "1"}, "items": items})
    monkeypatch.setenv("KUBECONFIG", str(write_kubeconfig(tmp_path / "config", serve(200, answer))))
    completions = ShellComplete(main, {}, "pomona", "_POMONA_COMPLETE").get_completions(words, "st")
    assert sorted({completion.value for completion in completions}) == ["studio-1", "studio-2"]


def test_status_reads_no_other_models_and_hosts(tmp_path: Path) -> None:
    asked: list[tuple[str, str]] = []
    metadata = {"name": "chat", "namespace": "team", "generation": 1}
    chat = {"metadata": metadata, "spec": {"modelRef": "tiny"}}
    processes = [{"metadata": {"name": f"chat-{number}"}, "spec": {"hostName": f"studio-{number}"}} for number in "12"]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            place = urlsplit(self.path)
            plural = place.path.rpartition("/")[2]
            asked.append((plural, parse_qs(place.query).get("fieldSelector", [""])[0]))
            answer = {"metadata": {}, "items": processes if plural == "metalprocesses" else []}
            body = json.dumps(chat if plural == "chat" else answer).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        config = write_kubeconfig(tmp_path / "config", f"http://127.0.0.1:{server.server_port}")
        result = run(["status", "chat"], config)
        server.shutdown()
    assert "MetalProcess chat-2" in result.output, result.output
    assert [selector for plural, selector in asked if plural == "models"] == ["metadata.name=tiny"]
    hosts = [selector for plural, selector in asked if plural == "metalhosts"]
    assert hosts == ["metadata.name=studio-1", "metadata.name=studio-2"]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["deploy", "chat", "--model", "tiny"], "chat goes on deploying: `pomona status chat --kubeconfig "),
        (["host", "drain", "studio-1"], "Error: studio-1 is not drained yet, and goes on draining"),
    ],
    ids=["deploy", "drain"],
)
def test_wait_ends_in_time(command: list[str], said: str, tmp_path: Path) -> None:
    metadata = {"name": "chat", "namespace": "team", "generation": 1, "uid": "u"}
    pending = {"type": "Ready", "status": "False", "reason": "NoHost", "message": "no live host"}
    drained = {"type": "Drained", "status": "False", "observedGeneration": 1, "message": "1 process is on this host"}
    status = {"observedGeneration": 1, "phase": "Pending", "conditions": [pending, drained]}
    waiting = {"kind": "InferenceService", "metadata": metadata, "spec": {"drain": True}, "status": status}
    ended = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if "watch=" in self.path:
                ended.wait(60)
                return
            lists = "fieldSelector" in self.path
            answer = {"metadata": {"resourceVersion": "1"}, "items": [waiting]} if lists else waiting
            body = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_PATCH = _answer  # noqa: N815 - names of the library

        def log_message(self, *_arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        config = write_kubeconfig(tmp_path / "config", f"http://127.0.0.1:{server.server_port}")
        result = run([*command, "--timeout", "0.5s"], config)
        ended.set()
        server.shutdown()
    assert result.exit_code == 1, result.output
    assert said in result.output.splitlines()[-1], result.output


@pytest.mark.parametrize("command", [*COMMANDS, ["completion"], ["catalog"]], ids=" ".join)
def test_help_of_a_command_imports_no_client(command: list[str]) -> None:
    words = [*(word for word in command if word in {"host", command[0], *GROUP}), "-h"]
    script = (
        f"import sys; from cli.main import main\ntry: main({words!r})\nexcept SystemExit: pass\n"
        "heavy = {'aiohttp', 'kopf', 'kubernetes', 'cel', 'jsonschema', 'rich'} & sys.modules.keys()\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
