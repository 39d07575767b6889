"""Gives each service one port of the host, the same over restarts: slices and the clients' firewalls know it."""

from pathlib import Path

from artifacts import durable


class NoPortError(Exception):
    """Every port of the range is given away or taken by other programs."""


class Ports:
    """Ports of `first` to `last`, by service as `<namespace>/<service>`, kept in the file `path`."""

    def __init__(self, path: Path, first: int, last: int) -> None:
        self._path = path
        self._range = range(first, last + 1)
        kept = durable.read(path, dict[str, int]) or {}
        self._given = {service: port for service, port in kept.items() if port in self._range}
        self._foreign: set[int] = set()

    def get(self, service: str) -> int | None:
        """Return the port that `service` has."""
        return self._given.get(service)

    def assign(self, service: str) -> int:
        """Return the port of `service`; a new one is remembered first. Raises NoPortError and OSError."""
        if service not in self._given:
            unavailable = self._foreign | set(self._given.values())
            port = next((port for port in self._range if port not in unavailable), None)
            if port is None:
                ports = f"{self._range.start}-{self._range.stop - 1}"
                raise NoPortError(f"no port of --port-range {ports} is free for {service}: widen it")
            durable.write(self._path, {**self._given, service: port})
            self._given[service] = port
        return self._given[service]

    def refuse(self, service: str) -> None:
        """Forget the port of `service`, which another program holds, and do not give it to anybody."""
        if (port := self._given.pop(service, None)) is not None:
            self._foreign.add(port)

    def keep(self, services: set[str]) -> None:
        """Forget every service that is not in `services`. Raises OSError."""
        if not self._given.keys() <= services:
            self._given = {service: port for service, port in self._given.items() if service in services}
            durable.write(self._path, self._given)
