"""Hears of the end of a process from the kernel, without polling: pidfd on Linux, kqueue on macOS.

Both work for processes that are no children of ours, so an engine that an earlier agent started is watched alike.
"""

import os
import select
import sys


def watch(pid: int) -> int:
    """Return a descriptor that becomes readable when `pid` has ended, for the caller to close.

    Raises:
        OSError: it cannot be watched; ProcessLookupError where there is no such process.
    """
    if sys.platform == "darwin":
        queue = select.kqueue()
        end = select.kevent(pid, select.KQ_FILTER_PROC, select.KQ_EV_ADD | select.KQ_EV_ONESHOT, select.KQ_NOTE_EXIT)
        try:
            queue.control([end], 0)
        except OSError:
            queue.close()
            raise
        # The object would close the queue when it is collected: the caller owns the duplicate.
        descriptor = os.dup(queue.fileno())
        queue.close()
        return descriptor
    return os.pidfd_open(pid)
