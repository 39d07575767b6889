"""`python -m devices.metal`: memory that Metal lets models use, read from Metal in a process that then ends.

It is a separate process because a framework loaded into the agent would make fork and spawn unsafe. Metal is called
through the Objective-C runtime by ctypes, so that no binding has to be installed.
"""

import ctypes
import sys
from typing import Any, Final

import msgspec

from devices.tools import output_or_empty

_METAL: Final = "/System/Library/Frameworks/Metal.framework/Metal"
_CORE_GRAPHICS: Final = "/System/Library/Frameworks/CoreGraphics.framework/CoreGraphics"
"""Unless CoreGraphics is loaded, Metal returns no default device to a program that is not an app."""
_OBJC: Final = "/usr/lib/libobjc.A.dylib"


class Metal(msgspec.Struct, frozen=True, rename="camel"):
    """Facts of Metal's default device; a fact that could not be read is None."""

    name: str | None = None
    working_set_bytes: int | None = None
    """recommendedMaxWorkingSetSize: work above this size slows down or fails. It follows iogpu.wired_limit_mb."""


def read() -> Metal:
    """Read the facts of Metal's default device in a new process. Blocks for some 100 ms."""
    # -P: do not import modules from the working directory.
    return parse(output_or_empty(sys.executable, "-P", "-m", "devices.metal"))


def parse(text: str) -> Metal:
    """Parse the JSON that this module prints as a program; all facts are None if it printed something else."""
    try:
        return msgspec.json.decode(text, type=Metal)
    except (msgspec.DecodeError, UnicodeError):
        return Metal()  # all facts are None


class MetalDevice:
    """Metal's default device, in this process. Raises OSError when Metal is not installed, or has no device."""

    def __init__(self) -> None:
        """Load the libraries, and get the device from Metal."""
        ctypes.CDLL(_CORE_GRAPHICS)  # only has to be loaded: without it Metal returns no device
        metal, self._objc = ctypes.CDLL(_METAL), ctypes.CDLL(_OBJC)
        metal.MTLCreateSystemDefaultDevice.restype = ctypes.c_void_p
        self._objc.sel_registerName.restype = ctypes.c_void_p
        self._device = metal.MTLCreateSystemDefaultDevice()
        if not self._device:
            raise OSError("Metal has no device")

    def describe(self) -> Metal:
        """Return the facts."""
        name = self._send(self._send(self._device, "name", ctypes.c_void_p), "UTF8String", ctypes.c_char_p)
        working_set_bytes = self._send(self._device, "recommendedMaxWorkingSetSize", ctypes.c_uint64)
        return Metal(name=name.decode(errors="replace") if name else None, working_set_bytes=working_set_bytes)

    def hold(self, size_bytes: int) -> None:
        """Take memory of the GPU: allocate a buffer of this size, and keep it until this process ends.

        Each byte is written, since a page that was never written takes no memory. Raises OSError.
        """
        options = ctypes.c_ulong(0)  # MTLResourceStorageModeShared
        size = ctypes.c_ulong(size_bytes)
        buffer = self._send(self._device, "newBufferWithLength:options:", ctypes.c_void_p, size, options)
        contents = self._send(buffer, "contents", ctypes.c_void_p) if buffer else None
        if not contents:
            raise OSError(f"Metal has no buffer of {size_bytes} bytes")
        ctypes.memset(contents, 1, size_bytes)

    def _send(self, receiver: int, message: str, kind: Any, *arguments: Any) -> Any:
        """Call a method of an Objective-C object, whose result is of the ctypes type `kind`."""
        # objc_msgSend must be called with the exact types of the method.
        types = (ctypes.c_void_p, ctypes.c_void_p, *map(type, arguments))
        call = ctypes.CFUNCTYPE(kind, *types)(("objc_msgSend", self._objc))
        return call(receiver, self._objc.sel_registerName(message.encode()), *arguments)


if __name__ == "__main__":
    try:
        sys.stdout.write(msgspec.json.encode(MetalDevice().describe()).decode() + "\n")
    except OSError as error:
        sys.exit(f"Metal cannot be read: {error}")
