"""macOS facts from the system's own library, read through ctypes: faster or more exact than any tool.

The level of memory pressure is read each second, and no cheap tool prints a process's physical footprint.
Layouts are those of Apple's <sys/resource.h> (rusage_info_v4) and <libproc.h>. On another system, or if the
library fails, the result is None, or an empty list of children.
"""

import ctypes
import struct
from functools import cache
from typing import Final

_PATH: Final = "/usr/lib/libSystem.B.dylib"
_INT_BYTES: Final = 4
_RUSAGE_INFO_V4: Final = 4
_RUSAGE_BYTES: Final = 16 + 35 * 8  # a UUID, then 35 numbers
_FOOTPRINT_OFFSET: Final = 16 + 7 * 8  # ri_phys_footprint
_PPID_ONLY: Final = 6  # PROC_PPID_ONLY
_MOST_CHILDREN: Final = 256


def sysctl_int(name: str) -> int | None:
    """Read the 32-bit sysctl `name`."""
    library = _library()
    if library is None:
        return None
    buffer = ctypes.create_string_buffer(_INT_BYTES)
    size = ctypes.c_size_t(_INT_BYTES)
    failed = library.sysctlbyname(name.encode(), buffer, ctypes.byref(size), None, ctypes.c_size_t(0))
    return None if failed or size.value != _INT_BYTES else int(struct.unpack("=i", buffer.raw)[0])


def footprint_bytes(pid: int) -> int | None:
    """Read the physical footprint of `pid`, GPU memory included; only of our own processes, or as root."""
    library = _library()
    if library is None:
        return None
    buffer = ctypes.create_string_buffer(_RUSAGE_BYTES)
    failed = library.proc_pid_rusage(ctypes.c_int(pid), ctypes.c_int(_RUSAGE_INFO_V4), buffer)
    return None if failed else parse_footprint(buffer.raw)


def parse_footprint(rusage: bytes) -> int | None:
    """Read ri_phys_footprint of a rusage_info_v4; None for 0, which only a zombie has."""
    if len(rusage) < _RUSAGE_BYTES:
        return None
    return int(struct.unpack_from("=Q", rusage, _FOOTPRINT_OFFSET)[0]) or None


def children(pid: int) -> list[int]:
    """Return the processes that `pid` started and that still run."""
    library = _library()
    if library is None:
        return []
    buffer = (ctypes.c_int * _MOST_CHILDREN)()
    written = library.proc_listpids(
        ctypes.c_uint32(_PPID_ONLY), ctypes.c_uint32(pid), buffer, ctypes.c_int(ctypes.sizeof(buffer))
    )
    return [child for child in buffer[: max(0, written) // ctypes.sizeof(ctypes.c_int)] if child > 0]


@cache
def _library() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(_PATH)
    except OSError:
        return None
