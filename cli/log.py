"""Logging of long-running commands: one event per line on standard error, as text on a terminal and JSON elsewhere."""

import contextlib
import logging
import sys
from pathlib import Path
from typing import TextIO

import structlog


def to_file(path: Path, *, append: bool = False) -> None:
    """Log to a file, new unless `append`, for a command whose output is for something else. Raises OSError."""
    configure(stream=path.open("a" if append else "w", encoding="utf-8"))


def configure(*, verbose: bool = False, errors_only: bool = False, stream: TextIO = sys.stderr) -> None:
    """Render events of Pomona and of libraries alike; call it once, before the first event."""
    level = logging.DEBUG if verbose else logging.INFO
    if errors_only:
        level = logging.ERROR

    # A terminal gets text, anything else a line of JSON for each event.
    # shared: the steps that events of Pomona and of libraries go through before they are rendered
    shared: list[structlog.types.Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    renderer: structlog.types.Processor
    if stream.isatty():
        # If rich is installed, the default prints the variables of each frame, including tokens and prompts.
        renderer = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
    else:
        shared.append(structlog.processors.format_exc_info)
        renderer = structlog.processors.JSONRenderer(separators=(",", ":"), ensure_ascii=False)

    # 1. Events of Pomona: not by way of the standard library, which takes several times as long for each line.
    structlog.configure(
        processors=[*shared, renderer],
        logger_factory=lambda *_: _LossyLogger(stream),
        wrapper_class=structlog.make_filtering_bound_logger(level),
        cache_logger_on_first_use=True,
    )

    # 2. Events of libraries, which use the standard library.
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer], foreign_pre_chain=shared
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)

    # These libraries log each request or event at INFO; an operator needs their warnings only.
    for library in ("aiohttp", "asyncio", "httpx", "kopf", "urllib3", "watchfiles"):
        logging.getLogger(library).setLevel(max(level, logging.WARNING))


class _LossyLogger(structlog.WriteLogger):
    """A logger that loses the lines that cannot be written: a full disk must end no process that serves."""

    def msg(self, message: str) -> None:
        """Write one line."""
        with contextlib.suppress(OSError):
            super().msg(message)

    log = debug = info = warn = warning = fatal = failure = err = error = critical = exception = msg
