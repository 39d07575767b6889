"""`python -m devices.metal`: what Metal lets models use, asked of Metal itself in a process that then ends.

A process of its own, as a framework that is loaded into the agent would make its fork and spawn unsafe. It is asked
through the Objective-C runtime by ctypes, so that no binding has to be installed.
"""

import ctypes
import json
import sys
from typing import Any, Final, NamedTuple

from devices.tools import told

_METAL: Final = "/System/Library/Frameworks/Metal.framework/Metal"
_CORE_GRAPHICS: Final = "/System/Library/Frameworks/CoreGraphics.framework/CoreGraphics"
"""Without it loaded, a program that is no app is given no default device."""
_OBJC: Final = "/usr/lib/libobjc.A.dylib"


class Metal(NamedTuple):
    """What Metal tells of its default device."""

    name: str | None = None
    working_set_bytes: int | None = None
    """recommendedMaxWorkingSetSize: more than this slows down or fails. It follows iogpu.wired_limit_mb."""
    buffer_bytes: int | None = None
    """maxBufferLength: the largest single buffer."""


def read() -> Metal:
    """Ask Metal. Blocks for some 100 ms."""
    # -P: what lies in the working directory is none of ours.
    return parse(told(sys.executable, "-P", "-m", "devices.metal"))


def parse(text: str) -> Metal:
    """Read what this module prints."""
    try:
        said = json.loads(text)
    except ValueError:
        return Metal()
    if not isinstance(said, dict):
        return Metal()
    name = said.get("name")
    return Metal(
        name if isinstance(name, str) and name else None,
        _positive(said.get("workingSetBytes")),
        _positive(said.get("bufferBytes")),
    )


def _positive(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


class Device:
    """Metal's default device, in this process. Raises OSError when Metal is not there, or has no device."""

    def __init__(self) -> None:
        ctypes.CDLL(_CORE_GRAPHICS)
        metal, self._objc = ctypes.CDLL(_METAL), ctypes.CDLL(_OBJC)
        metal.MTLCreateSystemDefaultDevice.restype = ctypes.c_void_p
        self._objc.sel_registerName.restype = ctypes.c_void_p
        self._device = metal.MTLCreateSystemDefaultDevice()
        if not self._device:
            raise OSError("Metal has no device")

    def describe(self) -> dict[str, Any]:
        """Return what `parse` reads."""
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
        # objc_msgSend is called with the very types of the method that it reaches.
        types = (ctypes.c_void_p, ctypes.c_void_p, *map(type, arguments))
        call = ctypes.CFUNCTYPE(kind, *types)(("objc_msgSend", self._objc))
        return call(receiver, self._objc.sel_registerName(message.encode()), *arguments)


if __name__ == "__main__":
    try:
        sys.stdout.write(json.dumps(Device().describe()) + "\n")
    except OSError as error:
        sys.exit(f"Metal does not tell: {error}")
