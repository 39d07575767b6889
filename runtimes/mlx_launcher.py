"""mlx-lm's server with a key, without answers to web pages, and with the model of its command line only.

mlx_lm.server requires no key, allows every web page to read its answers, and loads whatever model, draft or adapter a
request names. This module runs the server's own code with a request handler that refuses all of that. It may run in
the Python of another installation, so it imports nothing of ours.
"""

import hmac
import http.server
import sys
from collections.abc import Callable, Sequence
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

_KEY_OPTION = "--api-key-file"
_DEFAULT = "default_model"
"""The server's name for the model of its command line."""
_FAILURE = 1


class UnusableServerError(Exception):
    """The installed mlx-lm, or its command line, cannot be served safely; the message says why."""


def guard(handler: type[Any], key: str) -> type[Any]:
    """Return the server's request handler, restricted to requests with `key` and to the loaded model."""

    class GuardedHandler(handler):  # type: ignore[misc]  # the type is known only when the server is imported
        def parse_request(self) -> bool:
            """Read the head of a request; refuse it without the key, before anything of it is handled."""
            if not super().parse_request():
                return False
            given = self.headers.get("Authorization", "")
            if hmac.compare_digest(given.encode(), b"Bearer " + key.encode()):
                return True
            # Not send_error: it would name the server's version.
            content = b'{"error": {"message": "a key is required", "type": "authentication_error", "code": 401}}'
            self.close_connection = True
            self.send_response(HTTPStatus.UNAUTHORIZED)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
            return False

        def validate_model_parameters(self) -> None:
            """Check the parameters of a request; refuse one that would load anything."""
            super().validate_model_parameters()
            named = {"model": self.requested_model, "draft_model": self.requested_draft_model}
            for field, value in named.items():
                if value != _DEFAULT:
                    raise ValueError(f"{field} is not served: only the loaded model is, as {_DEFAULT}")
            if self.adapter is not None:
                raise ValueError("adapters cannot be loaded by a request: name them in the InferenceService")

        def _set_cors_headers(self) -> None:
            """Allow no web page anything."""

    return GuardedHandler


def distrust(provider: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return the server's provider of models, so that it never runs Python that a model names."""

    def provide(arguments: Any) -> Any:
        arguments.trust_remote_code = False
        return provider(arguments)

    return provide


def take_key(argv: Sequence[str]) -> tuple[str, list[str]]:
    """Return the key in the file that `--api-key-file` names, and the other arguments. Raises UnusableServerError."""
    arguments = list(argv)
    if _KEY_OPTION not in arguments[:-1]:
        raise UnusableServerError(f"{_KEY_OPTION} is required: without a key every program here could use the server")
    at = arguments.index(_KEY_OPTION)
    path = arguments[at + 1]
    try:
        key = Path(path).read_text().strip()
    except OSError as error:
        raise UnusableServerError(f"cannot read {_KEY_OPTION} {path}: {error.strerror}") from error
    if not key:
        raise UnusableServerError(f"{_KEY_OPTION} {path} is empty")
    return key, arguments[:at] + arguments[at + 2 :]


def main(argv: Sequence[str]) -> int:
    """Serve until the process is ended; return 1 if it cannot be served safely."""
    try:
        key, arguments = take_key(argv)
        server = _import_server()
        handler = guard(server.APIHandler, key)
    except UnusableServerError as error:
        sys.stderr.write(f"error: {error}\n")
        return _FAILURE
    server._run_http_server = partial(server._run_http_server, handler_class=handler)  # noqa: SLF001 - it has no other seam
    server.ModelProvider = distrust(server.ModelProvider)
    sys.argv = ["mlx_lm.server", *arguments]
    server.main()
    return 0


def _import_server() -> Any:
    """Import the server, and check that it has the parts that are replaced. Raises UnusableServerError."""
    try:
        from mlx_lm import server  # noqa: PLC0415 - an error says which Python lacks it
    except ImportError as error:
        raise UnusableServerError(f"{sys.executable} cannot import mlx_lm: {error}") from error
    handler = getattr(server, "APIHandler", None)
    known = isinstance(handler, type) and issubclass(handler, http.server.BaseHTTPRequestHandler)
    parts = [(handler, "validate_model_parameters"), (handler, "_set_cors_headers")]
    parts += [(server, "_run_http_server"), (server, "ModelProvider")]
    if not known or not all(hasattr(owner, part) for owner, part in parts):
        raise UnusableServerError("the server of this mlx-lm cannot be given a key: install 0.32")
    return server


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
