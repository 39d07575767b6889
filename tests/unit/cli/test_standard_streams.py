"""A command ends without a traceback when its output is read by nobody, or a standard stream is full or closed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FULL = Path("/dev/full")
"""A device on which no byte fits."""
COMMANDS = (["catalog"], ["--help"], ["deploy", "--help"], ["deploy", "qwen3-8b", "--dry-run"])


def start(words: list[str], output: int | None = None, redirections: str = "") -> tuple[int, str]:
    """Run a command as users have it, with buffered output, and return its exit code and its errors."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    command = ["sh", "-c", f'exec "$@" {redirections}', "sh", sys.executable, "-m", "cli.main", *words]
    done = subprocess.run(
        command, check=False, stdout=output, stderr=subprocess.PIPE, text=True, timeout=60, env=environment
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_reader_that_is_gone_ends_a_command_silently(words: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        assert start(words, writing) == (1, "")
    finally:
        os.close(writing)


def test_log_that_nobody_reads_to_its_end_is_not_blamed(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "agent.log").write_text("line\n" * 100_000)
    reading, writing = os.pipe()
    os.close(reading)
    try:
        assert start(["agent", "logs", f"--state-dir={tmp_path}", "--lines=100000"], writing) == (1, "")
    finally:
        os.close(writing)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_full_disk_is_named(words: list[str]) -> None:
    with FULL.open("w") as full:
        assert start(words, full.fileno()) == (1, "Error: standard output: No space left on device\n")


def test_closed_output_is_no_failure() -> None:
    assert start(["catalog"], redirections=">&-") == (0, "")


def test_message_goes_nowhere_if_standard_error_is_closed() -> None:
    reading, writing = os.pipe()
    assert start(["deploy"], writing, "2>&-")[0] == 2
    os.close(writing)
    assert os.read(reading, 100) == b""
    os.close(reading)
