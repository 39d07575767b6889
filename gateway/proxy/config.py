"""What the proxy is told and what it tells: the messages on its control socket.

One PUT carries the whole desired configuration, so that an agent which restarted, or did not hear an answer, simply
says it again. Tokens and keys travel only here, never in arguments, files or logs.
"""

import ipaddress
from typing import Annotated

import msgspec
from msgspec import Meta

_Port = Annotated[int, Meta(ge=0, le=65535)]


class Backend(msgspec.Struct, frozen=True, rename="camel"):
    """One server process behind a service. A draining backend finishes what it has and gets nothing new."""

    uid: Annotated[str, Meta(min_length=1)]
    url: Annotated[str, Meta(pattern="^http://[^/]+$")]
    draining: bool = False
    concurrency: Annotated[int, Meta(ge=1)] | None = None
    """Requests that it works on at once; None: as many as come."""
    model: str | None = None
    """What the engine calls the model, to which requests are rewritten. None: it serves one, whatever it is called."""
    api_key: str | None = None
    """What the engine itself wants to be asked with, as a shared daemon may; None: nothing."""

    def __repr__(self) -> str:
        key = "..." if self.api_key else None
        return f"Backend({self.uid!r}, {self.url!r}, draining={self.draining}, model={self.model!r}, api_key={key})"


class ServiceListener(msgspec.Struct, frozen=True, rename="camel"):
    """One service: where it listens, who may ask, and who answers. `name` is `<namespace>/<service>`."""

    name: Annotated[str, Meta(min_length=1)]
    address: str
    port: _Port
    token: Annotated[str, Meta(min_length=1)]
    backends: tuple[Backend, ...] = ()
    queue: Annotated[int, Meta(ge=0)] = 128
    """Requests that wait until a backend has room; more are refused with 429."""

    @property
    def model(self) -> str:
        """The name by which clients know the model: the service's own."""
        return self.name.rpartition("/")[2]

    def __repr__(self) -> str:
        return f"ServiceListener({self.name!r}, {self.address!r}, {self.port}, token=..., backends={self.backends!r})"


class Router(msgspec.Struct, frozen=True, rename="camel"):
    """One more listener, which leads to each service by the `model` in the request's body.

    Without a token it listens on loopback only, and to this machine's programs only: not to web pages in its browser.
    """

    address: str
    port: _Port
    token: Annotated[str, Meta(min_length=1)] | None = None

    def __post_init__(self) -> None:
        if self.token is None and not _is_loopback(self.address):
            raise ValueError(f"a router on {self.address} needs a token: without one it listens on 127.0.0.1 only")

    def __repr__(self) -> str:
        return f"Router({self.address!r}, {self.port}, token={'...' if self.token else None})"


class Tls(msgspec.Struct, frozen=True, rename="camel"):
    """Files in PEM form; when they change, new connections get the new certificate and those that are open stay."""

    certificate: str
    key: str


class ProxyConfig(msgspec.Struct, frozen=True, rename="camel"):
    """All services of this host. Names and backend uids are unique."""

    services: tuple[ServiceListener, ...] = ()
    router: Router | None = None
    tls: Tls | None = None
    """For every listener; None: plain HTTP."""

    def __post_init__(self) -> None:
        _refuse_duplicates("name", [service.name for service in self.services])
        _refuse_duplicates("backend uid", [backend.uid for service in self.services for backend in service.backends])


class BackendState(msgspec.Struct, frozen=True, rename="camel"):
    """A configured backend and the number of requests it is answering."""

    uid: str
    url: str
    draining: bool
    in_flight: int
    idle_seconds: float | None = None
    """Since the end of its last request, 0 while it answers one; None: this proxy never asked it anything."""


class Stats(msgspec.Struct, frozen=True, rename="camel"):
    """What a service did since the proxy has it.

    Tokens are counted as the engine says them; those of a stream that still runs, as they come.
    """

    requests: int = 0
    """Requests with the right token that were answered, refused, or broken off."""
    errors: int = 0
    """Of these, those that ended in a server error, a refusal for lack of room, or a break of the engine."""
    tokens_in: int = 0
    tokens_out: int = 0
    in_flight: int = 0
    queued: int = 0


class ListenerState(msgspec.Struct, frozen=True, rename="camel"):
    """A service as it is. `port` is the bound one; `error` says why nothing is bound, and is empty when all is well."""

    name: str
    address: str
    port: int
    error: str
    backends: tuple[BackendState, ...]
    taken: bool = False
    """The error is that another program holds the port: a different port would do."""
    stats: Stats = Stats()


class ProxyState(msgspec.Struct, frozen=True, rename="camel"):
    """Answer to GET /state and to a PUT: who the proxy is, by which an agent adopts it, and what it does."""

    version: str
    pid: int
    services: tuple[ListenerState, ...]
    router: ListenerState | None = None
    """The router as it is, where one is wanted; it has no backends of its own."""


class Idle(msgspec.Struct, frozen=True, rename="camel"):
    """Answer to the long poll on a backend: how many requests it was still answering at the end of the wait."""

    in_flight: int


class Refusal(msgspec.Struct, frozen=True, rename="camel"):
    """Body of every control answer that is not 200."""

    error: str


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _refuse_duplicates(what: str, values: list[str]) -> None:
    twice = {value for value in values if values.count(value) > 1}
    if twice:
        raise ValueError(f"proxy configuration names {what} {min(twice)!r} more than once")
