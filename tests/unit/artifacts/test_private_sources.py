"""Where sources may lead, and which server gets a token: decided for every hop of a download."""

import dataclasses
import socket
from pathlib import Path
from typing import Any

import pytest

from artifacts.errors import ArtifactError
from artifacts.fetch import FetchedArtifact
from artifacts.inspect import inspect
from artifacts.repositories.address_policy import Networks, is_allowed, parse_network
from artifacts.repositories.repository import SourceAccess
from artifacts.source import parse
from tests.support.file_server import ALLOWED_NETWORKS, FileServer
from tests.unit.artifacts.fetch_call import FetchCall
from tests.unit.artifacts.stored_weights import HURRIED

SECOND_ADDRESS = "127.0.0.2"
ONLY_SECOND = (parse_network(f"{SECOND_ADDRESS}/32"),)
LOOPED = 100
PRIVATE = (
    *("127.0.0.1", "127.8.9.9", "10.0.0.1", "172.16.5.5", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0"),
    *("0.1.2.3", "224.0.0.1", "239.1.1.1", "255.255.255.255", "240.0.0.1", "192.0.0.8", "192.0.2.1", "198.18.0.1"),
    *("192.88.99.1", "::1", "::", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a00:1"),
    *("64:ff9b:1::1", "2002:7f00:1::", "2002:a00:1::", "2001:0:1::1", "fe80::1%eth0", "fc00::1", "fd00:ec2::254"),
    *("fec0::1", "ff02::1", "::127.0.0.1", "2001:db8::1", "100::1", "4000::1", "localhost"),
)
PUBLIC = ("8.8.8.8", "1.1.1.1", "2606:4700::1111", "64:ff9b::808:808", "::ffff:8.8.8.8", "2002:808:808::1")


async def _fetch(source: str, to: Path, *, networks: Networks = ALLOWED_NETWORKS, **options: Any) -> FetchedArtifact:
    return await FetchCall(to, "https://hub.example")(source, allowed_networks=networks, **options)


async def _refuse(source: str, to: Path, **options: Any) -> ArtifactError:
    with pytest.raises(ArtifactError) as caught:
        await _fetch(source, to, **options)
    assert not (to / "weights.gguf").exists()
    return caught.value


@pytest.mark.parametrize("address", PRIVATE)
def test_private_address_is_refused(address: str) -> None:
    assert not is_allowed(address, ())


@pytest.mark.parametrize("address", PUBLIC)
def test_public_address_is_allowed(address: str) -> None:
    assert is_allowed(address, ())


def test_allowed_network_covers_its_mapped_addresses() -> None:
    allowed = (parse_network("10.1.0.0/16"),)
    assert is_allowed("10.1.2.3", allowed)
    assert is_allowed("::ffff:10.1.2.3", allowed)
    assert not is_allowed("10.2.0.1", allowed)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::ffff:127.0.0.1]", "0.0.0.0"])
async def test_source_in_a_private_network_is_not_requested(
    server: FileServer, weights: bytes, tmp_path: Path, host: str
) -> None:
    del weights
    source = f"http://{host}:{server.port}/weights.gguf"

    error = await _refuse(source, tmp_path / "to", networks=())

    assert (error.reason, error.retryable) == ("SourceForbidden", False)
    assert "--allow-private-sources CIDR" in error.message
    assert server.requests == []
    with pytest.raises(ArtifactError) as caught:
        await inspect(parse(source), SourceAccess(endpoint="https://hub.example"))
    assert caught.value.reason == "SourceForbidden"
    assert server.requests == []


@pytest.mark.parametrize("host", ["127.1", "2130706433", "0x7f000001", "0177.0.0.1"])
async def test_odd_spelling_of_a_private_address_is_not_requested(
    server: FileServer, tmp_path: Path, host: str
) -> None:
    await _refuse(f"http://{host}:{server.port}/weights.gguf", tmp_path / "to", networks=())
    assert server.requests == []


async def test_name_that_leads_to_a_private_address_later_is_refused_then(
    server: FileServer, weights: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The resolver answers an allowed address first and loopback from then on, as DNS rebinding does."""
    del weights
    server.redirects = {"/first.gguf": f"http://files.example:{server.port}/weights.gguf"}
    answers = iter([SECOND_ADDRESS])

    def resolve(host: str, port: int, *_: Any, **__: Any) -> list[Any]:
        assert host == "files.example"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (next(answers, "127.0.0.1"), port))]

    async with FileServer(server.root, address=SECOND_ADDRESS) as allowed:
        allowed.redirects = {"/first.gguf": f"http://files.example:{server.port}/weights.gguf"}
        monkeypatch.setattr(socket, "getaddrinfo", resolve)
        error = await _refuse(f"http://files.example:{allowed.port}/first.gguf", tmp_path / "to", networks=ONLY_SECOND)

        assert error.reason == "SourceForbidden"
        assert len(allowed.requests) == 1
    assert server.requests == []


async def test_redirect_into_a_private_network_is_not_followed(
    server: FileServer, weights: bytes, tmp_path: Path
) -> None:
    del weights
    async with FileServer(server.root, address=SECOND_ADDRESS) as allowed:
        allowed.redirects = {"/start.gguf": f"{server.url}/weights.gguf"}

        error = await _refuse(f"{allowed.url}/start.gguf", tmp_path / "to", networks=ONLY_SECOND)

        assert error.reason == "SourceForbidden"
        assert len(allowed.requests) == 1
    assert server.requests == []


async def test_redirect_inside_allowed_networks_is_followed(server: FileServer, weights: bytes, tmp_path: Path) -> None:
    async with FileServer(server.root, address=SECOND_ADDRESS) as other:
        other.redirects = {"/start.gguf": f"{server.url}/weights.gguf"}
        done = await _fetch(f"{other.url}/start.gguf", tmp_path / "to")
    assert done.path.read_bytes() == weights


async def test_hub_that_the_operator_chose_may_be_private_but_not_what_it_redirects_to(
    server: FileServer, weights: bytes, tmp_path: Path
) -> None:
    del weights
    error = await _refuse("hf://acme/tiny/weights.gguf", tmp_path / "to", networks=(), endpoint=server.url)

    assert error.reason == "SourceForbidden"
    assert [request.port for request in server.requests] == [server.port]


@pytest.mark.parametrize(
    ("location", "problem"),
    [
        ("file:///etc/passwd", "redirects to what is no http(s):// URL"),
        ("ftp://127.0.0.1/weights.gguf", "redirects to what is no http(s):// URL"),
        ("http://[", "redirects to what is no http(s):// URL"),
        ("http://127.0.0.1:99999/", "redirects to what is no http(s):// URL"),
        ("/loop.gguf", "redirects more than 10 times"),
    ],
)
async def test_redirect_that_leads_nowhere_is_refused(
    server: FileServer, tmp_path: Path, location: str, problem: str
) -> None:
    server.redirects = {"/loop.gguf": location}
    error = await _refuse(f"{server.url}/loop.gguf", tmp_path / "to")
    assert (error.reason, error.retryable) == ("SourceRefused", False)
    assert problem in error.message
    assert len(server.requests) < LOOPED


async def test_token_goes_to_the_origin_of_the_source_only(server: FileServer, weights: bytes, tmp_path: Path) -> None:
    async with FileServer(server.root, address=server.address) as other:
        server.redirects = {"/start.gguf": f"{other.url}/back.gguf"}
        other.redirects = {"/back.gguf": f"http://user:pass@127.0.0.1:{server.port}/weights.gguf"}

        done = await _fetch(f"{server.url}/start.gguf", tmp_path / "to", token="secret")

        assert done.path.read_bytes() == weights
        assert [request.authorization for request in other.requests] == [None]
    assert [request.authorization for request in server.requests] == ["Bearer secret"] * 2


@pytest.mark.parametrize("token", [None, "secret"])
async def test_passwords_of_netrc_are_never_sent(
    server: FileServer, weights: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token: str | None
) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login owner password owners\ndefault login owner password owners\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))

    done = await _fetch(f"{server.url}/weights.gguf", tmp_path / "to", token=token)

    assert done.size_bytes == len(weights)
    assert [request.authorization for request in server.requests] == [token and f"Bearer {token}"]


async def test_proxy_of_the_environment_is_used(
    server: FileServer, weights: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file server takes the whole URL of a proxied request, and serves its path."""
    monkeypatch.setenv("http_proxy", server.url)
    monkeypatch.setenv("no_proxy", "")

    done = await _fetch("http://files.example/weights.gguf", tmp_path / "to", networks=())
    assert done.path.read_bytes() == weights


@pytest.mark.parametrize(
    "host",
    [
        *("169.254.169.254", "[::1]", "127.0.0.1.", "127.1", "2130706433", "0x7f000001", "0177.0.0.1", "0"),
        *("localhost", "LOCALHOST", "localhost.", "any.localhost"),
    ],
)
async def test_proxy_is_not_asked_for_a_private_address_however_it_is_written(
    server: FileServer, weights: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    del weights
    monkeypatch.setenv("http_proxy", server.url)
    monkeypatch.setenv("no_proxy", "")
    error = await _refuse(f"http://{host}/weights.gguf", tmp_path / "to", networks=())
    assert error.reason == "SourceForbidden"
    assert server.requests == []


async def test_message_about_a_private_address_does_not_depend_on_what_answers_there(
    server: FileServer, weights: bytes, tmp_path: Path
) -> None:
    """Else the status of a Model would scan the ports and paths of a network that its author cannot reach."""
    del weights
    with socket.create_server(("127.0.0.1", 0)) as listener:
        closed_port = listener.getsockname()[1]
    messages = set()
    for source in (
        f"http://127.0.0.1:{closed_port}/weights.gguf",
        f"{server.url}/weights.gguf",
        f"{server.url}/no.gguf",
    ):
        error = await _refuse(source, tmp_path / "to", networks=())
        messages.add((error.reason, error.retryable, error.message.replace(source, "SOURCE")))
    assert len(messages) == 1, messages


async def test_error_tells_nothing_of_the_bytes_that_were_found(server: FileServer, tmp_path: Path) -> None:
    (server.root / "secret.gguf").write_bytes(b"KEY=topsecret")
    source = f"{server.url}/secret.gguf"

    access = SourceAccess(allowed_networks=ALLOWED_NETWORKS, patience=dataclasses.replace(HURRIED, attempts=1))
    with pytest.raises(ArtifactError) as caught:
        await inspect(parse(source), access)
    assert "KEY" not in caught.value.message

    error = await _refuse(source, tmp_path / "to", sha256="0" * 64)
    assert error.reason == "ChecksumMismatch"
    assert "10db3bb1" not in error.message
