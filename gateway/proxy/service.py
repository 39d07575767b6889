"""One service of the proxy: its current configuration, its queue, and its counts."""

import asyncio
import functools
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from crds.modelroute import Cause
from gateway.event_log import log
from gateway.proxy import errors
from gateway.proxy.config import Backend, BackendAdapter, ServiceStats
from gateway.proxy.load_balancer import InFlight, pick_backend
from gateway.proxy.metrics import ServiceMetrics
from gateway.proxy.request_queue import RequestQueue
from gateway.proxy.request_record import RequestRecord
from runtimes.registry import find_runtime

if TYPE_CHECKING:
    from gateway.proxy.inference_request import InferenceRequest
    from gateway.proxy.token_counts import TokenCount

SERVICE_HEADER: Final = "X-Pomona-Service"
"""Header field of a response: the service that has answered, as `<namespace>/<service>`."""
_COUNTS_AT_ONCE: Final = 4
"""Prompts whose tokens are counted at once, so that many waiting requests do not hold all connections of an engine."""
_HELD_BYTES: Final = 64 << 20
"""For the bodies of requests that wait for one engine to be loaded: a quarter of the memory for all bodies."""
HOLD_SECONDS: Final = 300.0
"""The longest wait for an engine that is asleep: clients that wait for the head of an answer give up then, too."""
_LONGEST_RETRY_SECONDS: Final = 120
"""Clients' libraries do not try again after a longer time."""


class ServiceConfig(Protocol):
    """The configuration of a service: by an agent, or of a gateway by what it reads of the cluster."""

    @property
    def name(self) -> str:
        """`<namespace>/<service>`."""

    @property
    def model(self) -> str:
        """The clients' name for the model."""

    @property
    def backends(self) -> Sequence[Backend]:
        """Those that work on its requests."""

    @property
    def queue_limit(self) -> int:
        """The number of requests that may wait for a free slot."""

    @property
    def load_seconds(self) -> float:
        """Time in which an engine that is asleep is probably loaded."""

    @property
    def problem(self) -> str:
        """The reason why it has no engine; empty: it has one, or the reason is not known."""

    def valid_tokens(self, now: float) -> tuple[str, ...]:
        """Return the tokens that are valid at a listener of this service alone, in seconds since 1970."""


class RequestedModel(Protocol):
    """The bearer of a name that clients use for a model: a service, its adapter, or a route to several services."""

    @property
    def model(self) -> str:
        """The name of the model in responses."""

    @property
    def title(self) -> str:
        """Kind and name, for errors."""

    @property
    def created(self) -> int:
        """When it was made, in seconds since 1970."""

    def describe(self) -> dict[str, object]:
        """Return what the list of models says of it beside its name."""

    def choose_service(self, request: "InferenceRequest") -> "Service":
        """Return the service that gets a request first."""

    def find_fallback(self, cause: Cause, tried: Collection["Service"]) -> "Service | None":
        """Return the service that stands in for the one that has failed by `cause`; None: there is none."""


class Service:
    """A configured service. A running request keeps its service, even after that has left the configuration."""

    def __init__(
        self, config: ServiceConfig, in_flight: InFlight, note_demand: Callable[[], None] = lambda: None
    ) -> None:
        """Begin with `config`; `note_demand` is called when what its agent loads and unloads by has changed."""
        self.config = config
        self._note_demand = note_demand
        self.model = config.model
        """The clients' name for the model; it follows from the name, which never changes."""
        self.title = f"service {config.name}"
        self.created = int(time.time())
        self.header_line = f"{SERVICE_HEADER}: {config.name}\r\n".encode()
        """The field of its responses that names it."""
        self.queue = RequestQueue(self.take_backend, config.queue_limit)
        self._in_flight = in_flight
        self._awake = asyncio.Event()
        """Set while no request waits for an engine that is not loaded."""
        self.is_asleep = False
        """True if requests wait for an engine that is not loaded."""
        self.asleep_since = 0.0
        """When the last one was unloaded."""
        self.load_calls: list[float] = []
        """The times at which calls came that wait for its engine, and are no requests."""
        self.keep_alive_seconds: float | None = None
        """Time for which its model stays without a request, as the last one stated; inf: always, None: as usual."""
        self.update(config)
        self.metrics = ServiceMetrics()
        self.counting = asyncio.Semaphore(_COUNTS_AT_ONCE)
        """Held while an engine counts the tokens of a prompt."""
        self._running: set[InferenceRequest] = set()
        """Requests that wait in the queue or are being answered."""
        self._lone_request: InferenceRequest | None = None
        """The request that has had the service to itself since it came; None: no running one has."""

    def update(self, config: ServiceConfig) -> None:
        """Apply `config` from the next decision on; refuse the waiting requests if no backend is left."""
        self.config = config
        self.queue.limit = config.queue_limit
        self.sharing = next((backend for backend in config.backends if backend.shared_tokens is not None), None)
        """A backend whose slots share cells; None: there is none."""
        lengths = [backend.context_length for backend in config.backends if backend.context_length]
        self._context_length = min(lengths, default=None)
        """The most tokens of a request; None: they are not known."""
        self.adapters = {name: ServiceAdapter(self, name) for name in self.list_adapters()}
        """Those that requests choose, by name."""
        was_asleep, self.is_asleep = self.is_asleep, self._is_asleep()
        if self.is_asleep and not was_asleep:
            self.asleep_since = time.monotonic()
        self.queue.refuse_waiting(self.takes)
        self.queue.admit_waiting()
        if self.is_asleep:
            self._awake.clear()
        else:
            self._awake.set()

    def _is_asleep(self) -> bool:
        """Return whether a backend is asleep, and no other one takes new requests."""
        backends = [backend for backend in self.config.backends if not backend.draining]
        return bool(backends) and all(backend.asleep for backend in backends)

    async def load(self) -> None:
        """Wait for an engine as a request does, so that it is loaded. Raises RequestError: it was not, or cannot be."""
        if not self.has_backend:
            raise self.explain_absence()
        if not self.is_asleep:
            return
        called_at = time.monotonic()
        self.load_calls.append(called_at)
        self._note_demand()
        try:
            async with asyncio.timeout(HOLD_SECONDS):
                await self.wait_awake()
        except TimeoutError:
            raise self.explain_absence() from None
        finally:
            self.load_calls.remove(called_at)

    def set_keep_alive(self, seconds: float | None) -> None:
        """Note for how long the model stays without a request, as one has stated; None: as usual."""
        if seconds is not None or self.keep_alive_seconds is not None:
            self.keep_alive_seconds = seconds
            self._note_demand()

    async def wait_awake(self) -> None:
        """Wait until an engine is loaded."""
        await self._awake.wait()

    def enqueue(self, request: "InferenceRequest") -> None:
        """Add a request to those that wait for a slot, or for the engine. Raises RequestError: too many wait."""
        queue = self.queue
        if self.is_asleep:
            if queue.is_full or queue.body_bytes + request.body_bytes > _HELD_BYTES:
                raise errors.too_many_held(self.title, self.estimate_load_seconds())
        elif queue.is_full:
            raise errors.queue_full(self.config.name, queue.estimate_retry_seconds())
        queue.enqueue(request)
        if self.is_asleep and queue.queued == 1:
            self._note_demand()

    @property
    def idle_seconds(self) -> float | None:
        """The seconds since the last request to any of its backends ended, 0 during one; None: none ever was."""
        idle = (self._in_flight.idle_seconds(backend.uid) for backend in self.config.backends)
        return min((seconds for seconds in idle if seconds is not None), default=None)

    def estimate_load_seconds(self) -> int:
        """Estimate in how many seconds an engine that is asleep is loaded: requests that wait have it loaded."""
        seconds = self.config.load_seconds - self.queue.waiting_seconds(time.monotonic())
        return max(1, min(math.ceil(seconds), _LONGEST_RETRY_SECONDS))

    def explain_absence(self) -> errors.RequestError:
        """Return the error for a request that no engine takes."""
        if self.is_asleep:
            return errors.not_loaded_in_time(self.title, self.estimate_load_seconds())
        return errors.service_unavailable(self.title, self.config.problem)

    def list_adapters(self) -> Iterable[str]:
        """Return the names of the adapters that requests choose."""
        adapters = (adapter.name for backend in self.config.backends for adapter in backend.adapters)
        return dict.fromkeys(name for name in adapters if name)

    def find_adapter(self, model: str, adapter: str) -> "ServiceAdapter":
        """Return the adapter that `model` names. Raises RequestError: requests choose none of this name."""
        if found := self.adapters.get(adapter):
            return found
        if not self.config.backends:  # its adapters are not known yet
            raise self.explain_absence()
        raise errors.adapter_not_found(model, self.adapters)

    def takes(self, request: "InferenceRequest") -> bool:
        """Return whether a backend takes a request, now or when one of its slots is free."""
        return any(backend.takes(request.adapter) for backend in self.config.backends)

    def describe(self) -> dict[str, object]:
        """Return what the list of models says of it beside its name; the most tokens by vLLM's name, as clients do."""
        return {"max_model_len": self._context_length} if self._context_length else {}

    @property
    def has_backend(self) -> bool:
        """True if a backend takes new requests, now or when one of its slots is free."""
        return not all(backend.draining for backend in self.config.backends)

    def choose_service(self, request: "InferenceRequest") -> "Service":
        """Return the service itself."""
        del request
        return self

    def find_fallback(self, cause: Cause, tried: Collection["Service"]) -> "Service | None":
        """Return none: a client that names a service gets the answer of no other one."""
        del cause, tried
        return None

    def take_backend(self, request: "InferenceRequest", tried: Collection[str] = ()) -> Backend | None:
        """Take a free slot of the least busy backend or, if some were tried and accept no connection, any other one."""
        in_flight, backends, demand = self._in_flight, self.config.backends, request.demand
        if request.adapter:
            backends = tuple(backend for backend in backends if backend.takes(request.adapter))
        if self.sharing:
            backends = tuple(backend for backend in backends if in_flight.find_reservation(backend, demand) is not None)
        backend = pick_backend(backends, in_flight.counts(), tried, only_free=not tried)
        if backend:
            request.reserved = in_flight.find_reservation(backend, demand) or 0 if self.sharing else 0
            in_flight.begin(backend.uid, request.reserved)
        return backend

    def free_backend(self, uid: str, reserved: int) -> None:
        """Give a slot of a backend back, with the tokens that the request has reserved there."""
        self._in_flight.end(uid, reserved)

    def note_unreachable(self, backend: Backend) -> None:
        """Note that a backend accepts no connection; here its agent finds that out, too."""

    def note_reached(self, backend: Backend) -> None:
        """Note that a backend has begun to answer."""

    def may_try_elsewhere(self, backend: Backend) -> bool:
        """Decide whether a request that a backend has failed may go to another: here none, as it may have worked."""
        del backend
        return False

    @property
    def stats(self) -> ServiceStats:
        """The counts of ended and running requests."""
        return ServiceStats(
            requests=self.metrics.requests.total(),
            errors=self.metrics.errors.total(),
            tokens_in=self.metrics.prompt_tokens,
            tokens_out=sum((request.tokens.generated or 0 for request in self._running), self.metrics.generated_tokens),
            request_seconds=self.metrics.request_seconds.sum_seconds,
            in_flight=self.queue.in_flight,
            queued=self.queue.queued,
        )

    def running_requests(self) -> tuple["InferenceRequest", ...]:
        """Return the requests that wait in the queue or are being answered."""
        return tuple(self._running)

    def begin_request(self, request: "InferenceRequest") -> None:
        """Count a request as running."""
        self._lone_request = None if self._running else request
        self._running.add(request)

    def hand_over_request(self, request: "InferenceRequest", cause: Cause) -> None:
        """Count a request as one that goes on at another service, which counts and logs it from now on."""
        self._forget_request(request)
        self.metrics.fallbacks[cause] += 1

    def _forget_request(self, request: "InferenceRequest") -> bool:
        """Count a request as running no more; return whether it has had the service to itself."""
        self._running.discard(request)
        is_lone = self._lone_request is request
        if is_lone:
            self._lone_request = None
        return is_lone

    def record_request(self, request: "InferenceRequest") -> None:
        """Count and log a request that has ended.

        Its tokens and their time count as those of a lone stream if no other request ran beside it.
        """
        is_lone = self._forget_request(request)
        self.set_keep_alive(request.keep_alive_seconds)

        # A number of tokens is None if the engine did not report it.
        seconds = time.monotonic() - request.arrived
        tokens = request.tokens
        prompt, generated = tokens.prompt or 0, tokens.generated or 0

        metrics = self.metrics
        metrics.requests[request.head.label, request.status] += 1
        if request.error:
            metrics.errors[request.error] += 1
        metrics.request_seconds.observe(seconds)
        metrics.prompt_tokens += prompt
        metrics.generated_tokens += generated

        # Without the first token: the time is that from the first to the last.
        if is_lone and not request.error and generated > 1 and (lone_seconds := request.generation_seconds) is not None:
            metrics.lone_tokens += generated - 1
            metrics.lone_seconds += lone_seconds

        self._log_request(request, seconds, tokens)

    def _log_request(self, request: "InferenceRequest", seconds: float, tokens: "TokenCount") -> None:
        """Log a request that took so many seconds in all; the line is written with those of other requests."""
        first_token_seconds = request.first_token_seconds
        log.add(
            RequestRecord(
                service=self.config.name,
                route=request.head.label,
                status=request.status,
                seconds=_truncate(seconds),
                queued_seconds=_truncate(request.queued_seconds),
                first_token_seconds=None if first_token_seconds is None else _truncate(first_token_seconds),
                tokens_in=tokens.prompt,
                tokens_out=tokens.generated,
                request_id=request.request_id,
                timestamp="",  # set when the line is written
                level="info",
                error=request.error,
                key=request.router.key,
                fallback_from=request.attempts.fallback_from,
            )
        )


class ServiceAdapter:
    """An adapter of a service that is applied to the requests that name it, as `<service>:<adapter>`."""

    def __init__(self, service: Service, name: str) -> None:
        self.service = service
        self.name = name
        self.model = f"{service.model}:{name}"
        self.title = service.title
        self.header_line = service.header_line

    @property
    def created(self) -> int:
        """When the service was made, in seconds since 1970."""
        return self.service.created

    @property
    def has_backend(self) -> bool:
        """True if a backend with the adapter takes new requests."""
        return any(backend.takes(self.name) for backend in self.service.config.backends)

    def describe(self) -> dict[str, object]:
        """Return what the list of models says of the service."""
        return self.service.describe()

    def choose_service(self, request: "InferenceRequest") -> Service:
        """Return the service. Raises RequestError: its engine does not choose adapters on the path of the request."""
        for backend in self.service.config.backends:
            routes = find_runtime(backend.engine).adapter_routes
            if backend.adapters and request.route not in routes:
                raise errors.unsupported_adapter_path(self.model, request.exchange.head.path, self.service.model)
        request.adapter = self.name
        return self.service

    def find_fallback(self, cause: Cause, tried: Collection[Service]) -> Service | None:
        """Return none: a client that names an adapter gets the answer of no other one."""
        return self.service.find_fallback(cause, tried)


@functools.lru_cache(maxsize=1024)
def render_adapter_fields(adapters: tuple[BackendAdapter, ...], chosen: str) -> Mapping[str, msgspec.Raw]:
    """Return the fields by which an engine applies the chosen adapter, and those that are always applied.

    Every request has them: an engine compares their list with that of the slot's last request, and forgets the prompt
    if they differ. Only then may it go on from what it has computed, which it does not by default.
    """
    scales = [adapter.scale if adapter.name in {"", chosen} else 0 for adapter in adapters]
    lora = msgspec.json.encode([{"id": number, "scale": scale} for number, scale in enumerate(scales)])
    return {"cache_prompt": msgspec.Raw(b"true"), "lora": msgspec.Raw(lora)}


def add_adapters(services: Mapping[str, Service]) -> dict[str, "Service | ServiceAdapter"]:
    """Return services by name, and behind each of them its adapters, as `<name>:<adapter>`."""
    named: dict[str, Service | ServiceAdapter] = {}
    for name, service in services.items():
        named[name] = service
        named |= {f"{name}:{adapter}": chosen for adapter, chosen in service.adapters.items()}
    return named


def _truncate(seconds: float) -> float:
    """Return seconds with four decimals, all cut alike: a first token is never later than the end."""
    return int(seconds * 1e4) / 1e4
