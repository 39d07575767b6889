"""macOS facts from the system's own library, read through ctypes: faster or more exact than any tool.

The level of memory pressure is read each second, and no cheap tool prints a process's physical footprint.
Layouts are those of Apple's <sys/resource.h> (rusage_info_v4), <libproc.h> and <mach/vm_statistics.h>. What the library
cannot tell is None.
"""

import ctypes
import os
import struct
import uuid
from functools import cache
from typing import Final, NamedTuple

_PATH: Final = "/usr/lib/libSystem.B.dylib"
_INT_BYTES: Final = 4
_UUID_BYTES: Final = 16
_RUSAGE_INFO_V4: Final = 4
_RUSAGE_BYTES: Final = 16 + 35 * 8  # a UUID, then 35 numbers
_FOOTPRINT_OFFSET: Final = 16 + 7 * 8  # ri_phys_footprint
_START_OFFSET: Final = 16 + 8 * 8  # ri_proc_start_abstime, and after it ri_proc_exit_abstime
_PPID_ONLY: Final = 6  # PROC_PPID_ONLY
_MOST_CHILDREN: Final = 256
_MOST_TEXT_BYTES: Final = 256
_VM_STATISTICS: Final = struct.Struct("=4I9Q2I4Q4IQ")
"""vm_statistics64: free, active, inactive and wired pages; nine counters; purgeable and speculative pages; four
counters; pages of the compressor, throttled, file-backed and anonymous pages; pages inside the compressor."""
_HOST_VM_INFO64: Final = 4


class MemoryUse(NamedTuple):
    """Memory that the system cannot hand out without taking it from a program, by kind, in bytes."""

    wired_bytes: int
    """Memory that must not be paged out: the kernel's, and that of buffers on which the GPU works."""
    compressor_bytes: int
    """Memory that holds compressed pages."""
    anonymous_bytes: int
    """Memory of programs that is not a copy of a file."""
    purgeable_bytes: int
    """The part of the anonymous memory that its program lets the system discard."""

    @property
    def total_bytes(self) -> int:
        """The sum, as Activity Monitor shows it for Memory Used; cached files are not in it."""
        return self.wired_bytes + self.compressor_bytes + max(0, self.anonymous_bytes - self.purgeable_bytes)


def sysctl_int(name: str) -> int | None:
    """Read the 32-bit sysctl `name`; None if it is missing, or of another size."""
    value = _sysctl(name, _INT_BYTES)
    return None if value is None or len(value) != _INT_BYTES else int(struct.unpack("=i", value)[0])


def sysctl_text(name: str) -> str | None:
    """Read the text of sysctl `name`, up to its first NUL; None if it is missing, too long or empty."""
    value = _sysctl(name, _MOST_TEXT_BYTES)
    return None if value is None else value.partition(b"\0")[0].decode(errors="replace") or None


def _sysctl(name: str, most_bytes: int) -> bytes | None:
    """Read the value of sysctl `name`; None if it is missing, or longer than `most_bytes`."""
    library = _library()
    buffer = ctypes.create_string_buffer(most_bytes)
    size = ctypes.c_size_t(most_bytes)
    failed = library.sysctlbyname(name.encode(), buffer, ctypes.byref(size), None, ctypes.c_size_t(0))
    return None if failed else buffer.raw[: size.value]


def performance_cores() -> int | None:
    """Read the number of performance cores; None if the fastest cores have another name."""
    is_known = sysctl_text("hw.perflevel0.name") == "Performance"
    return sysctl_int("hw.perflevel0.physicalcpu") if is_known else None


def host_uuid() -> str | None:
    """Read the UUID of the hardware (gethostuuid), which no copy of its disk has."""
    library = _library()
    buffer = ctypes.create_string_buffer(_UUID_BYTES)
    no_wait = (ctypes.c_long * 2)(0, 0)  # a timespec: the UUID is there once the system is up
    return None if library.gethostuuid(buffer, no_wait) else str(uuid.UUID(bytes=buffer.raw))


def footprint_bytes(pid: int) -> int | None:
    """Read the physical footprint of `pid`, GPU memory included; only of our own processes, or as root."""
    try:
        return parse_footprint(_rusage(pid))
    except OSError:
        return None


def start_abstime(pid: int) -> int | None:
    """Read the start of `pid` in ticks since the boot; None when it does not run or is a zombie.

    Raises:
        OSError: it cannot be read; PermissionError for a process of another user.
    """
    try:
        return parse_start(_rusage(pid))
    except ProcessLookupError:
        return None


def _rusage(pid: int) -> bytes:
    """Read the rusage_info_v4 of `pid`. Raises OSError; ProcessLookupError if there is no such process."""
    library = _library()
    buffer = ctypes.create_string_buffer(_RUSAGE_BYTES)
    if library.proc_pid_rusage(ctypes.c_int(pid), ctypes.c_int(_RUSAGE_INFO_V4), buffer):
        number = ctypes.get_errno()
        raise OSError(number, f"proc_pid_rusage of process {pid}: {os.strerror(number)}")
    return buffer.raw


def parse_footprint(rusage: bytes) -> int | None:
    """Read ri_phys_footprint of a rusage_info_v4; None for 0, which only a zombie has."""
    return int(struct.unpack_from("=Q", rusage, _FOOTPRINT_OFFSET)[0]) or None


def parse_start(rusage: bytes) -> int | None:
    """Read ri_proc_start_abstime of a rusage_info_v4; None for 0, and for a zombie, which has ri_proc_exit_abstime."""
    started, ended = struct.unpack_from("=QQ", rusage, _START_OFFSET)
    return None if ended or not started else int(started)


def memory_use() -> MemoryUse | None:
    """Read the memory in use on the whole host from the Mach kernel (host_statistics64); None if that fails."""
    library = _library()
    buffer = ctypes.create_string_buffer(_VM_STATISTICS.size)
    # In: the size of the buffer, in 32-bit integers; out: the part of it that the kernel has filled.
    count = ctypes.c_uint32(_VM_STATISTICS.size // _INT_BYTES)
    failed = library.host_statistics64(_host_port(), ctypes.c_int(_HOST_VM_INFO64), buffer, ctypes.byref(count))
    filled_bytes = count.value * _INT_BYTES
    return None if failed else parse_memory_use(buffer.raw[:filled_bytes], os.sysconf("SC_PAGE_SIZE"))


def parse_memory_use(statistics: bytes, page_bytes: int) -> MemoryUse | None:
    """Read a vm_statistics64; None for one that is shorter, or that counts no wired page, which every kernel has."""
    if len(statistics) < _VM_STATISTICS.size:
        return None
    numbers = _VM_STATISTICS.unpack_from(statistics)
    # The places of these four counts of pages in vm_statistics64 (`_VM_STATISTICS` lists all).
    wired, purgeable, compressor, anonymous = numbers[3], numbers[13], numbers[19], numbers[22]
    if not wired:
        return None
    return MemoryUse(wired * page_bytes, compressor * page_bytes, anonymous * page_bytes, purgeable * page_bytes)


def children(pid: int) -> list[int]:
    """Return the processes that `pid` started and that still run."""
    library = _library()
    buffer = (ctypes.c_int * _MOST_CHILDREN)()
    size = ctypes.c_int(ctypes.sizeof(buffer))
    # The kernel writes the process ids into the buffer, and returns the number of bytes.
    written = library.proc_listpids(ctypes.c_uint32(_PPID_ONLY), ctypes.c_uint32(pid), buffer, size)
    return [child for child in buffer[: max(0, written) // ctypes.sizeof(ctypes.c_int)] if child > 0]


@cache
def _host_port() -> int:
    """Return the port of the host; each call of mach_host_self adds a reference to it, which nothing releases."""
    return int(_library().mach_host_self())


@cache
def _library() -> ctypes.CDLL:
    """Return the library of macOS."""
    return ctypes.CDLL(_PATH, use_errno=True)
