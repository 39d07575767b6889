"""The entry point of Ollama's image in tests: the real program, with a library in the same container.

Its argument after the program is `serve`, as in Ollama's own image. The library has the model `tiny:1b`.
"""

import asyncio
import os
import signal
import sys
from pathlib import Path

from examples.tiny import build_model
from tests.support import certificates
from tests.support.ollama.library import serve_library


async def run(*argv: str) -> int:
    """Run the program with the library until it ends, and return its exit code."""
    async with serve_library(Path(os.environ["HOME"]) / "library") as library:
        library.add("tiny:1b", build_model())
        environment = {"HTTPS_PROXY": library.proxy, "SSL_CERT_FILE": certificates.LIBRARY.certificate}
        program = await asyncio.create_subprocess_exec(*argv, env={**os.environ, **environment})
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, program.terminate)
        return await program.wait()


if __name__ == "__main__":
    sys.exit(asyncio.run(run(*sys.argv[1:])))
