"""What the proxy is told and what it tells: the messages on its control socket.

One PUT carries the whole desired configuration, so that an agent which restarted, or did not hear an answer, simply
says it again. Tokens travel only here, never in arguments, files or logs.
"""

from typing import Annotated

import msgspec
from msgspec import Meta


class Backend(msgspec.Struct, frozen=True, rename="camel"):
    """One server process behind a service. A draining backend finishes what it has and gets nothing new."""

    uid: Annotated[str, Meta(min_length=1)]
    url: Annotated[str, Meta(pattern="^http://[^/]+$")]
    draining: bool = False


class ServiceListener(msgspec.Struct, frozen=True, rename="camel"):
    """One service: where it listens, who may ask, and who answers. `name` is `<namespace>/<service>`."""

    name: Annotated[str, Meta(min_length=1)]
    address: str
    port: Annotated[int, Meta(ge=0, le=65535)]
    token: Annotated[str, Meta(min_length=1)]
    backends: tuple[Backend, ...] = ()

    def __repr__(self) -> str:
        return f"ServiceListener({self.name!r}, {self.address!r}, {self.port}, token=..., backends={self.backends!r})"


class ProxyConfig(msgspec.Struct, frozen=True, rename="camel"):
    """All services of this host. Names and backend uids are unique."""

    services: tuple[ServiceListener, ...] = ()

    def __post_init__(self) -> None:
        _refuse_duplicates("name", [service.name for service in self.services])
        _refuse_duplicates("backend uid", [backend.uid for service in self.services for backend in service.backends])


class BackendState(msgspec.Struct, frozen=True, rename="camel"):
    """A configured backend and the number of requests it is answering."""

    uid: str
    url: str
    draining: bool
    in_flight: int


class ListenerState(msgspec.Struct, frozen=True, rename="camel"):
    """A service as it is. `port` is the bound one; `error` says why nothing is bound, and is empty when all is well."""

    name: str
    address: str
    port: int
    error: str
    backends: tuple[BackendState, ...]
    taken: bool = False
    """The error is that another program holds the port: a different port would do."""


class ProxyState(msgspec.Struct, frozen=True, rename="camel"):
    """Answer to GET /state and to a PUT: who the proxy is, by which an agent adopts it, and what it does."""

    version: str
    pid: int
    services: tuple[ListenerState, ...]


class Idle(msgspec.Struct, frozen=True, rename="camel"):
    """Answer to the long poll on a backend: how many requests it was still answering at the end of the wait."""

    in_flight: int


class Refusal(msgspec.Struct, frozen=True, rename="camel"):
    """Body of every control answer that is not 200."""

    error: str


def _refuse_duplicates(what: str, values: list[str]) -> None:
    twice = {value for value in values if values.count(value) > 1}
    if twice:
        raise ValueError(f"proxy configuration names {what} {min(twice)!r} more than once")
