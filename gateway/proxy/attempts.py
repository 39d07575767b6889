"""The attempts to have one request answered: what has failed it, and whether and where it may be tried again.

A backend that accepts no connection, is busy or has broken off says nothing of the others, so another one may answer.
But a request that two engines have broken off may be what makes engines fail: it goes nowhere else.
"""

from http import HTTPStatus

from crds.modelroute import Cause
from gateway.proxy import errors
from gateway.proxy.errors import RequestError
from gateway.proxy.service import RequestedModel, Service, ServiceAdapter


class Attempts:
    """The backends and services that a request has tried."""

    __slots__ = ("_services", "_was_broken_off", "_was_moved", "fallback_from", "model", "uids")

    def __init__(self) -> None:
        self.model: RequestedModel | None = None
        """The service, adapter or route that the request names; None before its body is read."""
        self.uids: list[str] = []
        """Backends that accepted no connection, or failed before they answered."""
        self.fallback_from: tuple[str, ...] = ()
        """Services that were asked before, each with the cause for which another one stood in."""
        self._services: tuple[Service, ...] = ()  # those that have failed
        self._was_moved = False  # to another backend of the service that is asked now
        self._was_broken_off = False

    @property
    def model_name(self) -> str:
        """The name of the model in the response."""
        return self.model.model if self.model else ""

    @property
    def header_line(self) -> bytes:
        """The header field that names the service; empty for a route, by which another one may answer in the end."""
        return self.model.header_line if isinstance(self.model, Service | ServiceAdapter) else b""

    def find_cause(self, error: RequestError) -> Cause | None:
        """Return why a backend has failed a request that another one may answer; None: no other one gets it."""
        if error.status == HTTPStatus.BAD_GATEWAY:
            was_broken_off, self._was_broken_off = self._was_broken_off, True
            if was_broken_off:
                return None
        return errors.find_cause(error)

    def may_move(self, cause: Cause) -> bool:
        """Decide whether another backend of the service may get it: one only, and none for the sake of its context."""
        return not self._was_moved and cause != "ContextTooLong"

    def note_move(self) -> None:
        """Note that the request went to another backend of its service."""
        self._was_moved = True

    def find_fallback(self, service: Service, cause: Cause) -> Service | None:
        """Return the service of the route that stands in for one that has failed by `cause`; None: there is none."""
        self._services += (service,)
        other = self.model.find_fallback(cause, self._services) if self.model else None
        if other is not None:
            self.fallback_from += (f"{service.config.name} {cause}",)
            self._was_moved = False
        return other
