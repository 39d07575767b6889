"""The programs of the servers: built once from the Go module beside this file, and started on loopback.

The module is separate from the control plane's, so that another version of a server does not rebuild Kubernetes. The
programs are in the user's cache folder, under a key made of the whole go.mod.
"""

import contextlib
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

from tests.controlplane.binaries import ensure_module_programs
from tests.controlplane.go_build import report_build
from tests.controlplane.process import Process
from tests.support.eventually import eventually

MODULE = Path(__file__).parent
PACKAGES = {
    "versitygw": "github.com/versity/versitygw/cmd/versitygw",
    "registry": "github.com/distribution/distribution/v3/cmd/registry",
}
_LOG_LINES = 20


def ensure_programs() -> dict[str, Path]:
    """Return the path of each program, by its name; build those that are not in the cache.

    Raises:
        BuildError: a program is absent and cannot be built here.
    """
    return ensure_module_programs(MODULE, PACKAGES, "servers")


@contextlib.asynccontextmanager
async def run_server(
    program: str,
    arguments: Sequence[str],
    log: Path,
    *,
    address: str,
    port: int,
    environment: Mapping[str, str] | None = None,
) -> AsyncIterator[Process]:
    """Start a program of the module, wait until it accepts connections at `address` and `port`, and kill it at the end.

    Raises:
        RuntimeError: the program ended; the message has the end of its log.
        AssertionError: the program does not listen in time.
    """
    process = Process(program, [str(ensure_programs()[program]), *arguments], log, environment)

    def listens() -> bool:
        if not process.running:
            raise RuntimeError(f"{program} ended with {process.exit_code}:\n{process.tail(_LOG_LINES)}")
        with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=1):
            return True
        return False

    process.start()
    try:
        await eventually(listens)
        yield process
    finally:
        await process.kill()


def find_free_port(address: str) -> int:
    """Return a TCP port of `address` that nothing listens on at this moment."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    report_build(ensure_programs)
