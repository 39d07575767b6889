"""`pomona inspect` and `pomona fetch` with mirrors: whom they ask, what they accept, and who gets the token."""

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from artifacts.errors import ArtifactError
from artifacts.mirrors import parse_mirrors, read_from_any
from artifacts.retry import Patience
from artifacts.source import Source, SourceError, parse
from tests.support.file_server import FileServer
from tests.support.tiny_models import tiny_gguf
from tests.unit.artifacts.pomona_call import run_pomona

SHA = "a" * 64
TOKEN = "open-sesame"
SOURCE = "http://one.example/tiny.gguf"
ARTIFACT = f"oci://one.example/acme/tiny@sha256:{SHA}"


class Servers:
    """Servers that answer with a reason, or with their own name."""

    def __init__(self, **reasons: str) -> None:
        self.reasons = reasons
        self.asked: list[str] = []

    async def read(self, server: Source, patience: Patience) -> str:
        assert patience.attempts > 0
        name = server.path.partition("//")[2].partition(".")[0]
        self.asked.append(name)
        if reason := self.reasons.get(name):
            retryable: Any = reason == "SourceUnreachable"
            raise ArtifactError(reason, f"{name}: {reason}", retryable=retryable)  # type: ignore[arg-type]
        return name


def mirrors_of(*names: str) -> list[Source]:
    return parse_mirrors(parse(SOURCE), [f"http://{name}.example/other.gguf" for name in names], SHA)


@pytest.mark.parametrize("reason", ["SourceUnreachable", "SourceNotFound"])
async def test_mirrors_are_asked_in_order(reason: str) -> None:
    servers = Servers(one=reason, two=reason)
    answer, server = await read_from_any(parse(SOURCE), mirrors_of("two", "three", "four"), servers.read)
    assert (answer, server.path, servers.asked) == ("three", "http://three.example/other.gguf", ["one", "two", "three"])


async def test_mirror_is_not_asked_if_the_source_answers() -> None:
    servers = Servers()
    _answer, server = await read_from_any(parse(SOURCE), mirrors_of("two"), servers.read)
    assert (server.text, servers.asked) == (SOURCE, ["one"])


@pytest.mark.parametrize("reason", ["ChecksumMismatch", "SourceUnauthorized", "SourceForbidden", "NoSpace"])
async def test_answer_that_must_not_be_used_ends_the_search(reason: str) -> None:
    servers = Servers(one="SourceUnreachable", two=reason)
    with pytest.raises(ArtifactError) as caught:
        await read_from_any(parse(SOURCE), mirrors_of("two", "three"), servers.read)
    assert (caught.value.reason, servers.asked) == (reason, ["one", "two"])


async def test_failure_names_all_servers_and_is_retried_if_one_may_answer_later() -> None:
    servers = Servers(one="SourceNotFound", two="SourceUnreachable")
    with pytest.raises(ArtifactError) as caught:
        await read_from_any(parse(SOURCE), mirrors_of("two"), servers.read)
    assert caught.value.message == "one: SourceNotFound; two: SourceUnreachable"
    assert (caught.value.reason, caught.value.retryable) == ("SourceNotFound", True)


@pytest.mark.parametrize(
    ("source", "mirror", "sha256"),
    [
        (SOURCE, "http://two.example/tiny.gguf", None),
        (SOURCE, "file:///etc/passwd.gguf", SHA),
        (SOURCE, "hf://org/repo", SHA),
        (SOURCE, "ollama://qwen3:8b", SHA),
        ("file:///models/tiny.gguf", "http://two.example/tiny.gguf", SHA),
        ("hf://org/repo", "http://two.example/tiny.gguf", SHA),
        (ARTIFACT, "http://two.example/tiny.gguf", SHA),
        (SOURCE, ARTIFACT, SHA),
        ("oci://one.example/acme/tiny:v1", "oci://two.example/acme/tiny:v1", None),
        (ARTIFACT, "oci://two.example/acme/tiny:v1", None),
        (ARTIFACT, f"oci://two.example/acme/tiny@sha256:{'b' * 64}", None),
    ],
    ids=[
        *("no digest", "file of this machine", "folder", "library", "of a local file", "of a folder"),
        *("file of an artifact", "artifact of a file", "of a tag", "a tag", "another artifact"),
    ],
)
def test_mirror_that_cannot_be_verified_or_reached_is_refused(source: str, mirror: str, sha256: str | None) -> None:
    with pytest.raises(SourceError):
        parse_mirrors(parse(source), [mirror], sha256)


async def run_job(verb: str, source: str, *arguments: str, result: Path) -> tuple[int, dict[str, Any]]:
    """Run a command, and return its exit code and the result that a Job would report."""
    ran = await run_pomona(verb, source, *arguments, "--result", str(result), POMONA_SOURCE_TOKEN=TOKEN)
    return ran.code, json.loads(await asyncio.to_thread(result.read_bytes))


async def test_mirror_serves_what_the_source_lost_and_gets_no_token(server: FileServer, tmp_path: Path) -> None:
    copy, result = server.root / "copy.gguf", tmp_path / "result"
    tiny_gguf.write(copy)
    content = await asyncio.to_thread(copy.read_bytes)
    options = ("--sha256", hashlib.sha256(content).hexdigest(), "--mirror", f"{server.url}/copy.gguf")
    source = f"{server.url}/tiny.gguf"

    code, facts = await run_job("inspect", source, *options, result=result)
    assert (code, facts["file"], facts["revision"]) == (0, "tiny.gguf", "")
    code, _facts = await run_job("fetch", source, "--to", str(tmp_path / "out"), *options, result=result)
    assert code == 0
    assert (tmp_path / "out/tiny.gguf").read_bytes() == content, "under the name that pods expect"
    assert {request.authorization for request in server.seen("tiny.gguf")} == {f"Bearer {TOKEN}"}
    assert {request.authorization for request in server.seen("copy.gguf")} == {None}


async def test_mirror_with_other_bytes_is_never_used(server: FileServer, tmp_path: Path) -> None:
    tiny_gguf.write(server.root / "copy.gguf", name="forged")
    options = ("--sha256", SHA, "--mirror", f"{server.url}/copy.gguf", "--to", str(tmp_path / "out"))
    code, facts = await run_job("fetch", f"{server.url}/tiny.gguf", *options, result=tmp_path / "result")
    assert (code, facts["reason"]) == (2, "ChecksumMismatch")
    assert not (tmp_path / "out/tiny.gguf").exists()
