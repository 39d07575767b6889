"""`pomona endpoint`: where the gateway is, and configurations that shells and clients can read as they are."""

import ast
import json
import os
import subprocess
import threading
import tomllib
from base64 import b64encode
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from click.testing import CliRunner, Result

from cli.cluster_options import ClusterOptions
from cli.endpoint.client_configuration import CLIENTS, KEY_PLACEHOLDER, EndpointFacts, render_configuration
from cli.endpoint.gateway_address import Gateway, choose_address
from cli.main import main
from kube.client import Obj
from tests.unit.cli.test_cluster_commands import write_kubeconfig

SECRET = "pomona-the-key-of-ci"
READ_KEY = "\"$(kubectl get secret ci-key -n team -o jsonpath='{.data.key}' | base64 -d)\""
FACTS = EndpointFacts("https://llm.example.com", READ_KEY, "chat", 65536)
IN_CLUSTER = "http://pomona-gateway.pomona-system.svc"


def gateway_service(name: str = "http", port: int = 80) -> Obj:
    return {"spec": {"ports": [{"name": name, "port": port}]}}


def ingress(host: str, *tls: Obj) -> Obj:
    return {"spec": {"rules": [{"host": host}] if host else [{"http": {}}], "tls": list(tls)}}


def listener(protocol: str, port: int, **more: str) -> Obj:
    return {"name": protocol.lower(), "protocol": protocol, "port": port, **more}


ROUTE: Obj = {"spec": {"parentRefs": [{"name": "public"}], "hostnames": ["*.example.com", "llm.example.com"]}}
ROUTE_WITHOUT_HOST: Obj = {"spec": {"parentRefs": [{"name": "public"}]}}


@pytest.mark.parametrize(
    ("gateway", "url"),
    [
        (Gateway(gateway_service()), "http://127.0.0.1:8080"),
        (Gateway(gateway_service("https", 443)), "https://127.0.0.1:8080"),
        (Gateway(gateway_service(), ingress("llm.example.com")), "http://llm.example.com"),
        (Gateway(gateway_service(), ingress("a.example", {"hosts": ["a.example"]})), "https://a.example"),
        (Gateway(gateway_service(), ingress("a.example", {"secretName": "tls"})), "https://a.example"),
        (Gateway(gateway_service(), ingress("a.example", {"hosts": ["b.example"]})), "http://a.example"),
        (Gateway(gateway_service(), ingress("")), "http://127.0.0.1:8080"),
        (Gateway(gateway_service(), ingress(""), ROUTE), "https://llm.example.com"),
        (Gateway(gateway_service(), None, ROUTE, [listener("HTTP", 80)]), "http://llm.example.com"),
        (
            Gateway(gateway_service(), None, ROUTE, [listener("HTTP", 80), listener("HTTPS", 8443)]),
            "https://llm.example.com:8443",
        ),
        (Gateway(gateway_service(), None, ROUTE_WITHOUT_HOST), "http://127.0.0.1:8080"),
        (
            Gateway(gateway_service(), None, ROUTE_WITHOUT_HOST, [listener("HTTPS", 443, hostname="b.example")]),
            "https://b.example",
        ),
    ],
)
def test_address_is_that_of_the_first_object_that_states_a_host(gateway: Gateway, url: str) -> None:
    address = choose_address(gateway, ClusterOptions(context="prod"))
    assert address.url == url
    is_forwarded = "127.0.0.1" in url
    assert bool(address.forwarding) is is_forwarded
    port = gateway.service["spec"]["ports"][0]["port"]
    command = f"kubectl port-forward service/pomona-gateway 8080:{port} -n pomona-system --context prod"
    assert address.forwarding == (command if is_forwarded else "")
    assert address.service_url.removesuffix(".svc").endswith("//pomona-gateway.pomona-system")


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Variables of a shell in which kubectl prints the Secret, and the programs of clients print their variables."""
    programs = {
        "kubectl": f'test "$*" = "get secret ci-key -n team -o jsonpath={{.data.key}}" && printf {_encode(SECRET)}',
        **dict.fromkeys(("claude", "python3", "open-webui"), "exec env"),
        "curl": 'env; cat; echo; echo "$@"',
    }
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, command in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{command}\n")
        (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def _encode(text: str) -> str:
    return b64encode(text.encode()).decode()


OPENAI = {"OPENAI_BASE_URL": "https://llm.example.com/v1", "OPENAI_API_KEY": SECRET}
ANTHROPIC = {
    "ANTHROPIC_BASE_URL": "https://llm.example.com",
    "ANTHROPIC_AUTH_TOKEN": SECRET,
    "ANTHROPIC_API_KEY": "",
}
VARIABLES: dict[str, dict[str, str]] = {
    "openai": OPENAI,
    "anthropic": ANTHROPIC,
    "claude-code": {
        **ANTHROPIC,
        **dict.fromkeys(("ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL", "ANTHROPIC_DEFAULT_OPUS_MODEL"), "chat"),
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": "65536",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "16384",
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
    },
    "open-webui": {"OPENAI_API_BASE_URL": "https://llm.example.com/v1", "OPENAI_API_KEY": SECRET},
    "curl": {"POMONA_API_KEY": SECRET},
}


@pytest.mark.parametrize("client", VARIABLES)
def test_shell_gives_a_client_its_variables(client: str, environment: dict[str, str]) -> None:
    text = render_configuration(client, FACTS)
    assert SECRET not in text
    said = subprocess.run(["sh", "-eu"], input=text, env=environment, text=True, check=True, capture_output=True)
    seen = dict(line.partition("=")[::2] for line in said.stdout.splitlines())
    assert {name: seen.get(name) for name in VARIABLES[client]} == VARIABLES[client]
    if client == "curl":
        *_, header, arguments = said.stdout.splitlines()
        assert header == f"Authorization: Bearer {SECRET}"
        assert SECRET not in arguments


@pytest.mark.parametrize("client", ["openai", "anthropic"])
def test_program_of_a_library_is_short_python(client: str) -> None:
    program = render_configuration(client, FACTS).partition("<<'PROGRAM'\n")[2].partition("PROGRAM")[0]
    assert len(ast.parse(program).body) <= 5


def test_configuration_of_codex_is_toml() -> None:
    text = render_configuration("codex", FACTS)
    assert tomllib.loads(text) == {
        "model": "chat",
        "model_context_window": 65536,
        "model_provider": "pomona",
        "model_providers": {
            "pomona": {
                "name": "Pomona",
                "base_url": "https://llm.example.com/v1",
                "env_key": "POMONA_API_KEY",
                "wire_api": "responses",
            }
        },
    }
    assert f"# export POMONA_API_KEY={READ_KEY}\n" in text


@pytest.mark.parametrize("client", CLIENTS)
def test_what_is_not_known_is_left_out(client: str) -> None:
    text = render_configuration(client, EndpointFacts("http://a;b", KEY_PLACEHOLDER, "chat", None))
    assert "None" not in text
    assert "CONTEXT" not in text.upper()
    assert "POMONA_API_KEY=" not in text
    assert client == "codex" or "'http://a;b" in text  # quoted for the shell


class Api(dict[str, Any]):
    """Objects by the paths at which an API server has them; a number is the status of a refusal."""

    url = ""


@pytest.fixture
def api() -> Iterator[Api]:
    objects = Api()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = objects.get(urlsplit(self.path).path, 404)
            status = found if isinstance(found, int) else 200
            if status != 200:
                reason = {403: "Forbidden", 404: "NotFound"}[status]
                found = {"kind": "Status", "code": status, "reason": reason, "message": "services is forbidden"}
            body = json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    objects.url = f"http://127.0.0.1:{server.server_port}"
    objects["/api/v1/namespaces/pomona-system/services/pomona-gateway"] = gateway_service()
    put_services(objects, make_service("embed", mode="embeddings"), make_service("large", ready=False), CHAT)
    put_key(objects)
    yield objects
    server.shutdown()
    server.server_close()


def make_service(name: str, *, ready: bool = True, **spec: str) -> Obj:
    conditions = [{"type": "Ready", "status": str(ready)}]
    return {
        "metadata": {"name": name},
        "spec": spec,
        "status": {"conditions": conditions, "serving": {"contextLength": 8192}},
    }


CHAT = make_service("small")
CUSTOM = "/apis/inference.pomona.dev/v1alpha1/namespaces/team"


def put_services(api: Api, *services: Obj) -> None:
    api[f"{CUSTOM}/inferenceservices"] = {"metadata": {"resourceVersion": "1"}, "items": list(services)}


def put_key(api: Api, *, digest: str = "abc", ready: bool = True, message: str = "", **spec: Any) -> None:
    conditions = [{"type": "Ready", "status": str(ready), "message": message}]
    status = {"conditions": conditions} | ({"digest": digest} if digest else {})
    api[f"{CUSTOM}/gatewaykeys/ci"] = {"metadata": {"name": "ci"}, "spec": spec, "status": status}
    api["/api/v1/namespaces/team/secrets/ci-key"] = {"data": {"key": _encode(f"{SECRET}\n")}}


def run(api: Api, tmp_path: Path, *words: str) -> Result:
    config = write_kubeconfig(tmp_path / "config", api.url)
    # With the variable the hints have no option that differs from test to test.
    return CliRunner(env={"KUBECONFIG": str(config)}).invoke(main, ["endpoint", *words], prog_name="pomona")


def test_overview_names_the_addresses_the_models_and_each_client(api: Api, tmp_path: Path) -> None:
    result = run(api, tmp_path)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    for part in (
        "http://127.0.0.1:8080/v1",
        "kubectl port-forward service/pomona-gateway 8080:80 -n pomona-system",
        IN_CLUSTER,
        'POMONA_API_KEY="$(pomona key create NAME)"',
        "embed, large, small",
        *CLIENTS,
    ):
        assert part in result.stdout, part


def test_key_is_read_by_a_command_and_printed_only_on_request(api: Api, tmp_path: Path) -> None:
    result = run(api, tmp_path, "--key", "ci", "--for", "openai", "--url", "https://llm.example.com/v1/")
    assert f"export OPENAI_API_KEY={READ_KEY}\n" in result.stdout
    assert "export OPENAI_BASE_URL=https://llm.example.com/v1\n" in result.stdout
    assert 'model="small"' in result.stdout  # the first service for chats that serves
    assert SECRET not in result.output
    shown = run(api, tmp_path, "--key", "ci", "--for", "openai", "--show-key")
    assert f"export OPENAI_API_KEY={SECRET}\n" in shown.stdout
    refused = run(api, tmp_path, "--show-key")
    assert (refused.exit_code, "--show-key needs --key NAME" in refused.output) == (2, True)


def test_only_services_that_the_key_opens_are_named(api: Api, tmp_path: Path) -> None:
    put_key(api, services=["large", "other/*"])
    assert 'model = "large"' in run(api, tmp_path, "--key", "ci", "--for", "codex").stdout
    del api[f"{CUSTOM}/gatewaykeys/ci"]["spec"]  # as the API server has it if nothing is stated
    assert 'model = "small"' in run(api, tmp_path, "--key", "ci", "--for", "codex").stdout
    put_key(api, services=["embed"])
    result = run(api, tmp_path, "--key", "ci", "--for", "codex")
    assert "the key opens no service for chats in this namespace: MODEL stands for one" in result.stderr
    assert 'model = "MODEL"' in result.stdout


def test_stated_model_is_written_also_one_that_only_the_gateway_knows(api: Api, tmp_path: Path) -> None:
    put_key(api)
    assert 'model = "large"' in run(api, tmp_path, "--key", "ci", "--for", "codex", "--model", "large").stdout
    shared = run(api, tmp_path, "--key", "ci", "--for", "codex", "--model", "shared/chat")
    assert ('model = "shared/chat"' in shared.stdout, shared.stderr) == (True, "")


def test_key_that_is_refused_or_missing_is_reported(api: Api, tmp_path: Path) -> None:
    put_key(api, ready=False, message="spec.suspend is true")
    result = run(api, tmp_path, "--key", "ci")
    assert (result.exit_code, "refuses the key of GatewayKey ci now: spec.suspend is true" in result.stderr) == (
        0,
        True,
    )
    put_key(api, digest="", ready=False, message="the Secret ci-key belongs to somebody else")
    result = run(api, tmp_path, "--key", "ci")
    assert result.exit_code == 1
    assert "GatewayKey ci has no key: the Secret ci-key belongs to somebody else" in result.output


def test_cluster_without_a_gateway_and_one_that_hides_it_are_reported(api: Api, tmp_path: Path) -> None:
    path = "/api/v1/namespaces/pomona-system/services/pomona-gateway"
    for status, text in ((404, "install the gateway (gateway.enabled=true in the values"), (403, "is refused")):
        api[path] = status
        result = run(api, tmp_path)
        assert (result.exit_code, text in result.output) == (1, True), result.output
        assert run(api, tmp_path, "--url", "http://llm").exit_code == 0
