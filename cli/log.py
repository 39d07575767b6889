"""Logging of long-running commands: one event per line on standard error, as text on a terminal and JSON elsewhere."""

import logging
import sys
from pathlib import Path
from typing import TextIO

import structlog


def to_file(path: Path) -> None:
    """Log to a new file, for a command that uses the terminal itself. Raises OSError."""
    configure(stream=path.open("w", encoding="utf-8"))


def configure(*, verbose: bool = False, stream: TextIO = sys.stderr) -> None:
    """Render events of Pomona and of libraries alike; call it once, before the first event."""
    shared: list[structlog.types.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    renderer: structlog.types.Processor
    if stream.isatty():
        # If rich is installed, the default prints the variables of each frame, including tokens and prompts.
        renderer = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
    else:
        shared.append(structlog.processors.format_exc_info)
        renderer = structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
            foreign_pre_chain=shared,
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.DEBUG if verbose else logging.INFO)
    # These libraries log each request at INFO; an operator needs their warnings only.
    for library in ("aiohttp", "asyncio", "kopf", "urllib3"):
        logging.getLogger(library).setLevel(logging.WARNING)
