"""The JSON messages of the control API: the configuration that an agent sends, and the state that the proxy returns.

One PUT carries the whole desired configuration, so that an agent that has restarted, or has got no answer, simply sends
it again. Tokens and keys travel only here, never in arguments, files or logs. Agent and proxy may be of different
versions: names in JSON never change, and new fields have defaults.
"""

import ipaddress
from typing import Annotated, Final

import msgspec
from msgspec import Meta

HOST_PATTERN: Final = r"^(?:\[[0-9a-f:.]+\]|[a-z0-9](?:[a-z0-9._-]*[a-z0-9])?)$"
"""A name or address in a Host field, in lower case and without a port."""
ORIGIN_PATTERN: Final = r"^[a-z][a-z0-9+.-]*://(?:\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::[0-9]{1,5})?$"
"""An origin of web pages, as browsers send it."""
EVERY_ORIGIN: Final = "*"
KEY_NAME_PATTERN: Final = "^[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$"
"""The name of an API key, which is a label of metrics."""
MOST_KEYS: Final = 1000
_MOST_NAMES: Final = 1000

_Port = Annotated[int, Meta(ge=0, le=65535)]
_HostName = Annotated[str, Meta(pattern=HOST_PATTERN, max_length=253)]
_Origin = Annotated[str, Meta(pattern=rf"^\*$|{ORIGIN_PATTERN}", max_length=512)]


class BackendAdapter(msgspec.Struct, frozen=True, rename="camel"):
    """A LoRA adapter of an engine."""

    scale: float
    name: str = ""
    """The name by which requests choose it; empty: it is applied to each request."""


class Backend(msgspec.Struct, frozen=True, rename="camel"):
    """One engine behind a service. A draining backend finishes its requests and gets no new ones."""

    uid: Annotated[str, Meta(min_length=1)]
    url: Annotated[str, Meta(pattern="^https?://[^/]+$")]
    """With https, its certificate has to name the host of the URL, and to be trusted by the pool of connections."""
    draining: bool = False
    asleep: bool = False
    """Its engine is not loaded, and is once a request waits for it: it gets no request, and those that come wait."""
    concurrency: Annotated[int, Meta(ge=1)] | None = None
    """The number of slots, that is, of requests that the engine works on at once; None: no limit."""
    model: str | None = None
    """The engine's name for the model, which replaces the one in requests. None: the engine takes any name."""
    api_key: str | None = None
    """The key that the engine itself requires, as a shared daemon may; None: it requires none."""
    previous_api_key: str | None = None
    """A key that `api_key` replaces, for a backend that does not know that yet; None: there is none."""
    engine: str | None = None
    """The engine's name, by which its errors are understood; None: it is not known, and only their status counts."""
    mode: str | None = None
    """The mode in which the engine serves, by which the paths that it answers are known; None: it is not known."""
    context_length: Annotated[int, Meta(ge=1)] | None = None
    """The most tokens that one request may use, for clients; None: it is not known."""
    shared_tokens: Annotated[int, Meta(ge=0)] | None = None
    """The cells beyond one context in the cache that its slots share; None: they share none. See `token_lanes`."""
    adapters: tuple[BackendAdapter, ...] = ()
    """Its adapters in the order of their ids, if requests choose some of them; empty: it takes no choice."""

    def takes(self, adapter: str) -> bool:
        """Return whether it takes new requests for an adapter; empty: for none."""
        return not self.draining and (not adapter or any(known.name == adapter for known in self.adapters))

    def __repr__(self) -> str:
        key = "..." if self.api_key else None
        return f"Backend({self.uid!r}, {self.url!r}, draining={self.draining}, model={self.model!r}, api_key={key})"


class ServedModelFacts(msgspec.Struct, frozen=True, rename="camel"):
    """The facts of a service's model that clients of Ollama's API are shown; what is not known is empty."""

    size_bytes: int = 0
    """The size of the weights."""
    memory_bytes: int = 0
    """The memory that serving it takes."""
    device_bytes: int = 0
    """The part of that memory that an accelerator has."""
    digest: str = ""
    """SHA-256 in hexadecimal digits: of the weights or, if that is not known, of their source and revision."""
    source: str = ""
    format: str = ""
    architecture: str = ""
    quantization: str = ""
    license: str = ""
    parameter_count: int = 0
    context_length: int = 0
    """The most tokens of a request or, if the engine decides that, those that the model was trained for."""
    embedding_size: int = 0
    layer_count: int = 0
    head_count: int = 0
    head_count_kv: int = 0
    capabilities: tuple[str, ...] = ()
    """In Ollama's words: completion, embedding, tools, vision, thinking."""
    idle_limit_seconds: float | None = None
    """The time without a request after which it is unloaded; None: it stays loaded."""


class ServiceListener(msgspec.Struct, frozen=True, rename="camel"):
    """One service: its listener, its token and its backends. `name` is `<namespace>/<service>`."""

    name: Annotated[str, Meta(min_length=1)]
    address: str
    port: _Port
    token: Annotated[str, Meta(min_length=1)]
    backends: tuple[Backend, ...] = ()
    previous_token: Annotated[str, Meta(min_length=1)] | None = None
    """A token that was replaced, and is valid besides `token` for a while."""
    previous_token_until: float = 0.0
    """The end of its validity, in seconds since 1970."""
    queue_limit: Annotated[int, Meta(ge=0)] = 128
    """The number of requests that may wait for a free slot; more are refused with 429."""
    load_seconds: Annotated[float, Meta(ge=0)] = 0.0
    """Time in which an engine that is asleep is probably loaded."""
    problem: str = ""
    """The reason why it has no engine, for clients; empty: it has one, or the reason is not known."""
    facts: ServedModelFacts | None = None
    """Facts of its model, where the router serves Ollama's API."""

    def valid_tokens(self, now: float) -> tuple[str, ...]:
        """Return the tokens that are valid at a time in seconds since 1970."""
        if self.previous_token is None or now >= self.previous_token_until:
            return (self.token,)
        return self.token, self.previous_token

    @property
    def model(self) -> str:
        """The clients' name for the model: the name of the service."""
        return self.name.rpartition("/")[2]

    def __repr__(self) -> str:
        return f"ServiceListener({self.name!r}, {self.address!r}, {self.port}, token=..., backends={self.backends!r})"


class RouterKey(msgspec.Struct, frozen=True, rename="camel"):
    """A key of clients of the router, which is recognised by its digest."""

    name: Annotated[str, Meta(pattern=KEY_NAME_PATTERN)]
    """Its name in log and metrics."""
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class RouterListener(msgspec.Struct, frozen=True, rename="camel"):
    """One more listener, for all services: the `model` in the request's body selects the service.

    Without keys it listens on loopback only, and serves programs of this machine, but no web pages in its browser.
    """

    address: str
    port: _Port
    keys: Annotated[tuple[RouterKey, ...], Meta(max_length=MOST_KEYS)] = ()
    """The keys of which each client needs one; empty: none is needed."""
    allowed_hosts: Annotated[tuple[_HostName, ...], Meta(max_length=_MOST_NAMES)] = ()
    """Further names in the Host field that clients without a key may use."""
    allowed_origins: Annotated[tuple[_Origin, ...], Meta(max_length=_MOST_NAMES)] = ()
    """The origins whose web pages may ask and read the answers; `*`: all pages that have a key."""
    control_socket: str = ""
    """The socket at which models are added and removed for clients of Ollama's API; empty: they are not."""

    def __post_init__(self) -> None:
        if not self.keys and not is_loopback(self.address):
            raise ValueError(f"a router on {self.address} needs keys: without any it may listen on 127.0.0.1 only")
        if not self.keys and EVERY_ORIGIN in self.allowed_origins:
            raise ValueError("a router for the pages of every origin needs keys: any web page could use it")
        _check_unique("key", [key.name for key in self.keys])


class Tls(msgspec.Struct, frozen=True, rename="camel"):
    """Certificate and key files in PEM form; after a change, new connections get the new certificate."""

    certificate: str
    key: str


class ProxyConfig(msgspec.Struct, frozen=True, rename="camel"):
    """All services of this host. Names and backend uids are unique."""

    services: tuple[ServiceListener, ...] = ()
    router: RouterListener | None = None
    tls: Tls | None = None
    """The certificate of every listener; None: plain HTTP."""

    def __post_init__(self) -> None:
        _check_unique("name", [service.name for service in self.services])
        _check_unique("backend uid", [backend.uid for service in self.services for backend in service.backends])


class BackendState(msgspec.Struct, frozen=True, rename="camel"):
    """A configured backend and its requests in flight."""

    uid: str
    url: str
    draining: bool
    in_flight: int
    idle_seconds: float | None = None
    """Seconds since its last request ended, 0 while one is in flight; None: this proxy never sent it one."""


class BackendHealth(msgspec.Struct, frozen=True, rename="camel"):
    """One line of GET /backends/health: the health of a backend, as its answers to clients show it."""

    uid: str
    suspect: bool = False
    reason: str = ""
    """Failing: it failed the last requests; Silent: it stopped within a stream; Slow: it does not begin to answer."""
    message: str = ""
    """Statuses, counts and times; never content of a request or an answer."""


class ServiceStats(msgspec.Struct, frozen=True, rename="camel"):
    """The counts of a service since the proxy was configured with it.

    Tokens are the engine's counts; those of a running stream are counted as they come.
    """

    requests: int = 0
    """Ended requests with the right token: answered, refused, or broken off."""
    errors: int = 0
    """Those among them that failed: no engine, a full queue, an engine's error, or an engine that broke off."""
    tokens_in: int = 0
    tokens_out: int = 0
    request_seconds: float = 0.0
    """Time that the ended requests took in all, each from its arrival to its end."""
    in_flight: int = 0
    queued: int = 0


class ListenerState(msgspec.Struct, frozen=True, rename="camel"):
    """The state of a listener.

    `port` is the bound port, or the configured port if none is bound. `error` states why none is bound, or is empty.
    """

    name: str
    address: str
    port: int
    error: str
    backends: tuple[BackendState, ...]
    port_taken: bool = False
    """The error is that another program holds the port; another port would work."""
    stats: ServiceStats = ServiceStats()


class ProxyState(msgspec.Struct, frozen=True, rename="camel"):
    """Response to GET /state and PUT /services: the proxy's identity, by which agents adopt it, and its listeners."""

    version: str
    pid: int
    services: tuple[ListenerState, ...]
    router: ListenerState | None = None
    """The router's listener, if one is configured; it has no backends."""


class ServiceDemand(msgspec.Struct, frozen=True, rename="camel"):
    """The requests to a service, by which an agent decides whether its engine has to be loaded."""

    name: str
    waiting: int
    """Requests that wait for an engine, or for a free slot of one."""
    waiting_seconds: float
    """Time for which the first of them has waited; 0 if none waits."""
    in_flight: int
    idle_seconds: float | None
    """Seconds since its last request ended, 0 while there is one; None: this proxy has sent none to its engines."""
    keep_alive_seconds: float | None = None
    """Time for which its model stays without a request, as a client has stated; -1: without end; None: as usual."""


class Demand(msgspec.Struct, frozen=True, rename="camel"):
    """Response to GET /demand: the requests to each service."""

    changes: int
    """Number of changes so far that may matter to a decision: a call can wait until it is another one."""
    services: tuple[ServiceDemand, ...]


class RequestsInFlight(msgspec.Struct, frozen=True, rename="camel"):
    """Response to GET /backends/{uid}/idle and /backends/busy: the requests in flight at the end of the wait."""

    in_flight: int


def is_loopback(address: str) -> bool:
    """Decide whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _check_unique(what: str, values: list[str]) -> None:
    """Raise ValueError if a value is there more than once; `what` names the values in its message."""
    twice = {value for value in values if values.count(value) > 1}
    if twice:
        raise ValueError(f"proxy configuration names {what} {min(twice)!r} more than once")
