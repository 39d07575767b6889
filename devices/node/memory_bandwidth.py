"""A measurement of the processor's memory bandwidth, which no kernel states and which bounds decoding on processors."""

import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from ctypes import addressof, c_char, memmove, memset
from typing import Final

_BUFFER_BYTES: Final = 4 << 20
_MOST_THREADS: Final = 4
_MEASURE_SECONDS: Final = 0.08


def measure_memory_bandwidth() -> int | None:
    """Return the memory bandwidth in bytes per second, read and written bytes counted alike. Blocks for some 100 ms.

    A few threads copy buffers. All buffers together take 32 MiB, which is what the agent's memory allows: where the
    processor's cache is larger, the figure is too high, and estimates by it are corrected by measured speeds.
    """
    count = min(_MOST_THREADS, os.cpu_count() or 1)
    started = time.perf_counter()
    try:
        with ThreadPoolExecutor(count) as threads:
            copied_bytes = sum(threads.map(_copy_until, [started + _MEASURE_SECONDS] * count))
    except (RuntimeError, OSError):  # the container may have no more threads, or no memory for the buffers
        return None
    # Each byte that is copied is read once and written once.
    return round(2 * copied_bytes / (time.perf_counter() - started)) or None


def _copy_until(deadline: float) -> int:
    """Copy a buffer again and again until the deadline, in this thread; return the number of bytes that were copied."""
    copied_bytes = 0
    # Unlike those of the heap, mappings are returned to the kernel.
    with mmap.mmap(-1, _BUFFER_BYTES) as source, mmap.mmap(-1, _BUFFER_BYTES) as target:
        source_address, target_address = addressof(c_char.from_buffer(source)), addressof(c_char.from_buffer(target))
        memset(source_address, 1, _BUFFER_BYTES)  # a page that was never written has no memory of its own
        while time.perf_counter() < deadline:
            # A call by ctypes lets the other threads of the interpreter run.
            memmove(target_address, source_address, _BUFFER_BYTES)
            copied_bytes += _BUFFER_BYTES
    return copied_bytes
