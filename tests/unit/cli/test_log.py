"""Logs of a command show the error of a crash, and no variables, which may be tokens or prompts."""

import errno
import io
import logging
from collections.abc import Iterator

import pytest
import structlog

from cli import log


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    config, root = structlog.get_config(), logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    structlog.configure(**config)
    root.handlers[:] = handlers
    root.setLevel(level)


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
