"""Credentials from kubeconfig files, in-cluster files, rotated tokens and exec plugins."""

import asyncio
import base64
import json
import ssl
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import yaml
from aiohttp import web

from kube import credentials
from kube.client import connect
from kube.credentials import Credentials
from kube.errors import Unauthorized, Unreachable
from kube.kubeconfig import CredentialsError, read_kubeconfig
from kube.resources import METAL_HOSTS

CERTIFICATE = Path(__file__).parent / "certificate.pem"
"""Self-signed, for 127.0.0.1 and api.example.com, with its key, until 2126: server, client and authority in one."""


def write(path: Path, user: dict[str, Any], **cluster: Any) -> Path:
    config = {
        "current-context": "main",
        "contexts": [{"name": "main", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1", **cluster}}],
        "users": [{"name": "u", "user": user}],
    }
    path.write_text(yaml.safe_dump(config))
    return path


async def header(loaded: Credentials) -> str | None:
    return await loaded.authorization()


async def test_token_of_a_kubeconfig_is_used(tmp_path: Path) -> None:
    loaded = credentials.load(write(tmp_path / "config", {"token": "hunter2"}))
    assert await header(loaded) == "Bearer hunter2"
    assert not await loaded.refresh("Bearer hunter2")
    assert "hunter2" not in repr(loaded)


async def test_kubeconfig_with_another_token_is_read_again_once_it_is_refused(
    tmp_path: Path, serve: Callable[[Any], Awaitable[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    accepted, reads = "Bearer first", list[object]()

    def count(paths: Any, context: str | None) -> Any:
        reads.append(paths)
        return read_kubeconfig(paths, context)

    async def answer(request: web.Request) -> web.Response:
        return web.json_response({}, status=200 if request.headers["Authorization"] == accepted else 401)

    server = await serve(answer)
    loaded = credentials.load(write(tmp_path / "config", {"token": "first"}, server=server))
    monkeypatch.setattr(credentials, "read_kubeconfig", count)
    async with connect(loaded) as client:
        await client.get(METAL_HOSTS, "a")
        accepted = "Bearer second"
        for _ in range(3):
            with pytest.raises(Unauthorized):
                await client.get(METAL_HOSTS, "a")
        reads.clear()
        write(tmp_path / "config", {"token": "second"}, server=server)
        await asyncio.gather(*(client.get(METAL_HOSTS, "a") for _ in range(5)))
    assert len(reads) == 1, "one of the five requests that were refused at once has read the file for all"


async def test_context_is_the_one_that_was_chosen(tmp_path: Path) -> None:
    path = write(tmp_path / "config", {"token": "hunter2"})
    config = yaml.safe_load(path.read_text())
    config["contexts"].append({"name": "other", "context": {"cluster": "c", "user": "v"}})
    config["users"].append({"name": "v", "user": {"token": "hunter3"}})
    path.write_text(yaml.safe_dump(config))
    loaded = credentials.load(path, context="other")
    assert await header(loaded) == "Bearer hunter3"
    config["users"][1]["user"]["token"] = "hunter4"
    path.write_text(yaml.safe_dump(config))
    assert await loaded.refresh("Bearer hunter3")
    assert await header(loaded) == "Bearer hunter4"
    with pytest.raises(CredentialsError, match="contexts has no entry named 'third'"):
        credentials.load(path, context="third")


@pytest.mark.parametrize(
    "sections",
    [{"contexts": [3]}, {"clusters": 3}, {"users": [{"user": {}}]}, {"contexts": [{"name": "a", "context": 3}]}],
)
def test_kubeconfig_of_another_form_is_refused_with_the_section(tmp_path: Path, sections: dict[str, Any]) -> None:
    path = write(tmp_path / "config", {"token": "hunter2"})
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | sections))
    (section,) = sections
    with pytest.raises(CredentialsError, match=rf"config: {section} must be a list of entries with name and "):
        credentials.load(path)


async def test_kubeconfig_that_is_being_written_is_read_again_later(tmp_path: Path) -> None:
    config = tmp_path / "config"
    loaded = credentials.load(write(config, {"token": "first"}))
    config.write_text("token: [hunter2")
    for _ in range(2):
        with pytest.raises(CredentialsError, match="cannot be read as YAML"):
            await loaded.refresh("Bearer first")
    write(config, {"client-key": "b"})
    with pytest.raises(CredentialsError, match="context main: the user has no token any more: write one"):
        await loaded.refresh("Bearer first")
    write(config, {"token": "second"})
    assert await loaded.refresh("Bearer first")
    assert await header(loaded) == "Bearer second"


async def test_other_context_has_its_own_cluster_user_and_namespace(tmp_path: Path) -> None:
    path = write(tmp_path / "config", {"token": "first"})
    config = yaml.safe_load(path.read_text())
    config["contexts"].append({"name": "other", "context": {"cluster": "d", "user": "v", "namespace": "team"}})
    config["clusters"].append({"name": "d", "cluster": {"server": "http://127.0.0.1:2"}})
    config["users"].append({"name": "v", "user": {"token": "second"}})
    path.write_text(yaml.safe_dump(config))
    current, other = credentials.load(path), credentials.load(path, context="other")
    assert (current.server, current.namespace, await header(current)) == ("http://127.0.0.1:1", "", "Bearer first")
    assert (other.server, other.namespace, await header(other)) == ("http://127.0.0.1:2", "team", "Bearer second")
    config["users"][1]["user"]["token"] = "third"
    path.write_text(yaml.safe_dump(config))
    assert await other.refresh("Bearer second"), "the user of the same context is read again"
    assert await header(other) == "Bearer third"
    with pytest.raises(CredentialsError, match="contexts has no entry named 'absent': there are main, other"):
        credentials.load(path, context="absent")


async def test_a_token_file_is_relative_to_the_kubeconfig_and_read_again_when_rotated(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("first\n")
    loaded = credentials.load(write(tmp_path / "config", {"tokenFile": "token"}))
    assert await header(loaded) == "Bearer first"
    replacement = tmp_path / "new"
    replacement.write_text("second")
    replacement.rename(token)
    assert await header(loaded) == "Bearer second"
    token.unlink()
    assert await header(loaded) == "Bearer second", "a file that is away for a moment leaves the last token"
    assert await loaded.refresh("Bearer first"), "another request has read the file already"
    assert not await loaded.refresh("Bearer second")


async def test_a_token_file_replaces_the_token_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("mine")
    loaded = credentials.load(write(tmp_path / "config", {"token": "theirs"}), tmp_path / "token")
    assert await header(loaded) == "Bearer mine"


@pytest.mark.parametrize("content", [None, ""])
async def test_a_token_file_without_token_is_an_error(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "token").write_text(content)
    loaded = credentials.load(write(tmp_path / "config", {"tokenFile": "token"}))
    with pytest.raises(CredentialsError, match=f"token file {tmp_path}/token: "):
        await header(loaded)


async def test_kubeconfigs_are_merged_and_the_first_definition_wins(tmp_path: Path) -> None:
    first = write(tmp_path / "first", {"token": "first"})
    second = write(tmp_path / "second", {"token": "second"}, server="http://10.0.0.2")
    environ = {"KUBECONFIG": f"{tmp_path / 'missing'}:{first}:{second}"}
    loaded = credentials.load(None, environ=environ)
    assert (loaded.server, await header(loaded)) == ("http://127.0.0.1:1", "Bearer first")


async def test_in_cluster_files_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(credentials, "SERVICE_ACCOUNT", tmp_path)
    (tmp_path / "token").write_text("pod")
    (tmp_path / "ca.crt").write_bytes(CERTIFICATE.read_bytes())
    loaded = credentials.load(None, environ={"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"})
    assert (loaded.server, await header(loaded)) == ("https://[fd00::1]:443", "Bearer pod")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "no such file; pass --kubeconfig"),
        ("token: [hunter2", "cannot be read as YAML"),
        ("- hunter2", "holds no mapping"),
        ("clusters: []", "no current-context"),
        ("current-context: a", "contexts has no entry named 'a'"),
        ("{current-context: a, contexts: [{name: a, context: {cluster: c}}]}", "clusters has no entry named 'c'"),
        (
            "{current-context: a, contexts: [{name: a, context: {cluster: c}}], clusters: [{name: c, cluster: {}}]}",
            "cluster.server '' is not an http",
        ),
    ],
)
def test_unusable_kubeconfig_is_named_without_its_content(tmp_path: Path, content: str | None, words: str) -> None:
    path = tmp_path / "config"
    if content is not None:
        path.write_text(content)
    with pytest.raises(CredentialsError, match=words) as error:
        credentials.load(path)
    assert str(path) in str(error.value)
    assert "hunter2" not in str(error.value)


def test_impersonation_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CredentialsError, match="user has as, which Pomona does not support"):
        credentials.load(write(tmp_path / "config", {"token": "a", "as": "admin"}))


def test_an_invalid_certificate_is_named(tmp_path: Path) -> None:
    with pytest.raises(CredentialsError, match="context main: TLS: "):
        credentials.load(write(tmp_path / "config", {}, server="https://a", **{"certificate-authority": "missing"}))


# ---- TLS, on a server that demands a client certificate


@pytest_asyncio.fixture
async def tls_server() -> AsyncIterator[str]:
    async def answer(request: web.Request) -> web.Response:
        assert request.transport
        peer = request.transport.get_extra_info("peercert")
        return web.json_response({"peer": peer["subject"][0][0][1]})

    application = web.Application()
    application.router.add_get("/{path:.*}", answer)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(CERTIFICATE))
    context.load_cert_chain(CERTIFICATE)
    context.verify_mode = ssl.CERT_REQUIRED
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    yield f"https://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


def pem(kind: str) -> bytes:
    begin, end = f"-----BEGIN {kind}-----", f"-----END {kind}-----\n"
    text = CERTIFICATE.read_text()
    return text[text.index(begin) : text.index(end) + len(end)].encode()


async def peer(loaded: Credentials) -> str:
    async with connect(loaded) as client:
        return str((await client.get(METAL_HOSTS, "a"))["peer"])


async def test_client_certificate_from_files_is_used(tmp_path: Path, tls_server: str) -> None:
    (tmp_path / "tls.crt").write_bytes(pem("CERTIFICATE"))
    (tmp_path / "tls.key").write_bytes(pem("PRIVATE KEY"))
    user = {"client-certificate": "tls.crt", "client-key": "tls.key"}
    authority = {"certificate-authority": "tls.crt"}
    assert (
        await peer(credentials.load(write(tmp_path / "config", user, server=tls_server, **authority))) == "pomona-test"
    )


@pytest.mark.parametrize("trust", ["certificate-authority-data", "insecure-skip-tls-verify", "tls-server-name"])
async def test_inline_client_certificate_is_used(tmp_path: Path, tls_server: str, trust: str) -> None:
    certificate = base64.b64encode(pem("CERTIFICATE")).decode()
    user = {"client-certificate-data": certificate, "client-key-data": base64.b64encode(pem("PRIVATE KEY")).decode()}
    cluster: dict[str, Any] = {"certificate-authority-data": certificate}
    if trust == "insecure-skip-tls-verify":
        cluster = {trust: True}
    if trust == "tls-server-name":
        cluster[trust] = "api.example.com"
    assert await peer(credentials.load(write(tmp_path / "config", user, server=tls_server, **cluster))) == "pomona-test"


@pytest.mark.parametrize("cluster", [{}, {"tls-server-name": "other.example.com"}])
async def test_a_server_that_cannot_prove_itself_is_unreachable(
    tmp_path: Path, tls_server: str, cluster: dict[str, str]
) -> None:
    if cluster:
        cluster = {**cluster, "certificate-authority-data": base64.b64encode(pem("CERTIFICATE")).decode()}
    with pytest.raises(Unreachable, match="certificate verify failed"):
        await peer(credentials.load(write(tmp_path / "config", {}, server=tls_server, **cluster)))


# ---- exec plugins, through the kubernetes library


def plugin(tmp_path: Path, status: str) -> dict[str, Any]:
    """Return a user with an exec plugin that counts its runs and prints `status`, a Python expression with `runs`."""
    script = tmp_path / "plugin"
    script.write_text(f"""#!{sys.executable}
import json, pathlib, sys
count = pathlib.Path({str(tmp_path / "runs")!r})
runs = int(count.read_text()) + 1 if count.exists() else 1
count.write_text(str(runs))
print(json.dumps({{"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": {status}}}))
""")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return {"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": "./plugin", "args": []}}


def runs(tmp_path: Path) -> int:
    return int((tmp_path / "runs").read_text())


async def test_an_exec_plugin_is_run_once_and_again_after_a_401(tmp_path: Path) -> None:
    loaded = credentials.load(write(tmp_path / "config", plugin(tmp_path, "{'token': f'token-{runs}'}")))
    assert [await header(loaded), await header(loaded)] == ["Bearer token-1", "Bearer token-1"]
    assert [await loaded.refresh("Bearer token-1"), await loaded.refresh("Bearer token-1")] == [True, True]
    assert await header(loaded) == "Bearer token-2"
    assert runs(tmp_path) == 2, "requests that are refused together log in once"


async def test_call_refused_with_an_old_token_is_repeated_with_a_new_one(
    tmp_path: Path, serve: Callable[[Any], Awaitable[str]]
) -> None:
    async def accept_the_second(request: web.Request) -> web.Response:
        accepted = request.headers["Authorization"] == "Bearer token-2"
        return web.json_response({}, status=200 if accepted else 401)

    server = await serve(accept_the_second)
    config = write(tmp_path / "config", plugin(tmp_path, "{'token': f'token-{runs}'}"), server=server)
    async with connect(credentials.load(config)) as client:
        assert await client.get(METAL_HOSTS, "a") == {}
    assert runs(tmp_path) == 2


async def test_an_exec_plugin_is_run_again_before_its_token_expires(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expiry = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 3600))
    user = plugin(tmp_path, f"{{'token': f'token-{{runs}}', 'expirationTimestamp': {expiry!r}}}")
    loaded = credentials.load(write(tmp_path / "config", user))
    assert await header(loaded) == "Bearer token-1"
    now = time.time()
    monkeypatch.setattr("kube.credentials.time.time", lambda: now + 3500)
    assert await header(loaded) == "Bearer token-1"
    monkeypatch.setattr("kube.credentials.time.time", lambda: now + 3550)
    assert await header(loaded) == "Bearer token-2"


async def test_an_exec_plugin_may_give_a_certificate(tmp_path: Path, tls_server: str) -> None:
    status = {"clientCertificateData": pem("CERTIFICATE").decode(), "clientKeyData": pem("PRIVATE KEY").decode()}
    (tmp_path / "ca.pem").write_bytes(pem("CERTIFICATE"))
    config = write(
        tmp_path / "config",
        plugin(tmp_path, json.dumps(status)),
        server=tls_server,
        **{"certificate-authority": "ca.pem"},
    )
    assert await peer(credentials.load(config)) == "pomona-test"


async def test_an_exec_plugin_that_fails_makes_the_call_unreachable(tmp_path: Path) -> None:
    async with connect(credentials.load(write(tmp_path / "config", plugin(tmp_path, "{}")))) as client:
        with pytest.raises(Unreachable, match="context main: the plugin gave neither token nor certificate"):
            await client.get(METAL_HOSTS, "a")


def test_a_plain_kubeconfig_never_imports_the_librarys_models(tmp_path: Path) -> None:
    """The import would cost a Mac's agent 21 MiB of memory."""
    config = write(tmp_path / "config", {"token": "a"})
    code = f"""
import asyncio, sys
from pathlib import Path
from kube import apply, client, credentials, events, lease, queue, watch
asyncio.run(credentials.load(Path({str(config)!r})).authorization())
print([name for name in sys.modules if name.split('.')[0] in ('kubernetes', 'pydantic', 'kopf')])
"""
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert loaded.stdout.strip() == "[]"
