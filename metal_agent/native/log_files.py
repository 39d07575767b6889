"""Rotate the logs of engines, proxy and agent while they are written.

An engine keeps its log file open and outlives the agent, so neither a pipe nor a new file name is possible: the end of
the log is copied and the file truncated in place, which programs that append do not notice. Lines written between the
two are lost, and a log grows while no agent runs.
"""

import fcntl
import os
import stat
from collections.abc import Collection
from pathlib import Path
from typing import Final

import structlog

PROXY_LOG: Final = "proxy.log"
"""The name of the proxy's log, beside those of engines."""
AGENT_LOG: Final = "agent.log"
"""The name of the log of an agent that a service manager runs."""
START_LOG: Final = "agent-start.log"
"""The name of the file with the output of such an agent before it logs, and of the reason of a crash."""
DAEMON_LOGS: Final = {"ollama": "ollama.log", "omlx": "omlx.log"}
"""The names of the logs of daemons that `pomona up` has started, by runtime."""
LOOK_SECONDS: Final = 10.0
"""Interval between two checks of the sizes; a log may exceed its limit by the lines written meanwhile."""
MAX_BYTES: Final = 16 << 20
KEPT_BYTES: Final = 4 << 20
"""The end of a log that is kept when it is truncated."""
KEPT_LOGS: Final = 32
"""The number of logs that are kept of engines that are gone."""

log = structlog.get_logger()


def engine_log_name(namespace: str, name: str) -> str:
    """Return the name of the log of the engine of a MetalProcess."""
    return f"{namespace}_{name}.log"


def read_engine_log_name(path: Path) -> str | None:
    """Return the name of the MetalProcess whose engine has written a log; None for another file or an earlier part."""
    if path.suffix != ".log" or path.stem.endswith(".previous"):
        return None
    # The name of a log is NAMESPACE_NAME.log, and a namespace has no underscore.
    return path.stem.partition("_")[2] or None


def previous_log_path(path: Path) -> Path:
    """Return the path of the earlier part of a log, from before it was truncated or its engine was started again."""
    return path.with_suffix(".previous.log")


def trim_logs(folder: Path, open_logs: Collection[Path]) -> None:
    """Truncate logs that are too large, and delete the oldest logs of engines that are gone. Blocks.

    Args:
        folder: the folder of the logs.
        open_logs: paths of logs that a live process has open.
    """
    for path in open_logs:
        try:
            if path.stat().st_size > MAX_BYTES:
                _truncate(path)
        except FileNotFoundError:
            continue  # nothing to truncate
        except OSError as error:
            log.warning("log_not_truncated", path=str(path), error=str(error))

    kept = {*open_logs, *map(previous_log_path, open_logs)}  # in use, or the earlier part of one in use
    try:
        deletable = [path for path in folder.glob("*.log") if path not in kept]
        # The newest logs are kept.
        for path in sorted(deletable, key=lambda path: path.stat().st_mtime, reverse=True)[KEPT_LOGS:]:
            path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("old_logs_not_deleted", folder=str(folder), error=str(error))


def trim_own_log(descriptor: int) -> None:
    """Truncate the agent's own log, if `descriptor` is a file opened for appending, as launchd does."""
    status = os.fstat(descriptor)
    appends = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_APPEND
    if stat.S_ISREG(status.st_mode) and appends and status.st_size > MAX_BYTES:
        os.ftruncate(descriptor, 0)
        log.info("own_log_truncated", bytes=status.st_size)


def _truncate(path: Path) -> None:
    """Truncate a log, and write the end of what it had to the file of its earlier part."""
    with path.open("r+b") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - KEPT_BYTES))
        end = file.read()
        # The log is truncated before the copy is written, so that this works on a full disk.
        file.truncate(0)
    previous_log_path(path).write_bytes(end)
    log.info("log_truncated", path=str(path), kept_bytes=len(end))
