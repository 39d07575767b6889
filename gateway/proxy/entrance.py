"""Where clients come in, and what they find there: one service at its own port, all of them at the router's."""

from collections.abc import Mapping
from typing import Protocol

from aiohttp import web

from gateway.proxy import errors
from gateway.proxy.asked import Asked
from gateway.proxy.service import Service


class Entrance(Protocol):
    """What a listener leads to."""

    @property
    def name(self) -> str:
        """What errors and the log call it."""

    @property
    def token(self) -> str | None:
        """The bearer token that it wants; None serves this machine's programs."""

    def served(self) -> Mapping[str, Service]:
        """Return the services that may be asked here, by the model's name."""

    def find(self, asked: Asked) -> Service | web.Response:
        """Return the service that is asked, or the error that tells the client what it might ask."""


class OneService:
    """The port of one service, where any name for the model means this one."""

    def __init__(self, service: Service) -> None:
        self._service = service

    @property
    def name(self) -> str:
        """The service's."""
        return f"service {self._service.config.name}"

    @property
    def token(self) -> str | None:
        """The service's."""
        return self._service.config.token

    def served(self) -> Mapping[str, Service]:
        """Return the one."""
        return {self._service.config.model: self._service}

    def find(self, asked: Asked) -> Service | web.Response:
        """Return the one."""
        del asked
        return self._service


class AllServices:
    """The router: the name of the model decides."""

    name = "the router"

    def __init__(self, services: Mapping[str, Service]) -> None:
        self.token: str | None = None
        """The router's own: who has it may ask every service."""
        self._services = services

    def served(self) -> Mapping[str, Service]:
        """Return all; where two namespaces have a service of one name, both go by their whole names."""
        found: dict[str, list[Service]] = {}
        for service in self._services.values():
            found.setdefault(service.config.model, []).append(service)
        return {
            name if len(services) == 1 else service.config.name: service
            for name, services in found.items()
            for service in services
        }

    def find(self, asked: Asked) -> Service | web.Response:
        """Return the one of that name, whole or short."""
        if asked.model is None:
            return errors.no_model(self.served())
        served = self.served()
        return served.get(asked.model) or self._services.get(asked.model) or errors.unknown_model(asked.model, served)
