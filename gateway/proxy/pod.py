"""The proxy of one pod: it checks the service's token, and passes requests on to the engine, which only it can reach.

The token is read from a file, because the kubelet replaces the file when the Secret changes. The proxy asks the engine
for its health once a second: GET /health, which needs no token, answers with the last result. A request in flight is
finished at SIGTERM, and so is one that waits for a slot: the engine outlives the proxy. GET /live/engine, which needs
no token either, answers 503 once the engine hangs, silently or while it loads, so that the kubelet restarts it. An
engine whose health path says nothing of its work is asked for its pulse, too. GET /metrics needs the token.
"""

import asyncio
import math
import re
import time
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from pathlib import Path
from typing import Final, NamedTuple

from artifacts.compiled_code import find_archive, keep
from gateway.event_log import log
from gateway.http.upstream_pool import UpstreamPool
from gateway.proxy.config import Backend, BackendAdapter, ProxyConfig, ServiceListener
from gateway.proxy.control import restore_stop_signals, set_up_process
from gateway.proxy.engine_metrics import EngineScraper
from gateway.proxy.listeners import Listeners
from runtimes.pod import EngineMetrics
from runtimes.registry import find_runtime

Prepare = Callable[[], Awaitable[None]]
"""Makes the engine able to serve, such as by a download, before the first request. May raise PodProxyError."""

CHECK_SECONDS: Final = 1.0
HEALTH_SECONDS: Final = 5.0
"""The time in which the engine answers its health path."""
HANG_SECONDS: Final = 600.0
"""The silence after which an engine hangs. One that works on a long prompt may be silent for minutes, but most engines
answer their health path meanwhile. A restart loads the model anew, which is worse than a late one."""
_PULSE_SECONDS: Final = 30.0
"""The longest pause before the engine is asked for its pulse. llama-server's averages begin anew with each question."""
REPORT_SECONDS: Final = 1200.0
"""The time for which an engine that loads for too long counts as hanging; then its time to load begins anew. The
kubelet restarts the engine within this time, and then does not probe it before this time is over."""
_FAILED_CHECKS: Final = 2
"""Failures in a row after which the engine gets no requests. One may be an accident."""
OVERLAP_SECONDS: Final = 600.0
"""The time for which a replaced token is valid besides the new one."""
_TOKEN: Final = re.compile(r"[!-~]{1,8192}", re.ASCII)
_LONGEST_FILE_BYTES: Final = 16 << 10
_STATUS_LINE: Final = re.compile(rb"HTTP/1\.[01] ([23])\d\d\b")
_BACKEND: Final = "engine"
_LOOPBACK: Final = "127.0.0.1"


class PodProxyError(Exception):
    """The proxy cannot serve its pod; the message has the cause and the remedy, and no secret."""


class PodProxyOptions(NamedTuple):
    """The service, its token, and the engine."""

    service: str
    """`<namespace>/<service>`."""
    address: str
    port: int
    token_file: Path
    engine_port: int
    """On 127.0.0.1, which the containers of a pod share."""
    health_path: str
    """The path at which the engine answers 200 to 399 when it serves."""
    pulse_path: str | None = None
    """The path that the engine answers between two steps of its work; None: it has none, or its health path is one."""
    model: str | None = None
    """The engine's name for the model; None: it takes any name."""
    engine: str | None = None
    """The engine's name, by which its errors and metrics are understood; None: it is not known."""
    mode: str | None = None
    """The mode in which the engine serves, by which the paths that it answers are known; None: it is not known."""
    concurrency: int | None = None
    """The requests that the engine works on at once; None: no limit."""
    context_length: int | None = None
    """The most tokens of a request; None: it is not known."""
    shared_tokens: int | None = None
    """The cells of the engine's cache beyond one context; None: its slots share none."""
    adapters: tuple[BackendAdapter, ...] = ()
    """The engine's adapters by their ids, if requests choose some of them."""
    drain_seconds: float = 30.0
    hang_seconds: float = HANG_SECONDS
    loading_seconds: float = math.inf
    """The time after which an engine that loads, and is not healthy yet, hangs."""
    home: Path | None = None
    kept: Path | None = None
    """The beginning of the archives of `home`, where the engine compiles (`artifacts/compiled_code.py`); None: none."""

    @property
    def engine_url(self) -> str:
        """The engine's address."""
        return f"http://{_LOOPBACK}:{self.engine_port}"

    @property
    def engine_metrics(self) -> EngineMetrics | None:
        """The engine's own metrics; None: it has none."""
        pod = find_runtime(self.engine).pod
        return pod.metrics if pod else None


async def run_pod_proxy(options: PodProxyOptions, prepare: Prepare | None = None) -> None:
    """Serve until SIGTERM or SIGINT, then finish the requests; a second signal ends at once.

    1. Listen, with a backend that takes no requests: they get 503 until `prepare` has ended and the engine is healthy.
    2. Follow the engine (`_follow`) until a stop signal comes or the preparation fails.
    3. Finish the requests in progress and those in the queue, within `drain_seconds`.

    Raises PodProxyError: the port is taken, the token file cannot be used, or the preparation failed.
    """
    tokens = MountedToken(options.token_file)
    engine = EngineCheck(options.hang_seconds, options.loading_seconds, has_pulse=options.pulse_path is not None)
    stop = set_up_process()  # set by SIGTERM and SIGINT
    async with UpstreamPool() as pool, asyncio.TaskGroup() as tasks:
        # 1. Listen. A pod has one service, whose state says whether its port could be bound.
        metrics = options.engine_metrics
        scraper = EngineScraper(pool, options.service, options.engine_url, metrics) if metrics else None
        listeners = Listeners(pool, tasks, engine_hangs=lambda: engine.hangs, engine_scraper=scraper)
        await listeners.configure(_build_config(options, tokens, is_serving=False))
        (state,) = listeners.service_states()
        log.info("pod_proxy_started", service=options.service, port=state.port, engine_port=options.engine_port)

        # 2. Follow the engine. `_follow` never returns: it ends by an error of the preparation, or is cancelled here.
        error: BaseException | None
        if state.error:
            error = PodProxyError(f"{state.error}: give a free --port")  # nothing listens
        else:
            following = asyncio.ensure_future(_follow(options, listeners, tokens, engine, prepare))
            stopping = asyncio.ensure_future(stop.wait())
            await asyncio.wait({following, stopping}, return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            following.cancel()
            # The failure of the preparation, or the cancellation that a stop signal has caused.
            (error,) = await asyncio.gather(following, return_exceptions=True)

        # 3. Finish the requests; another stop signal ends the process at once.
        restore_stop_signals()
        log.info("pod_proxy_draining", seconds=options.drain_seconds)
        await listeners.finish(options.drain_seconds)
    log.info("pod_proxy_stopped")

    if error and not isinstance(error, asyncio.CancelledError):
        raise error


async def _prepare(prepare: Prepare | None) -> None:
    if prepare:
        await prepare()
        log.info("engine_prepared")


async def _follow_pulse(options: PodProxyOptions, engine: "EngineCheck") -> None:
    """Ask the engine for its pulse, for ever, and note each answer; return at once if it has no path for a pulse.

    The pulse is a path that the engine answers between two steps of its work, so that an answer shows that it goes on.
    """
    while options.pulse_path:
        # A step may take minutes, and its answer then comes at the end of it: hence the long time-out.
        if await ask_health(options.engine_port, options.pulse_path, options.hang_seconds) is not None:
            engine.note_pulse(time.monotonic())
        await asyncio.sleep(min(_PULSE_SECONDS, options.hang_seconds / 4))


async def _keep_compiled_code(options: PodProxyOptions, engine: "EngineCheck") -> None:
    """Keep what the engine has compiled for later pods, once it serves and compiles no more."""
    outcome = None
    while options.home and options.kept and outcome is None:
        await asyncio.sleep(_PULSE_SECONDS)
        try:
            if engine.is_healthy:
                outcome = await asyncio.to_thread(keep, options.home, find_archive(options.kept))
        except (OSError, RecursionError) as error:
            outcome = str(error)
    if outcome:
        log.info("compiled_code_kept", outcome=outcome)


async def _follow(
    options: PodProxyOptions,
    listeners: Listeners,
    tokens: "MountedToken",
    engine: "EngineCheck",
    prepare: Prepare | None,
) -> None:
    """Prepare the engine, and follow its health, its pulse and the token, for ever. Raises PodProxyError.

    Once a second the engine is asked for its health. Its backend takes requests while the preparation has ended and the
    engine is healthy; the listeners are configured anew only if that, or the token, has changed.
    """
    preparing = asyncio.ensure_future(_prepare(prepare))
    others = asyncio.gather(_follow_pulse(options, engine), _keep_compiled_code(options, engine))
    applied_config: ProxyConfig | None = None
    try:
        while True:
            # 1. The health. progress: a number that grows with each answer and token of the engine
            answer = await ask_health(options.engine_port, options.health_path)
            in_flight = bool(listeners.in_flight.counts())
            progress = _count_progress(options.service, listeners)
            engine.record_health(answer, time.monotonic(), progress, in_flight=in_flight)

            # 2. The token and the preparation.
            tokens.reload()
            if preparing.done():
                preparing.result()  # raises PodProxyError if the preparation failed

            # 3. The configuration that follows, if it is another one.
            config = _build_config(options, tokens, is_serving=preparing.done() and engine.is_healthy)
            if config != applied_config:
                applied_config = config
                await listeners.configure(config)

            # 4. The pause. The end of the preparation ends it, so that the first request need not wait for it.
            if preparing.done():
                await asyncio.sleep(CHECK_SECONDS)
            else:
                await asyncio.wait({preparing}, timeout=CHECK_SECONDS)
    finally:
        preparing.cancel()
        others.cancel()


def _count_progress(service: str, listeners: Listeners) -> int:
    """Return a number that grows with each sign that the engine works: its answers with 200, and tokens, so far.

    A request that its client breaks off adds no answer: when an engine hangs, all requests end so.
    """
    (state,) = listeners.service_states()
    requests = listeners.services[service].metrics.requests
    answers = sum(count for (_, status), count in requests.items() if status == HTTPStatus.OK)
    return answers + state.stats.tokens_in + state.stats.tokens_out


def _build_config(options: PodProxyOptions, tokens: "MountedToken", *, is_serving: bool) -> ProxyConfig:
    """Return the configuration of the pod's one service; its backend drains unless `is_serving`."""
    backend = Backend(
        uid=_BACKEND,
        url=options.engine_url,
        draining=not is_serving,
        concurrency=options.concurrency,
        context_length=options.context_length,
        shared_tokens=options.shared_tokens,
        model=options.model,
        engine=options.engine,
        mode=options.mode,
        adapters=options.adapters,
    )
    service = ServiceListener(
        name=options.service,
        address=options.address,
        port=options.port,
        token=tokens.token,
        backends=(backend,),
        previous_token=tokens.previous,
        previous_token_until=tokens.previous_until,
    )
    return ProxyConfig((service,))


class EngineCheck:
    """The health of the engine by its last answers. It is not healthy before the first one.

    The start of an engine is not visible here: one that loads may refuse connections, before its restart and after it.
    So the time to load begins with the first answer that the proxy waits for, which is never too early for an engine
    that was started once. It begins anew when a healthy engine ends, and when the kubelet must have restarted it.
    """

    def __init__(
        self, hang_seconds: float = HANG_SECONDS, loading_seconds: float = math.inf, *, has_pulse: bool = False
    ) -> None:
        self.hangs = False
        """True if only a restart helps: it was healthy, and has shown no sign of life for `hang_seconds`; or it has
        loaded for `loading_seconds`. The latter for `REPORT_SECONDS`, in which the kubelet restarts it."""

        # The limits. With a path for its pulse, a healthy answer of the engine alone is no sign of life.
        self._hang_seconds = hang_seconds
        self._loading_seconds = loading_seconds
        self._has_pulse = has_pulse

        # Failed checks in a row; from `_FAILED_CHECKS` on, as before the first check, the engine is not healthy.
        self._failures = _FAILED_CHECKS
        # The time of the last sign of life; None: it has not been healthy since its start.
        self._last_sign_of_life: float | None = None
        # The begin of its time to load; None: it is healthy, or was not asked yet.
        self._loading_began: float | None = None
        self._progress = 0  # the number that the last check had

    @property
    def is_healthy(self) -> bool:
        """True if it may get requests."""
        return self._failures < _FAILED_CHECKS and not self.hangs

    def note_pulse(self, now: float) -> None:
        """Note an answer to the question for the engine's pulse, at a time of the monotonic clock."""
        if self._last_sign_of_life is not None:
            self._last_sign_of_life = now

    def record_health(self, answer: bool | None, now: float, progress: int, *, in_flight: bool) -> None:
        """Count an answer of `ask_health`, at a time of the monotonic clock, and decide whether the engine hangs.

        * Healthy: the failures end. The first such answer after a start is a sign of life; later ones are, unless the
          engine has a pulse to show that it works.
        * Not healthy, such as a refused connection: the engine starts, and hangs only if it loads for too long.
        * None in time: a failure, but while a request is in flight it says nothing: many engines work on one request
          at a time.

        After a sign of life, the engine hangs once there was none for `hang_seconds`.

        Args:
            answer: healthy, not healthy, or None if there was none in time.
            now: the time of the answer.
            progress: the number of answers to requests and of their tokens so far; a changed one is a sign of life.
            in_flight: a request is in flight.
        """
        # 1. Failures in a row decide whether it is healthy.
        is_conclusive = answer is not None or not in_flight  # beside a request, silence says nothing
        if is_conclusive:
            self._failures = 0 if answer else self._failures + 1

        # 2. The last sign of life; None while it starts.
        has_progress = progress != self._progress
        self._progress = progress
        if answer is False:
            self._last_sign_of_life = None  # it starts, for the first time or again
        elif self._last_sign_of_life is None:
            if answer:  # the first healthy answer after a start
                self._last_sign_of_life = now
        elif has_progress or (answer and not self._has_pulse):  # with a pulse, to be healthy is not enough
            self._last_sign_of_life = now

        # 3. It hangs after a long silence, or a long start.
        if self._last_sign_of_life is not None:
            self._loading_began = None
            self.hangs = now - self._last_sign_of_life >= self._hang_seconds
        else:
            self.hangs = self._loads_too_long(now, has_progress=has_progress)

    def _loads_too_long(self, now: float, *, has_progress: bool) -> bool:
        """Decide whether an engine that is not healthy since its start hangs: it loads for longer than it may.

        Its time to load begins with the first call, and anew with each progress, since one that answers requests does
        not hang. An engine that is overdue counts as hanging for `REPORT_SECONDS`, in which the kubelet restarts it;
        then its time begins anew, because the restart itself is not visible here.
        """
        if self._loading_began is None or has_progress:
            self._loading_began = now
        overdue_seconds = now - self._loading_began - self._loading_seconds
        if overdue_seconds >= REPORT_SECONDS:
            self._loading_began = now
        return 0 <= overdue_seconds < REPORT_SECONDS  # from REPORT_SECONDS on, it may have been restarted


async def ask_health(port: int, path: str, timeout_seconds: float = HEALTH_SECONDS) -> bool | None:
    """Return whether the engine at a port of this pod is healthy (status 200 to 399); None: no answer came in time."""
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(timeout_seconds):
            reader, writer = await asyncio.open_connection(_LOOPBACK, port)
            request = f"GET {path} HTTP/1.1\r\nHost: {_LOOPBACK}:{port}\r\nConnection: close\r\n\r\n"
            writer.write(request.encode())
            return bool(_STATUS_LINE.match(await reader.readline()))
    except TimeoutError:
        return None
    except (OSError, ValueError):  # refused, broken off, or a line without an end
        return False
    finally:
        if writer:
            writer.transport.abort()


class MountedToken:
    """The service's token in a file, and the one before, which clients may still have. Raises PodProxyError."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.previous: str | None = None
        """The token before this one; None: there was none."""
        self.previous_until = 0.0
        """The time until which it is valid, too, in seconds since 1970."""
        self.token = self._read()

    def reload(self) -> None:
        """Read the token again; one that is unreadable or invalid changes nothing."""
        try:
            token = self._read()
        except PodProxyError as error:
            log.warning("token_not_read", error=str(error))
            return
        if token != self.token:
            self.previous, self.previous_until = self.token, time.time() + OVERLAP_SECONDS
            self.token = token
            log.info("token_replaced")

    def _read(self) -> str:
        """Return the token in the file. Raises PodProxyError if it cannot be read, or is no token."""
        try:
            with self._path.open("rb") as file:
                text = file.read(_LONGEST_FILE_BYTES).decode("ascii", "replace").strip()
        except OSError as error:
            raise PodProxyError(f"cannot read --token-file {self._path}: {error.strerror}") from error
        if not _TOKEN.fullmatch(text):
            raise PodProxyError(
                f"--token-file {self._path} has no token: put 1 to 8192 printable characters without blanks there"
            )
        return text
