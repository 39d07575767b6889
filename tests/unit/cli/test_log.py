"""Logs of a command show the error of a crash, and no variables, which may be tokens or prompts."""

import errno
import io
import logging

import pytest
import structlog
from structlog.testing import capture_logs

from cli import log

LOGGER = structlog.get_logger()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()])
def test_logged_crash_shows_no_variables(stream: io.StringIO) -> None:
    log.configure(stream=stream)

    def crash(token: str) -> None:
        raise ValueError(f"a token of {len(token)} characters")

    try:
        crash("sk-" + "secret")
    except ValueError:
        structlog.get_logger().exception("crashed")
    assert "a token of 9 characters" in stream.getvalue()
    assert "sk-secret" not in stream.getvalue()


class FullDisk(io.StringIO):
    def write(self, _text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_full_disk_loses_lines_and_ends_nothing() -> None:
    log.configure(stream=FullDisk())
    logger = structlog.get_logger()
    for write in (logger.info, logger.warning, logger.error):
        write("lost")
    logging.getLogger("library").warning("lost too")


def test_command_with_findings_of_its_own_logs_errors_only() -> None:
    stream = io.StringIO()
    log.configure(errors_only=True, stream=stream)
    for logger in (structlog.get_logger(), logging.getLogger("library"), logging.getLogger("aiohttp")):
        logger.warning("hidden")
        logger.error("shown")
    assert (stream.getvalue().count("shown"), stream.getvalue().count("hidden")) == (3, 0)


@pytest.mark.parametrize("turn", ["first", "second"])
def test_settings_of_one_test_hide_no_line_of_the_next(turn: str) -> None:
    with capture_logs() as said:
        LOGGER.warning(turn)
    assert [entry["event"] for entry in said] == [turn]
    log.configure(errors_only=True, stream=io.StringIO())
    LOGGER.error("kept for good, if loggers are cached")
