"""llama-cpp-python's server with its key from a file, and without answers to web pages.

The server takes its key as an argument or a variable, which other programs of the user can read, and allows every web
page to read its answers. This module runs the server's own code: the key is added to the arguments inside of the
process, where no other sees it, and what allows the web pages is left out.
"""

import importlib
import runpy
import sys
from collections.abc import Sequence
from typing import Any

from runtimes.mlx_launcher import UnusableServerError, take_key

_FAILURE = 1


class _NoWebPages:
    """In place of the CORS middleware: passes every request on, and adds no header that allows anything."""

    def __init__(self, application: Any, **_: object) -> None:
        self._application = application

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._application(scope, receive, send)


def main(argv: Sequence[str]) -> int:
    """Serve until the process is ended; return 1 if it cannot be served safely."""
    try:
        # The key in the file of --api-key-file, and the arguments without that option.
        key, arguments = take_key(argv)
        _forbid_web_pages()
    except UnusableServerError as error:
        sys.stderr.write(f"error: {error}\n")
        return _FAILURE
    # Run the server's own program, which reads its arguments from sys.argv.
    sys.argv = ["llama_cpp.server", *arguments, "--api_key", key]
    runpy.run_module("llama_cpp.server", run_name="__main__", alter_sys=True)
    return 0


def _forbid_web_pages() -> None:
    """Replace the CORS middleware of the server by one that allows nothing. Raises UnusableServerError."""
    try:
        application: Any = importlib.import_module("llama_cpp.server.app")
    except ImportError as error:
        raise UnusableServerError(f"{sys.executable} cannot import llama_cpp.server: {error}") from error
    if not hasattr(application, "CORSMiddleware"):
        raise UnusableServerError("this version of llama-cpp-python has another server: install 0.3.36")
    application.CORSMiddleware = _NoWebPages


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
