"""The control of the models of this machine by clients of Ollama's API: load, unload, pull and delete."""

import contextlib
from collections.abc import AsyncGenerator, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Protocol
from urllib.parse import quote

import msgspec
from msgspec import Meta

from gateway.proxy.errors import RequestError
from gateway.proxy.service import Service

if TYPE_CHECKING:
    from gateway.http.owned_control_client import OwnedControlClient


LONGEST_MODEL: Final = 4096
"""Letters of the name of a model, which may be a path or a URL."""
_LOOKUP_SECONDS: Final = 120.0
"""The longest that the hub is asked what a name means."""
_PAUSE_SECONDS: Final = 30.0
"""The longest pause in the progress of a model, which has a line every 5 s."""


class PullProgress(msgspec.Struct, omit_defaults=True):
    """One line about a pull, in Ollama's form."""

    status: str
    digest: str = ""
    total: int = 0
    """In bytes, as `completed`."""
    completed: int = 0


class AddRequest(msgspec.Struct, frozen=True, rename="camel"):
    """The body of a call to the program that serves models: to serve one more."""

    model: Annotated[str, Meta(min_length=1, max_length=LONGEST_MODEL)]
    is_client: bool = False
    """A client of the endpoint has sent the name."""


class AddedModel(msgspec.Struct, frozen=True, rename="camel"):
    """Its answer."""

    name: str
    """The name of the service."""
    is_new: bool = True
    """It was not served before."""
    note: str = ""
    """The choice that was made, and why."""


class AddProgress(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """One line about a model that was added, until its weights are there."""

    bytes: int = 0
    total_bytes: int | None = None
    digest: str = ""
    """SHA-256 of the weights; empty: it is not known yet."""
    is_stored: bool = False
    """Its weights are there, and its requests are taken."""
    problem: str = ""
    """The reason why it cannot be served, with the way out."""


class ModelControl(Protocol):
    """The control of models. Each call raises RequestError if it is not done."""

    async def load(self, service: Service, keep_alive_seconds: float | None) -> None:
        """Load a model, and return when it answers; it stays for so long, inf: without end, None: as long as usual."""

    async def unload(self, service: Service) -> None:
        """Unload a model once its requests have ended."""

    def pull(self, model: str) -> AsyncGenerator[PullProgress, None]:
        """Serve a model that is not served yet; yield the progress of its weights, which ends with `success`."""

    async def delete(self, model: str) -> None:
        """Serve a model no more."""


class ServedModels(ModelControl):
    """The models of this machine: those on demand are loaded and unloaded here.

    Models are added and removed by the program that configures the proxy, at its control socket: the proxy tells it
    that a client has sent the name, for which fewer names are allowed.
    """

    def __init__(self, control_socket: Path) -> None:
        self._socket = control_socket

    async def load(self, service: Service, keep_alive_seconds: float | None) -> None:
        """Load a model, if it is one on demand. Raises RequestError: it is not loaded in time, or has failed."""
        await service.load()
        service.set_keep_alive(keep_alive_seconds)

    async def unload(self, service: Service) -> None:
        """Unload a model once it has no request, if it is one on demand; another one stays."""
        service.set_keep_alive(0.0)

    async def pull(self, model: str) -> AsyncGenerator[PullProgress, None]:
        """Add a model, and yield the progress of its weights; it is removed again if that fails, or is cancelled.

        Raises RequestError: it cannot be added, or its weights cannot be fetched.
        """
        with _translate_errors():
            body = msgspec.json.encode(AddRequest(model, is_client=True))
            client = self._make_client()
            added = await client.call("POST", "/models", AddedModel, body=body, wait_seconds=_LOOKUP_SECONDS)
        path, is_stored = f"/models/{quote(added.name, safe='')}", False
        try:
            with _translate_errors():
                lines = client.stream_lines("GET", f"{path}/progress", pause_seconds=_PAUSE_SECONDS)
                async with contextlib.aclosing(lines):
                    async for line in lines:
                        progress = client.decode(line, AddProgress)
                        if progress.problem:
                            raise _refuse(f"{added.name}: {progress.problem}")
                        is_stored = progress.is_stored
                        for step in _describe_step(progress):
                            yield step
        finally:
            if added.is_new and not is_stored:
                await self.delete(added.name)
        if not is_stored:
            raise _refuse(f"{added.name}: `pomona up` has ended before its weights were fetched")

    async def delete(self, model: str) -> None:
        """Serve a model that was added no more. Raises RequestError: it is of a file, or is served no more."""
        with _translate_errors():
            await self._make_client().call("DELETE", f"/models/{quote(model, safe='')}", AddedModel)

    def _make_client(self) -> "OwnedControlClient":
        """Return a client of the control socket; the first pull imports what a proxy needs for nothing else."""
        from gateway.http.owned_control_client import OwnedControlClient  # noqa: PLC0415

        return OwnedControlClient(self._socket, "pomona-up")


def _describe_step(progress: AddProgress) -> Iterator[PullProgress]:
    """Yield the lines for the progress of a pull in Ollama's form."""
    if not progress.digest:
        return
    name = f"pulling {progress.digest[:12]}"
    if not progress.is_stored:
        yield PullProgress(name, f"sha256:{progress.digest}", progress.total_bytes or 0, progress.bytes)
        return
    for status in ("verifying sha256 digest", "writing manifest", "success"):
        yield PullProgress(status)


def _refuse(message: str) -> RequestError:
    return RequestError(HTTPStatus.BAD_REQUEST, "model_not_added", message, param="model")


@contextlib.contextmanager
def _translate_errors() -> Iterator[None]:
    """Raise the errors of the control socket as RequestError."""
    from gateway.http.control_client import ControlRefusedError, ControlUnreachableError  # noqa: PLC0415

    try:
        yield
    except ControlRefusedError as error:
        raise _refuse(error.refusal or "`pomona up` is of another version: start it again") from error
    except ControlUnreachableError as error:
        message = "models cannot be changed while `pomona up` does not run: start it again"
        raise RequestError(HTTPStatus.SERVICE_UNAVAILABLE, "model_not_added", message, param="model") from error
