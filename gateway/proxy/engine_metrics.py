"""The metrics of a pod: those of its proxy, and those of the engine behind it, which listens on loopback.

An engine may be broken or hostile: its answer is taken for a short time only, up to a size, uncompressed, and in
Prometheus' text format, and only names of its own are passed on. Without it, the series of the proxy are served alone.
A client may ask in a loop: the engine is not asked again for `REUSE_SECONDS`.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Final, NamedTuple
from urllib.parse import parse_qs

from gateway.event_log import log
from gateway.http.awaited_exchange import AwaitedExchange
from gateway.http.exchange import Exchange
from gateway.http.headers import Headers
from gateway.http.upstream_connection import UpstreamBrokeOffError
from gateway.http.upstream_pool import NotAcceptedError, UpstreamPool
from gateway.proxy import metrics
from gateway.proxy.exposition import MOST_LINES, filter_exposition
from gateway.proxy.service import Service
from runtimes.pod import EngineMetrics

SCRAPE_SECONDS: Final = 3.0
"""Time in which the engine's answer comes. Prometheus waits for ten seconds, if nothing else is configured."""
REUSE_SECONDS: Final = 2.0
"""Time for which the engine's answer, or its failure, is that of later scrapes, too. Prometheus scrapes every 15 to 60
seconds, seldom more often than every five."""
SEND_SECONDS: Final = 10.0
"""Time in which a client reads the answer."""
MOST_BYTES: Final = 1 << 20
"""The longest answer of an engine. vLLM's has about 60 KiB."""
MOST_ANSWERS: Final = 8
"""Answers with the series of the engine at once, which take up to 2 MiB each until their clients have read them."""
_PIECE_BYTES: Final = 64 << 10
_VERSIONS: Final = frozenset({b"version=0.0.4", b'version="0.0.4"'})
_REQUEST: Final = (
    b"GET %b HTTP/1.1\r\nHost: %b\r\nAccept: text/plain;version=0.0.4\r\nAccept-Encoding: identity\r\n"
    b"Connection: close\r\n\r\n"
)


class EngineSeries(NamedTuple):
    """The series of an engine."""

    text: bytes
    problem: str
    """The reason why they are not there, or not all of them; empty if they are."""


_TOO_MANY: Final = EngineSeries(b"", f"{MOST_ANSWERS} scrapes are answered already")


class EngineScraper:
    """Reads the metrics of an engine; scrapes at the same time, and soon afterwards, share one reading."""

    def __init__(
        self,
        pool: UpstreamPool,
        service: str,
        url: str,
        engine: EngineMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.service = service

        # The way to the engine: the bytes of a GET of its metrics, and the prefixes of the names that these may have.
        self._pool = pool
        self._url = url
        self._request = _REQUEST % (engine.path.encode(), url.removeprefix("http://").encode())
        self._prefixes = tuple(prefix.encode() for prefix in engine.prefixes)
        self._clock = clock

        # The reading in progress or the last one, which scrapes share; None: there was none.
        self._reading: asyncio.Task[EngineSeries] | None = None
        self._read_at = 0.0  # the end of the last reading, by the clock
        # The problem of the last reading, empty if there was none; of several in a row only the first was logged.
        self._problem = ""

    async def scrape(self) -> EngineSeries:
        """Return the series of the engine, at most `REUSE_SECONDS` old."""
        if self._reading is None or (self._reading.done() and self._clock() - self._read_at >= REUSE_SECONDS):
            self._reading = asyncio.get_running_loop().create_task(self._read_series())
        # Shielded, because other scrapes may wait for it: a client that hangs up ends only its own wait.
        return await asyncio.shield(self._reading)

    async def _read_series(self) -> EngineSeries:
        """Read the engine's metrics; return the valid lines, and the problem with them if there is one.

        A problem is logged when it begins and when it ends.
        """
        answer = await self._read_answer()
        self._read_at = self._clock()
        problem = answer.problem
        filtered = await filter_exposition(bytes(answer.body), self._prefixes, is_whole=not problem)
        if not problem and not filtered.is_whole:
            problem = f"its answer has more than {MOST_LINES} lines, and is cut"
        elif not problem and not filtered.text:
            problem = "its answer has no series"
        self._log_change(problem)
        return EngineSeries(filtered.text, problem)

    async def _read_answer(self) -> "_AnswerReader":
        """Ask the engine; return the part of its answer that can be used, with the problem if there was one."""
        answer = _AnswerReader()  # the receiver of the answer, which keeps its body and its first problem
        try:
            async with asyncio.timeout(SCRAPE_SECONDS):
                connection = await self._pool.connect(self._url)
                try:
                    connection.send(self._request, (), answer)  # without a body
                    await answer.wait()
                finally:
                    # A problem of the answer, the time-out or a cancellation may have ended the wait.
                    if not answer.has_connection_ended:
                        connection.abort()
        except NotAcceptedError as error:
            answer.refuse(str(error))
        except TimeoutError:
            answer.refuse(f"its answer did not come within {SCRAPE_SECONDS:g} s")
        return answer

    def _log_change(self, problem: str) -> None:
        """Log a problem when it begins and when it ends, not at each scrape."""
        if problem and not self._problem:
            log.warning("engine_metrics_failed", service=self.service, error=problem)
        elif self._problem and not problem:
            log.info("engine_metrics_regained", service=self.service)
        self._problem = problem


class _AnswerReader:
    """Takes the engine's answer, up to the limit. What comes after the first problem is dropped."""

    def __init__(self) -> None:
        self.body = bytearray()
        self.problem = ""
        self.has_connection_ended = False
        """The connection has ended the response by itself."""
        self._is_settled = asyncio.Event()
        """Set at the end of the answer, or at its first problem."""

    async def wait(self) -> None:
        """Wait for the end of the answer, or for its first problem."""
        await self._is_settled.wait()

    def refuse(self, problem: str) -> None:
        """Drop the answer because of `problem`, and end the wait for it, unless it has ended already."""
        if not self._is_settled.is_set():
            self.problem = problem
            self.body.clear()
            self._is_settled.set()

    # Called by the connection

    def take_head(self, status: int, headers: Headers, piece: bytes) -> None:
        """Take the head, and refuse what is no text of Prometheus."""
        if problem := _find_problem(status, headers):
            self.refuse(problem)
        else:
            self.take_response(piece)

    def take_response(self, piece: bytes) -> None:
        """Take a piece of the body."""
        if self._is_settled.is_set():
            return
        room = MOST_BYTES - len(self.body)
        self.body += piece[:room]
        if len(piece) > room:
            self.problem = f"its answer is larger than {MOST_BYTES >> 20} MiB, and is cut"
            self._is_settled.set()

    def end_response(self) -> None:
        """Note the end of the answer."""
        self.has_connection_ended = True
        self._is_settled.set()

    def fail_response(self, error: UpstreamBrokeOffError) -> None:
        """Note that the engine broke off."""
        self.has_connection_ended = True
        self.refuse(str(error))


def _find_problem(status: int, headers: Headers) -> str:
    """Return the reason why an answer is not read, which quotes nothing of it; empty if there is none."""
    if status != HTTPStatus.OK:
        return f"it answered {status}"
    codings = [*headers.values(b"content-encoding"), *headers.values(b"transfer-encoding")]
    if any(coding.strip().lower() not in {b"identity", b"chunked"} for coding in codings):
        return "its answer is compressed"
    media_type, *parameters = (part.strip().lower() for part in (headers.value(b"content-type") or b"").split(b";"))
    versions = {parameter for parameter in parameters if parameter.startswith(b"version")}
    if media_type != b"text/plain" or not versions.issubset(_VERSIONS):
        return "its answer is not text/plain of version 0.0.4"
    return ""


class PodReports:
    """The state of a pod that its proxy reports; without a scraper, its engine has no metrics."""

    def __init__(
        self, services: Mapping[str, Service], scraper: EngineScraper | None, engine_hangs: Callable[[], bool]
    ) -> None:
        self.engine_hangs = engine_hangs
        """Tells whether only a restart helps the engine: the kubelet's liveness probe gets 503 then."""
        self._services = services
        self._scraper = scraper
        """Reads the engine's own metrics; None: the engine has none."""
        self._running_answers = 0
        """The answers with the engine's metrics that are not yet sent."""

    def begin_metrics(self, exchange: Exchange) -> AwaitedExchange | None:
        """Answer GET /metrics, or begin to; with the query `engine=false` by the proxy's series only."""
        if self._scraper and parse_qs(exchange.head.query).get("engine") != ["false"]:
            scraper = self._scraper
            return AwaitedExchange(exchange, lambda awaited: self._answer(awaited, scraper))
        exchange.respond(HTTPStatus.OK, metrics.FIELDS, metrics.render_metrics(self._services))
        return None

    async def _answer(self, awaited: AwaitedExchange, scraper: EngineScraper) -> None:
        """Send the series of the proxy and of the engine; a client that does not read them in time is cut off.

        With too many such answers at once, the engine's series are left out, to bound the memory.
        """
        self._running_answers += 1
        try:
            # 1. Render. `_TOO_MANY` has no series, only a problem; with a problem, the gauge `engine_up` is 0.
            engine = await scraper.scrape() if self._running_answers <= MOST_ANSWERS else _TOO_MANY
            engine_up = metrics.render_engine_up(scraper.service, is_up=not engine.problem)
            text = metrics.render_metrics(self._services) + engine_up + engine.text

            # 2. Send it in pieces, as fast as the client reads.
            awaited.exchange.start(HTTPStatus.OK, metrics.FIELDS)
            async with asyncio.timeout(SEND_SECONDS):
                for begin in range(0, len(text), _PIECE_BYTES):
                    awaited.exchange.write(text[begin : begin + _PIECE_BYTES])
                    await awaited.drain()
            awaited.exchange.finish()
        except TimeoutError:
            log.info("metrics_not_read", service=scraper.service, seconds=SEND_SECONDS)
        finally:
            self._running_answers -= 1
