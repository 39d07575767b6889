"""A real registry: open, with a user and password, or behind a server of tokens.

Its user is `user` with the password `pass`. `token_key.json` is an RSA key that signs tokens, made once for tests.
"""

import base64
import hashlib
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp
from aiohttp import web

from tests.support.servers.programs import find_free_port, run_server
from tests.support.stub_server import serve_stub

BASIC: Final = f"Basic {base64.b64encode(b'user:pass').decode()}"
"""The Authorization header of the user."""
# bcrypt, the only hash that the registry takes
_HTPASSWD: Final = "user:$2b$04$kNkcvoQudTNJntcXyTEhq.NK7kyW4D2dXAn4y/OFzJlRpCQan7GrK\n"
_KEY: Final = Path(__file__).parent / "token_key.json"
_SHA256_INFO: Final = bytes.fromhex("3031300d060960864801650304020105000420")
_SERVICE: Final = "tests"
_TOKEN_SECONDS: Final = 300


@asynccontextmanager
async def serve_registry(
    folder: Path, *, address: str = "127.0.0.1", auth: Mapping[str, Any] | None = None
) -> AsyncIterator[str]:
    """Serve a registry over plain HTTP, and yield its URL; `auth` is that section of its configuration."""
    port = find_free_port(address)
    config = {
        "version": 0.1,
        "storage": {"filesystem": {"rootdirectory": str(folder / "data")}},
        "http": {"addr": f"{address}:{port}", "relativeurls": True},
        **({"auth": auth} if auth else {}),
    }
    path = _write(folder / "config.yml", json.dumps(config))  # JSON is YAML
    async with run_server("registry", ["serve", str(path)], folder / "registry.log", address=address, port=port):
        yield f"http://{address}:{port}"


@asynccontextmanager
async def serve_private_registry(folder: Path, *, address: str = "127.0.0.1") -> AsyncIterator[str]:
    """Serve a registry that takes a user with a password."""
    auth = {"htpasswd": {"realm": _SERVICE, "path": str(_write(folder / "htpasswd", _HTPASSWD))}}
    async with serve_registry(folder, address=address, auth=auth) as url:
        yield url


@asynccontextmanager
async def serve_token_registry(folder: Path, issued: list[str]) -> AsyncIterator[str]:
    """Serve a registry with a server of tokens at the same origin; the scopes of its tokens are added to `issued`."""
    backend = ""

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        if request.path == "/token":
            return _issue(request, issued)
        # Lets the registry redirect to this origin.
        headers = {name: value for name, value in request.headers.items() if name != "Transfer-Encoding"}
        async with (
            aiohttp.ClientSession(auto_decompress=False) as session,
            session.request(
                request.method, f"{backend}{request.raw_path}", headers=headers, data=await request.read()
            ) as answered,
        ):
            kept = {name: value for name, value in answered.headers.items() if name != "Transfer-Encoding"}
            return web.Response(status=answered.status, headers=kept, body=await answered.read())

    public = {name: value for name, value in _read_key().items() if name != "d"}
    keys = _write(folder / "jwks.json", json.dumps({"keys": [public]}))
    async with serve_stub(answer) as front:
        token = {"realm": f"{front}/token", "service": _SERVICE, "issuer": _SERVICE, "jwks": str(keys)}
        async with serve_registry(folder, auth={"token": token}) as backend:
            yield front


def issue_token(scope: str) -> str:
    """Return a token for a scope, repository:NAME:ACTION[,ACTION]."""
    kind, name, actions = scope.split(":")
    now = int(time.time())
    claims = {
        "iss": _SERVICE,
        "aud": _SERVICE,
        "sub": "user",
        "jti": "1",
        "iat": now,
        "nbf": now - 1,
        "exp": now + _TOKEN_SECONDS,
        "access": [{"type": kind, "name": name, "actions": actions.split(",")}],
    }
    return _sign({"typ": "JWT", "alg": "RS256", "kid": "tests"}, claims)


def _issue(request: web.BaseRequest, issued: list[str]) -> web.Response:
    if request.headers.get("Authorization") != BASIC:
        return web.Response(status=401)
    issued.append(request.query["scope"])
    return web.json_response({"token": issue_token(request.query["scope"])})


def _sign(header: Mapping[str, str], claims: Mapping[str, object]) -> str:
    text = ".".join(_encode(json.dumps(part).encode()) for part in (header, claims))
    key = _read_key()
    modulus, exponent = (int.from_bytes(_decode(key[name])) for name in ("n", "d"))
    size = (modulus.bit_length() + 7) // 8
    digest = _SHA256_INFO + hashlib.sha256(text.encode()).digest()
    padded = b"\0\1" + b"\xff" * (size - len(digest) - 3) + b"\0" + digest
    return f"{text}.{_encode(pow(int.from_bytes(padded), exponent, modulus).to_bytes(size))}"


def _read_key() -> dict[str, str]:
    return json.loads(_KEY.read_text())  # type: ignore[no-any-return]


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def _encode(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()


def _decode(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
