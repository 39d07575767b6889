"""Log rotation keeps files small while programs have them open and continue to write."""

import os
import sys
from pathlib import Path

import pytest

from metal_agent.native import log_files
from metal_agent.native.process import spawn_process
from tests.support.eventually import eventually

# Writes numbered lines as fast as possible.
CHATTY = [sys.executable, "-Sc", "import os\nn = 0\nwhile True: n += 1; os.write(1, b'%09d\\n' % n)"]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_files, "MAX_BYTES", 100_000)
    monkeypatch.setattr(log_files, "KEPT_BYTES", 10_000)


async def test_log_is_truncated_while_written_and_loses_only_lines_in_between(tmp_path: Path) -> None:
    path = tmp_path / "engine.log"
    chatty = spawn_process(CHATTY, {}, path, tmp_path)
    for _ in range(3):
        await eventually(lambda: path.stat().st_size > log_files.MAX_BYTES)
        log_files.trim_logs(tmp_path, [path])
    await eventually(lambda: path.stat().st_size > log_files.KEPT_BYTES)
    await chatty.end(grace_seconds=0.5)
    kept = log_files.previous_log_path(path).read_bytes()
    assert log_files.KEPT_BYTES <= len(kept) < log_files.MAX_BYTES
    assert path.stat().st_blocks * 512 <= path.stat().st_size + 8192, "no hole: it goes on at the new end"
    before, after = [int(line) for line in kept.split()[1:-1]], [int(line) for line in path.read_bytes().split()[1:-1]]
    assert before == list(range(before[0], before[-1] + 1))
    assert after == list(range(after[0], after[-1] + 1))
    assert after[0] > before[-1]


def test_oldest_logs_of_engines_that_are_gone_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_files, "KEPT_LOGS", 2)
    for age, name in enumerate(["new.log", "new.previous.log", "old.log", "live.previous.log", "live.log"]):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (1_000_000 - age, 1_000_000 - age))
    log_files.trim_logs(tmp_path, [tmp_path / "live.log", tmp_path / "not-there.log"])
    assert {path.name for path in tmp_path.iterdir()} == {
        *("new.log", "new.previous.log"),
        *("live.log", "live.previous.log"),
    }


def test_log_that_cannot_be_truncated_is_no_error(tmp_path: Path) -> None:
    log_files.trim_logs(tmp_path / "nothing", [tmp_path / "nothing" / "engine.log"])
    (tmp_path / "engine.log").write_bytes(b"x" * 200_000)
    (tmp_path / "engine.previous.log").mkdir()
    log_files.trim_logs(tmp_path, [tmp_path / "engine.log"])
    assert (tmp_path / "engine.log").stat().st_size == 0, "the disk matters more than the lines"


def test_own_log_is_truncated_only_if_it_is_a_file_opened_for_appending(tmp_path: Path) -> None:
    path = tmp_path / "agent.log"
    for flags, size in ((os.O_APPEND, 0), (0, 200_000)):
        path.write_bytes(b"x" * 200_000)
        descriptor = os.open(path, os.O_WRONLY | flags)
        log_files.trim_own_log(descriptor)
        os.close(descriptor)
        assert path.stat().st_size == size
    reading, writing = os.pipe()
    log_files.trim_own_log(writing)
    os.close(reading)
    os.close(writing)


def test_name_of_an_engine_log_leads_back_to_its_process(tmp_path: Path) -> None:
    path = tmp_path / log_files.engine_log_name("team-a", "chat-1a2b-0")
    assert log_files.read_engine_log_name(path) == "chat-1a2b-0"
    for other in (log_files.previous_log_path(path), tmp_path / log_files.AGENT_LOG, tmp_path / "team-a_chat.txt"):
        assert log_files.read_engine_log_name(other) is None
