"""Processes of this machine that have not ended: a zombie, which its parent has not waited for yet, has ended."""

import psutil


def is_alive(process: psutil.Process) -> bool:
    """Return whether the process has not ended; it may end between any two questions about it."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def find_processes(*arguments: str) -> list[psutil.Process]:
    """Return the live processes that have these arguments, one after the other, in their command line."""
    return [
        process
        for process in psutil.process_iter(["cmdline", "status"])
        if process.info["status"] != psutil.STATUS_ZOMBIE
        and arguments in zip(*((process.info["cmdline"] or [])[skip:] for skip in range(len(arguments))), strict=False)
    ]
