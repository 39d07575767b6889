"""`python -m devices.metal`: memory that Metal lets models use, read from Metal in a process that then ends.

It is a separate process because a framework loaded into the agent would make fork and spawn unsafe. Metal is called
through the Objective-C runtime by ctypes, so that no binding has to be installed.
"""

import ctypes
import json
import sys
from typing import Any, Final, NamedTuple

from devices.tools import output_or_empty

_METAL: Final = "/System/Library/Frameworks/Metal.framework/Metal"
_CORE_GRAPHICS: Final = "/System/Library/Frameworks/CoreGraphics.framework/CoreGraphics"
"""Unless CoreGraphics is loaded, Metal returns no default device to a program that is not an app."""
_OBJC: Final = "/usr/lib/libobjc.A.dylib"


class Metal(NamedTuple):
    """Facts of Metal's default device; a fact that could not be read is None."""

    name: str | None = None
    working_set_bytes: int | None = None
    """recommendedMaxWorkingSetSize: work above this size slows down or fails. It follows iogpu.wired_limit_mb."""
    buffer_bytes: int | None = None
    """maxBufferLength: the largest single buffer."""


def read() -> Metal:
    """Read the facts of Metal's default device in a new process. Blocks for some 100 ms."""
    # -P: do not import modules from the working directory.
    return parse(output_or_empty(sys.executable, "-P", "-m", "devices.metal"))


def parse(text: str) -> Metal:
    """Parse the output of this module."""
    try:
        printed = json.loads(text)
    except ValueError:
        return Metal()
    if not isinstance(printed, dict):
        return Metal()
    name = printed.get("name")
    return Metal(
        name if isinstance(name, str) and name else None,
        _positive(printed.get("workingSetBytes")),
        _positive(printed.get("bufferBytes")),
    )


def _positive(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


class MetalDevice:
    """Metal's default device, in this process. Raises OSError when Metal is not installed, or has no device."""

    def __init__(self) -> None:
        ctypes.CDLL(_CORE_GRAPHICS)
        metal, self._objc = ctypes.CDLL(_METAL), ctypes.CDLL(_OBJC)
        metal.MTLCreateSystemDefaultDevice.restype = ctypes.c_void_p
        self._objc.sel_registerName.restype = ctypes.c_void_p
        self._device = metal.MTLCreateSystemDefaultDevice()
        if not self._device:
            raise OSError("Metal has no device")

    def describe(self) -> dict[str, Any]:
        """Return the facts, in the form that `parse` reads."""
        name = self._send(self._send(self._device, "name", ctypes.c_void_p), "UTF8String", ctypes.c_char_p)
        return {
            "name": name.decode(errors="replace") if name else None,
            "workingSetBytes": self._send(self._device, "recommendedMaxWorkingSetSize", ctypes.c_uint64),
            "bufferBytes": self._send(self._device, "maxBufferLength", ctypes.c_uint64),
        }

    def hold(self, size_bytes: int) -> None:
        """Fill a buffer that the GPU shares, and keep it until this process ends. Raises OSError."""
        options = ctypes.c_ulong(0)  # MTLResourceStorageModeShared
        size = ctypes.c_ulong(size_bytes)
        buffer = self._send(self._device, "newBufferWithLength:options:", ctypes.c_void_p, size, options)
        contents = buffer and self._send(buffer, "contents", ctypes.c_void_p)
        if not contents:
            raise OSError(f"Metal has no buffer of {size_bytes} bytes")
        ctypes.memset(contents, 1, size_bytes)

    def _send(self, receiver: int, message: str, kind: Any, *arguments: Any) -> Any:
        # objc_msgSend must be called with the exact types of the method.
        types = (ctypes.c_void_p, ctypes.c_void_p, *map(type, arguments))
        call = ctypes.CFUNCTYPE(kind, *types)(("objc_msgSend", self._objc))
        return call(receiver, self._objc.sel_registerName(message.encode()), *arguments)


if __name__ == "__main__":
    try:
        sys.stdout.write(json.dumps(MetalDevice().describe()) + "\n")
    except OSError as error:
        sys.exit(f"Metal cannot be read: {error}")
