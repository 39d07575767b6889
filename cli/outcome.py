"""Exit code, error line and result file of `pomona fetch` and `pomona inspect`.

The exit codes are those of artifacts/errors.py. The controller reads the result file of a Job as the termination
message of its container, which Kubernetes cuts at 4,096 bytes.
"""

import asyncio
import os
import re
import signal
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

import msgspec

from artifacts.errors import PERMANENT_EXIT, RETRYABLE_EXIT, ArtifactError
from artifacts.repositories.address_policy import Networks
from artifacts.source import DEFAULT_ENDPOINT, HUB_TOKEN_VARIABLE, TOKEN_VARIABLE, Source, is_of_hub
from cli.options import Parsed
from cli.stop_signals import run_until_signal

if TYPE_CHECKING:
    from artifacts.inspect import Inspection  # it imports aiohttp
    from artifacts.repositories.repository import SourceAccess
    from artifacts.retry import Patience

T = TypeVar("T")

RESULT_BYTES = 3500


def read_token(source: Source) -> str | None:
    """Return the token for `source`, or None: from the environment, since other users can read a command line.

    The hub's token goes to no other server, however the source is written. Raises ArtifactError: a registry's login
    cannot be read.
    """
    if source.scheme == "oci":
        from artifacts.repositories.registry_login import read_environment  # noqa: PLC0415  only registries need it

        return read_environment(source.repo, os.environ)
    if source.scheme != "hf" and (source_token := os.environ.get(TOKEN_VARIABLE)):
        return source_token
    return read_hub_token() if is_of_hub(source, read_endpoint()) else None


def build_source_access(
    server: Source, source: Source, file_root: Path | None, allowed_networks: Networks, patience: "Patience"
) -> "SourceAccess":
    """Return the settings to read `server`, which is the source or a mirror of it, with the environment's credentials.

    A mirror gets no token. Raises ArtifactError.
    """
    from artifacts.repositories.repository import SourceAccess  # noqa: PLC0415  it imports aiohttp
    from artifacts.repositories.s3_access import ANONYMOUS_S3, S3Access  # noqa: PLC0415  for those who fetch

    return SourceAccess(
        # server is source: no mirror, which is another server and must not see the token of the source
        token=read_token(source) if server is source else None,
        endpoint=read_endpoint(),
        file_root=file_root,
        allowed_networks=allowed_networks,
        patience=patience,
        s3=S3Access.read_environment(os.environ) if server.scheme == "s3" else ANONYMOUS_S3,
    )


def read_hub_token() -> str | None:
    """Return the token for the hub by the environment; None: it has none, and only public models can be read."""
    return os.environ.get(HUB_TOKEN_VARIABLE) or None


def read_endpoint() -> str:
    """Return the URL of the hub from which hf:// sources are read, or of its mirror (HF_ENDPOINT)."""
    return os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT


def _check_digest(text: str) -> str:
    if not re.fullmatch(r"[0-9a-fA-F]{64}", text):
        raise ValueError(f"{text!r} is not a SHA-256: give 64 hexadecimal digits")
    return text.lower()


DIGEST: Final = Parsed("SHA256", _check_digest)


def run_or_exit(verb: str, work: Coroutine[Any, Any, T], result: Path | None) -> T:
    """Run `work` to its end, and return what it returns; exit if it fails.

    An ArtifactError is printed in one line and written to the file `result`; its exit code says whether a retry may
    help. After SIGTERM, as when a Job is stopped, the exit code says that one helps.

    Args:
        verb: the command, such as fetch, for messages.
        work: the work.
        result: the file; None: there is none.
    """
    try:
        return asyncio.run(run_until_signal(work, signal.SIGTERM))
    except ArtifactError as error:
        _fail(verb, error, result)
    except asyncio.CancelledError:
        print(f"pomona {verb}: stopped; run the command again to resume", file=sys.stderr)
        sys.exit(RETRYABLE_EXIT)


def _fail(verb: str, error: ArtifactError, result: Path | None) -> NoReturn:
    """Write the error to the result file, print it, and exit with the code that says whether a retry may help."""
    # retryAfterSeconds: the pause that the server asks for; 0: it asks for none
    facts = {
        "reason": error.reason,
        "message": error.message,
        "retryable": error.retryable,
        "retryAfterSeconds": error.retry_after_seconds,
    }
    write_result(verb, facts, result)
    print(f"pomona {verb}: {error.message}", file=sys.stderr)
    sys.exit(RETRYABLE_EXIT if error.retryable else PERMANENT_EXIT)


def describe_headers(facts: "Inspection") -> dict[str, Any]:
    """Return what the headers say of a model, as `pomona fetch` and `pomona inspect` print it and Jobs return it."""
    return {
        "format": facts.format,
        "totalParameters": facts.total_parameters,
        "activeParameters": facts.active_parameters,
        "gguf": msgspec.to_builtins(facts.gguf),
        "layout": msgspec.to_builtins(facts.layout),
    }


def write_result(verb: str, facts: dict[str, Any], result: Path | None) -> None:
    """Write the facts as JSON to the result file, if there is one; exits 1 when that fails."""
    if not result:
        return
    try:
        result.write_bytes(encode_within(facts, RESULT_BYTES))
    except OSError as error:
        print(f"pomona {verb}: --result {result}: {error.strerror}", file=sys.stderr)
        sys.exit(RETRYABLE_EXIT)


def encode_within(facts: dict[str, Any], limit_bytes: int) -> bytes:
    """Return JSON of at most `limit_bytes`: the longest strings are cut in half until it fits."""
    while len(encoded := msgspec.json.encode(facts)) > limit_bytes:
        facts = _halve(facts, max(_list_lengths(facts)))
    return encoded


def _list_lengths(value: object) -> list[int]:
    """Return the lengths of all strings in nested dicts; 0 stands for any other value."""
    if isinstance(value, dict):
        return [length for inner in value.values() for length in _list_lengths(inner)]
    return [len(value)] if isinstance(value, str) else [0]


def _halve(value: Any, longest: int) -> Any:
    """Return nested dicts with each string of the length `longest` cut in half."""
    if isinstance(value, dict):
        return {key: _halve(inner, longest) for key, inner in value.items()}
    return value[: longest // 2] if isinstance(value, str) and len(value) == longest else value
