"""The control of the models of this machine by clients of Ollama's API: load, unload, pull and delete.

`ServedModels` is what a proxy alone can do: models are loaded and pulled by the program that configures it.
"""

from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Protocol

import msgspec

from gateway.proxy.errors import RequestError
from gateway.proxy.service import Service


class PullProgress(msgspec.Struct, omit_defaults=True):
    """One line about a pull, in Ollama's form."""

    status: str
    digest: str = ""
    total: int = 0
    """In bytes, as `completed`."""
    completed: int = 0


class ModelControl(Protocol):
    """The control of models. Each call raises RequestError if it is not done."""

    async def load(self, service: Service, keep_alive_seconds: float | None) -> None:
        """Load a model, and return when it answers; it stays for so long, inf: without end, None: as long as usual."""

    async def unload(self, service: Service) -> None:
        """Unload a model once its requests have ended."""

    def pull(self, model: str) -> AsyncIterator[PullProgress]:
        """Download a model that is not served yet; return its progress, whose last line has the status `success`."""

    async def delete(self, model: str) -> None:
        """Delete the weights of a model, which may be served."""


class ServedModels(ModelControl):
    """The models of this machine: those on demand are loaded and unloaded, and others are changed by commands only."""

    async def load(self, service: Service, keep_alive_seconds: float | None) -> None:
        """Load a model, if it is one on demand. Raises RequestError: it is not loaded in time, or has failed."""
        await service.load()
        service.set_keep_alive(keep_alive_seconds)

    async def unload(self, service: Service) -> None:
        """Unload a model once it has no request, if it is one on demand; another one stays."""
        service.set_keep_alive(0.0)

    def pull(self, model: str) -> AsyncIterator[PullProgress]:
        """Raise RequestError: the command pulls."""
        message = f"model {model!r} is not served here: get it with `pomona pull`, and serve it with `pomona up`"
        raise RequestError(HTTPStatus.NOT_FOUND, "model_not_found", message, param="model")

    async def delete(self, model: str) -> None:
        """Raise RequestError: the command deletes."""
        message = f"model {model!r} is not deleted by this API: stop serving it, and use `pomona weights delete`"
        raise RequestError(HTTPStatus.NOT_IMPLEMENTED, "unsupported_path", message, param="model")
