"""`pomona inspect` and `pomona fetch`: exit codes, the result file, and messages on the terminal."""

import asyncio
import hashlib
import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from cli.fetch import command
from cli.fetch_progress import ProgressLines, show_fetch_progress
from cli.outcome import RESULT_BYTES, encode_within
from tests.support.eventually import eventually
from tests.support.file_server import FileServer, TransferFault
from tests.support.live_processes import run_beside
from tests.support.tiny_models import tiny_gguf
from tests.unit.artifacts.pomona_call import run_pomona as _pomona


@pytest.fixture
def model(server: FileServer) -> Path:
    path = server.root / "acme/tiny/tiny.gguf"
    path.parent.mkdir(parents=True)
    tiny_gguf.write(path)
    return path


async def test_result_file_and_exit_code_have_everything_that_a_job_reports(
    server: FileServer, model: Path, tmp_path: Path
) -> None:
    content = await asyncio.to_thread(model.read_bytes)
    source, result = "hf://acme/tiny@main/tiny.gguf", tmp_path / "termination-log"
    ran = await _pomona("inspect", source, "--output=json", "--result", str(result), HF_ENDPOINT=server.url)
    assert (ran.code, ran.err) == (0, "")
    facts = json.loads(result.read_bytes())
    assert json.loads(ran.out) == facts
    layers = [{"count": 2, "keyElements": 32, "valueElements": 32}]
    assert (facts["sizeBytes"], facts["layout"]["layers"]) == (len(content), layers)

    arguments = ["--revision", facts["revision"], "--sha256", facts["sha256"], "--to", str(tmp_path / "out")]
    ran = await _pomona("fetch", source, *arguments, "--result", str(result), HF_ENDPOINT=server.url)
    assert (ran.code, ran.err) == (0, "")
    assert (tmp_path / "out/tiny.gguf").read_bytes() == content
    assert facts["sha256"] in ran.out
    assert json.loads(result.read_bytes())["sha256"] == facts["sha256"]


async def test_fetch_reports_the_header_that_arrived_and_refuses_what_is_no_model(
    server: FileServer, model: Path, tmp_path: Path
) -> None:
    """A server may let a Job inspect one file, and send another one of the same size under the same entity tag."""
    server.etag = "same"
    source, result = f"{server.url}/acme/tiny/tiny.gguf", tmp_path / "result"
    size = len(await asyncio.to_thread(model.read_bytes))
    ran = await _pomona("inspect", source, "--output=json")
    wanted = ["--revision", json.loads(ran.out)["revision"], "--size-bytes", str(size), "--result", str(result)]
    ran = await _pomona("fetch", source, "--to", str(tmp_path / "good"), *wanted)
    assert (ran.code, ran.err) == (0, "")
    facts = json.loads(result.read_bytes())
    assert facts["gguf"]["architecture"] == "llama"
    assert facts["layout"]["layers"] == [{"count": 2, "keyElements": 32, "valueElements": 32}]

    await asyncio.to_thread(model.write_bytes, bytes(size))
    ran = await _pomona("fetch", source, "--to", str(tmp_path / "zeros"), *wanted)
    assert ran.code == 2
    assert json.loads(result.read_bytes())["reason"] == "HeaderInvalid"

    await asyncio.to_thread(model.write_bytes, bytes(size + 1))
    ran = await _pomona("fetch", source, "--to", str(tmp_path / "longer"), *wanted)
    assert ran.code == 2
    assert json.loads(result.read_bytes())["reason"] == "SourceChanged"
    assert not list((tmp_path / "longer").glob("*.gguf"))


async def test_permanent_failure_exits_with_2_and_one_line(server: FileServer, tmp_path: Path) -> None:
    result = tmp_path / "termination-log"
    for verb, *rest in (["inspect"], ["fetch", "--to", str(tmp_path)]):
        ran = await _pomona(verb, server.url + "/none.gguf", *rest, "--result", str(result))
        assert (ran.code, ran.out) == (2, "")
        assert ran.err.startswith(f"pomona {verb}: {server.url}/none.gguf: ")
        assert ran.err.count("\n") == 1
        facts = json.loads(result.read_bytes())
        assert (facts["reason"], facts["retryable"]) == ("SourceNotFound", False)


async def test_retryable_failure_exits_with_1(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ran = await _pomona("fetch", "http://127.0.0.1:9/x.gguf", "--to", str(tmp_path / "file"))
    assert ran.code == 1
    assert ran.err.startswith("pomona fetch: ")
    assert ran.err.count("\n") == 1


def test_invalid_digest_is_permanent() -> None:
    ran = CliRunner().invoke(command, ["http://127.0.0.1:9/x.gguf", "--to", ".", "--sha256", "beef"])
    assert ran.exit_code == 2
    assert "64 hexadecimal digits" in ran.output


async def test_token_comes_from_the_environment(server: FileServer, model: Path) -> None:
    server.token = "hf_secret"
    source = f"hf://acme/tiny/{model.name}"
    ran = await _pomona("inspect", source, HF_ENDPOINT=server.url, HF_TOKEN="hf_secret")
    assert ran.code == 0
    assert "with 4,096 tokens of context: " in ran.out


async def test_token_of_the_hub_goes_to_no_other_server(server: FileServer, model: Path, tmp_path: Path) -> None:
    source = f"{server.url}/acme/tiny/{model.name}"
    for verb, *rest in (["inspect"], ["fetch", "--to", str(tmp_path)]):
        ran = await _pomona(verb, source, *rest, HF_TOKEN="hf_secret")
        assert ran.code == 0
        assert {request.authorization for request in server.requests} == {None}
        server.requests.clear()

    ran = await _pomona("inspect", source, HF_TOKEN="hf_secret", POMONA_SOURCE_TOKEN="own")
    assert ran.code == 0
    assert {request.authorization for request in server.requests} == {"Bearer own"}

    server.requests.clear()
    ran = await _pomona("inspect", source, HF_TOKEN="hf_secret", HF_ENDPOINT=server.url)
    assert ran.code == 0
    assert {request.authorization for request in server.requests} == {"Bearer hf_secret"}


async def test_private_source_needs_the_option(server: FileServer, model: Path) -> None:
    source = f"{server.url}/acme/tiny/{model.name}"
    ran = await _pomona("inspect", source, POMONA_ALLOW_PRIVATE_SOURCES="")
    assert (ran.code, server.requests) == (2, [])
    assert "--allow-private-sources CIDR" in ran.err

    ran = await _pomona("inspect", source, "--allow-private-sources", "127.0.0.0/8", POMONA_ALLOW_PRIVATE_SOURCES="")
    assert ran.code == 0


async def test_local_file_is_verified_in_place(model: Path, tmp_path: Path) -> None:
    content = await asyncio.to_thread(model.read_bytes)
    source, root = f"file://{model}", f"--file-root={model.parent}"
    ran = await _pomona("fetch", source, root, "--sha256", hashlib.sha256(content).hexdigest())
    assert (ran.code, ran.out.split()[0]) == (0, str(model))

    ran = await _pomona("fetch", source, root, "--to", str(tmp_path / "to"))
    assert ran.code == 2
    assert "leave out --to" in ran.err


async def test_sigterm_ends_a_fetch_and_keeps_the_partial_download(
    server: FileServer, model: Path, tmp_path: Path
) -> None:
    server.faults.append(TransferFault(1 << 17, silent=True))
    source, part = f"{server.url}/acme/tiny/{model.name}", tmp_path / "tiny.gguf.part"
    argv = (sys.executable, "-m", "cli.main", "fetch", source, "--to", str(tmp_path))
    async with run_beside(*argv, stderr=subprocess.PIPE) as process:
        await eventually(lambda: part.exists() and part.stat().st_size > 0)
        process.terminate()
        _, err = await process.communicate()
    assert (process.returncode, err) == (1, b"pomona fetch: stopped; run the command again to resume\n")
    assert part.exists()


def test_progress_in_a_log_is_an_occasional_line(capsys: pytest.CaptureFixture[str]) -> None:
    now = iter([0.0, 0.0, 5.0, 10.0, 15.0, 20.0])
    lines = ProgressLines("a.gguf", lambda: next(now))
    for done in range(5):
        lines.show(done << 20, 8 << 20)
    assert capsys.readouterr().err == (
        "a.gguf: 2.0 MiB of 8.0 MiB, 25 %, 204.8 KiB/s, 30 s left\n"
        "a.gguf: 4.0 MiB of 8.0 MiB, 50 %, 204.8 KiB/s, 20 s left\n"
    )


def test_progress_of_a_resumed_download_says_so_and_counts_what_comes(capsys: pytest.CaptureFixture[str]) -> None:
    now = iter([0.0, 0.0, 10.0])
    lines = ProgressLines("a.gguf", lambda: next(now))
    for done in (2 << 20, 3 << 20):
        lines.show(done, None)
    assert capsys.readouterr().err == "a.gguf: resumed at 2.0 MiB\na.gguf: 3.0 MiB, 102.4 KiB/s\n"


def test_name_of_a_file_is_no_markup_of_its_progress(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever names a repository or its files could bring links to the terminal, or end the download."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    for name in ("[link=https://thief.example]model[/link].gguf", "[/b].gguf"):
        with show_fetch_progress(name) as show:
            show(1, 2)
        assert name in capsys.readouterr().err


async def test_refused_source_and_help_never_import_aiohttp() -> None:
    code = "import sys, cli.fetch, cli.inspect; sys.exit('aiohttp' in sys.modules or 'rich' in sys.modules)"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    assert await process.wait() == 0


async def test_job_never_imports_rich() -> None:
    code = "import sys, artifacts.fetch, artifacts.inspect; sys.exit('rich' in sys.modules)"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    assert await process.wait() == 0


@given(
    st.dictionaries(
        st.text(max_size=9), st.text(max_size=30).map(lambda text: text * 99) | st.integers() | st.none(), max_size=9
    )
)
def test_result_always_fits_a_termination_message(facts: dict[str, object]) -> None:
    encoded = encode_within({"message": "x" * 9999, "gguf": facts}, RESULT_BYTES)
    assert len(encoded) <= RESULT_BYTES
    assert set(msgspec.json.decode(encoded)["gguf"]) == set(facts)
