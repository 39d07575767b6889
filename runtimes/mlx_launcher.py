"""mlx-lm's server with a key, without answers to web pages, and with the model of its command line only.

mlx_lm.server requires no key, allows every web page to read its answers, and loads whatever model, draft or adapter a
request names. All requests share one thread, which a mistake in one of them ends: an empty prompt, a token that the
model does not have, a stop that is no text. Bodies that are no JSON get no answer, or are written into the log. This
module runs the server's own code with a request handler that refuses all of that. It may run in the Python of another
installation, so it imports nothing of ours.
"""

import hmac
import http.server
import io
import json
import socketserver
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

_KEY_OPTION = "--api-key-file"
_DEFAULT = "default_model"
"""The server's name for the model of its command line."""
_FAILURE = 1
_SEEDS = 1 << 64
_MOST_CONTEXT = 1 << 20
"""Most tokens over which a penalty looks back; above 63 bits the server's arrays fail."""
_MOST_XTC_THRESHOLD = 0.5


class UnusableServerError(Exception):
    """The installed mlx-lm, or its command line, cannot be served safely; the message says why."""


def guard_handler(handler: type[Any], key: str) -> type[Any]:
    """Return a subclass of the server's request handler that serves only requests with `key` for the loaded model."""

    class GuardedHandler(handler):  # type: ignore[misc]  # the type is known only when the server is imported
        rfile: Any

        def parse_request(self) -> bool:
            """Read the head of a request; refuse it without the key, before anything of it is handled."""
            if not super().parse_request():
                return False
            given = self.headers.get("Authorization", "")
            if hmac.compare_digest(given.encode(), b"Bearer " + key.encode()):
                return True
            self._refuse(HTTPStatus.UNAUTHORIZED, "a key is required", "authentication_error")
            return False

        def do_POST(self) -> None:  # noqa: N802 - the name that the HTTP server calls
            """Handle a request whose body is a JSON object; refuse any other."""
            connection, length = self.rfile, self.headers.get("Content-Length", "")
            content = connection.read(int(length)) if length.isdecimal() else b""
            if mistake := find_mistake(content):
                self._refuse(HTTPStatus.BAD_REQUEST, mistake, "invalid_request_error")
                return
            # The server reads the body from `rfile`: give it the bytes that were checked, then restore the connection.
            self.rfile = io.BytesIO(content)
            try:
                super().do_POST()
            finally:
                self.rfile = connection

        def _refuse(self, status: HTTPStatus, message: str, kind: str) -> None:
            """Answer with an error, and close the connection."""
            # Not send_error: it would name the server's version.
            content = json.dumps({"error": {"message": message, "type": kind, "code": status.value}}).encode()
            self.close_connection = True
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def validate_model_parameters(self) -> None:
            """Check the parameters of a request; refuse one that would load anything, or end the server's thread."""
            try:
                super().validate_model_parameters()
            except (TypeError, OverflowError) as error:
                raise ValueError(f"a parameter has a wrong type or size: {error}") from error
            # These raise ValueError, as the server's own checks do.
            check_model(self)
            check_texts(self)
            check_numbers(self)

        def _set_cors_headers(self) -> None:
            """Allow no web page anything."""

    return GuardedHandler


def check_model(request: Any) -> None:
    """Check that a request is for what is loaded. Raises ValueError."""
    # _DEFAULT is the server's name for the model of its command line.
    named = {"model": request.requested_model, "draft_model": request.requested_draft_model}
    for field, value in named.items():
        if value != _DEFAULT:
            raise ValueError(f"{field} is not served: only the loaded model is, as {_DEFAULT}")
    if request.adapter is not None:
        raise ValueError("adapters cannot be loaded by a request: name them in the InferenceService")


def check_texts(request: Any) -> None:
    """Check the parameters of a request that are texts. Raises ValueError."""
    stop = request.body.get("stop")
    words = stop if isinstance(stop, list) else [stop or ""]
    if not all(isinstance(word, str) for word in words):
        raise ValueError("stop must be a text or a list of texts")
    variables = request.chat_template_kwargs
    if variables is not None and (not isinstance(variables, dict) or "chat_template" in variables):
        raise ValueError("chat_template_kwargs must be an object, without a chat_template of the request's own")


def check_numbers(request: Any) -> None:
    """Check the parameters of a request that are numbers. Raises ValueError."""
    if request.seed is not None and not 0 <= request.seed < _SEEDS:
        raise ValueError(f"seed must be from 0 to {_SEEDS - 1}")
    for field in ("repetition_context_size", "presence_context_size", "frequency_context_size"):
        if getattr(request, field) > _MOST_CONTEXT:
            raise ValueError(f"{field} must be at most {_MOST_CONTEXT}")
    if request.xtc_threshold > _MOST_XTC_THRESHOLD:
        raise ValueError(f"xtc_threshold must be at most {_MOST_XTC_THRESHOLD}")

    # Python takes True for the number 1.
    if request.top_logprobs is True:
        raise ValueError("top_logprobs must be a number")

    # These depend on the size of the vocabulary.
    if request.top_k or request.logit_bias:
        size = _count_tokens(request.response_generator.model_provider)
        if request.top_k >= size:
            raise ValueError(f"top_k must be less than {size}, the number of tokens that the model has")
        if any(not 0 <= token < size for token in request.logit_bias or ()):
            raise ValueError(f"logit_bias names a token that the model does not have: they are 0 to {size - 1}")


@lru_cache(maxsize=1)
def _count_tokens(provider: Any) -> int:
    """Return the number of tokens of the only model of this provider; to count them takes long."""
    if provider.tokenizer is None:
        raise ValueError("the model is not loaded yet")
    return len(provider.tokenizer.get_vocab())


def find_mistake(content: bytes) -> str | None:
    """Return why the body of a request cannot be read, or None if it is a JSON object."""
    try:
        body = json.loads(content)
    except (ValueError, RecursionError) as error:
        return f"the body is no JSON that can be read: {error}"
    return None if isinstance(body, dict) else "the body is no JSON object"


def guard_generator(generator: type[Any]) -> type[Any]:
    """Return a subclass of the server's generator that refuses a prompt that would end its thread."""

    class CheckedGenerator(generator):  # type: ignore[misc]  # the type is known only when the server is imported
        def _tokenize(self, *arguments: Any) -> Any:
            """Return the server's own result, whose first item is the list of the prompt's tokens.

            Raises ValueError for a prompt that would end the thread; the server answers the client with its text.
            """
            tokenized = super()._tokenize(*arguments)
            prompt = tokenized[0]
            if not isinstance(prompt, list) or not prompt:
                raise ValueError("the prompt is empty")
            if not isinstance(prompt[0], int):
                raise ValueError("the prompt must be one text")  # noqa: TRY004 - as the server's own errors
            return tokenized

    return CheckedGenerator


def forbid_model_code(provider: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a provider of models in place of the server's, which never runs Python that a model names."""

    def provide(arguments: Any) -> Any:
        """Return a model, without Python of its own."""
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
        handler = guard_handler(server.APIHandler, key)
    except UnusableServerError as error:
        sys.stderr.write(f"error: {error}\n")
        return _FAILURE
    # The default is 5: macOS drops connections beyond it, if several clients connect at once.
    socketserver.TCPServer.request_queue_size = 128
    # Run the server's own program, with its handler, loader of models and generator replaced.
    server._run_http_server = partial(server._run_http_server, handler_class=handler)  # noqa: SLF001 - it has no other seam
    server.ModelProvider = forbid_model_code(server.ModelProvider)
    server.ResponseGenerator = guard_generator(server.ResponseGenerator)
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
    is_handler = isinstance(handler, type) and issubclass(handler, http.server.BaseHTTPRequestHandler)
    # Each is an object, and its attribute that is replaced or overridden.
    parts = [(handler, "validate_model_parameters"), (handler, "_set_cors_headers")]
    parts += [(handler, "do_POST"), (getattr(server, "ResponseGenerator", None), "_tokenize")]
    parts += [(server, "_run_http_server"), (server, "ModelProvider")]
    if not is_handler or not all(hasattr(owner, part) for owner, part in parts):
        raise UnusableServerError("the server of this mlx-lm cannot be given a key: install 0.32")
    return server


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
