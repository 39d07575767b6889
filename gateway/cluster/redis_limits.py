"""Admits requests within limits that all replicas of the gateway count together, in Redis or Valkey.

One task makes one call at a time; what comes meanwhile goes with the next one. So a call serves hundreds of requests
when there are many, and as each batch has a number, one whose reply was lost is sent again and counted once. A scope's
running requests are told as a number and not as a change, and count for as long as their replica renews its lease: a
replica that dies frees its places.

After two calls that the store does not answer in time, no request waits for it: this task alone goes on asking.
Meanwhile limits of tokens refuse, and the others are counted as by replicas without a store. When it is back, it is
told what was counted here, and takes it if it is more than it knows itself; so it learns again what it has lost with
its data, too.
"""

import asyncio
import hashlib
import random
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError

from gateway.cluster.limiter import AdmittedRequest, Limiter
from gateway.cluster.rate_limits import REQUESTS, RUNNING, TOKENS, LimitScope, RateLimits, ReachedLimit
from gateway.event_log import log
from gateway.proxy import errors
from gateway.proxy.errors import RequestError

CALL_SECONDS: Final = 0.25
"""The longest time of a call to the store; a request waits for three of them at most, with the one before its own."""
RETRY_SECONDS: Final = 10
"""Clients wait for it while the store is away: two or three tries are longer than a restart takes."""
_RENEW_SECONDS: Final = 10.0
_LEASE_US: Final = 30_000_000
"""The time after which the running requests of a silent replica do not count any more."""
_PAUSE_SECONDS: Final = (0.25, 1.0)
"""Between two calls to a store that does not answer; at random, so that replicas do not call together."""
_MOST_REQUESTS: Final = 256
_MOST_SCOPES: Final = 500
"""The most in a batch that is told or settled: the store serves nothing else meanwhile."""
_SCRIPT: Final = Path(__file__).with_name("count_limits.lua").read_bytes()
_SCRIPT_SHA: Final = hashlib.sha1(_SCRIPT, usedforsecurity=False).hexdigest()


class _Reply(NamedTuple):
    """The answer to a batch, as the script describes it, by the clock of the store."""

    now_us: int
    backlogs: list[tuple[int, int]]
    answers: list[list[int]]


_encode = msgspec.msgpack.Encoder().encode
_decode_reply = msgspec.msgpack.Decoder(_Reply).decode


class _WaitingRequest(NamedTuple):
    scopes: Sequence[LimitScope]
    tokens: int
    route: str
    costs: list[tuple[int, int]]
    answer: "asyncio.Future[AdmittedRequest]"


class _Settlement(NamedTuple):
    """The settlement of a request in one scope, or of its tokens; `Meter.settle` says what the times are."""

    scope: LimitScope
    kind: int
    mark_us: int
    earliest_us: int
    unused_us: int


class _Batch(NamedTuple):
    scopes: list[LimitScope]
    settlements: list[_Settlement]
    waiting: list[_WaitingRequest]
    arguments: tuple[str | bytes, ...]
    """Keys and values of the script."""


def connect_store(url: str) -> Redis:
    """Return a client of the store at a URL such as redis://:PASSWORD@HOST:6379/0, or rediss:// for TLS.

    Raises ValueError if it is none.
    """
    # Times and retries are those of `RedisLimiter`. All versions speak RESP 2.
    retry = Retry(NoBackoff(), 0)
    return Redis.from_url(url, protocol=2, retry=retry, socket_connect_timeout=None, socket_timeout=None)


class RedisLimiter(Limiter):
    """The limits of all replicas; `run` is a task of the process.

    Args:
        store: client of the store.
        clock: a monotonic time in nanoseconds.
        wall_clock: seconds since 1970, for headers only.
        call_seconds: the longest time of a call.
    """

    def __init__(
        self,
        store: Redis,
        clock: Callable[[], int] = time.monotonic_ns,
        wall_clock: Callable[[], float] = time.time,
        call_seconds: float = CALL_SECONDS,
    ) -> None:
        super().__init__(clock, wall_clock)
        self.is_away = False
        """True if the store did not answer the last two calls."""
        self._store = store
        self._call_seconds = call_seconds
        self._wake = asyncio.Event()
        self._wake.set()  # the first call shows whether the store is there
        self._batch: _Batch | None = None
        """The batch that is sent, again and again until it is answered."""
        self._waiting: deque[_WaitingRequest] = deque()
        self._settlements: list[_Settlement] = []
        self._untold: dict[LimitScope, None] = {}
        """Scopes of whose running requests the store has to be told, in order."""
        self._outage = 1
        """The number of this outage, or of the last one."""
        self._session = 1
        """The number of times that the store began to count for this replica."""
        self._is_first_batch = True
        """The next batch is the first one of the session."""
        self._replica = secrets.token_hex(8)
        self._batch_number = 0

    def find_scope(self, scope_id: str, path: str, limits: RateLimits) -> LimitScope:
        """Return the scope, as `Limiter.find_scope` says; the store learns which requests run under new limits."""
        former = self._scopes.get(scope_id)
        is_changed = former is not None and former.limits != limits
        scope = super().find_scope(scope_id, path, limits)
        if is_changed:
            self._untold[scope] = None
            self._wake.set()
        return scope

    # The requests

    def admit_at_once(self, scopes: Sequence[LimitScope], tokens: int, route: str) -> AdmittedRequest | None:
        """Admit a request as `admit` does, if the store is away, or not needed. Raises RequestError."""
        self.refuse_oversized(scopes, tokens)
        if self.is_away:
            return self._admit_without_store(scopes, tokens, route)
        has_limits = any(scope.limits != RateLimits() for scope in scopes)
        return None if has_limits else self.admit_by_share(scopes, tokens, route)

    async def admit(self, scopes: Sequence[LimitScope], tokens: int, route: str) -> AdmittedRequest:
        """Admit a request, and reserve its tokens, as `Limiter.admit` says. Raises RequestError."""
        if request := self.admit_at_once(scopes, tokens, route):
            return request
        answer: asyncio.Future[AdmittedRequest] = asyncio.get_running_loop().create_future()
        costs = [scope.costs_us(tokens, replicas=1) for scope in scopes]
        self._waiting.append(_WaitingRequest(scopes, tokens, route, costs, answer))
        self._wake.set()
        try:
            return await answer
        except asyncio.CancelledError:
            if not answer.cancelled() and not answer.exception():
                answer.result().settle(0)  # it was admitted in the same pass of the loop
            raise

    def settle(self, request: AdmittedRequest, used_tokens: int) -> None:
        """Settle an admitted request, once; the store learns of it with the next call."""
        for scope, mark_us, earliest_us, unused_us in self.end_request(request, used_tokens, self._clock() // 1000):
            if unused_us < 0 or request.session == self._session:
                self._settlements.append(_Settlement(scope, TOKENS, mark_us, earliest_us, unused_us))
                self._wake.set()
        for scope in request.scopes:
            if scope.limits.concurrent_requests is not None:
                self._untold[scope] = None
                self._wake.set()

    def _admit_without_store(self, scopes: Sequence[LimitScope], tokens: int, route: str) -> AdmittedRequest:
        """Admit a request by this replica's shares; one whose tokens have a limit is refused. Raises RequestError."""
        for scope in scopes:
            if tokens and scope.limits.tokens_per_minute is not None:
                raise errors.limits_unavailable(scope.name_limit(TOKENS), RETRY_SECONDS)
        return self.admit_by_share(scopes, tokens, route)

    # The calls

    async def run(self) -> None:
        """Make the calls, for ever: one at a time, and one every `_RENEW_SECONDS` at least."""
        failures = 0
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_RENEW_SECONDS):
                    await self._wake.wait()
            self._wake.clear()
            batch = self._batch = self._batch or self._take_batch()  # counts are bounded, so that it can be encoded
            try:
                async with asyncio.timeout(self._call_seconds):
                    content = await self._call(batch)
                reply = _decode_reply(content) if content else None
            except (RedisError, OSError, TimeoutError, msgspec.MsgspecError) as error:
                failures += 1
                with suppress(RedisError, OSError):  # a late reply must not be taken for the next one
                    async with asyncio.timeout(self._call_seconds):
                        await self._store.connection_pool.disconnect()
                if failures > 1:  # the first one may be that of a connection, or of a busy moment
                    self._lose_store(batch, error)
                    await asyncio.sleep(random.uniform(*_PAUSE_SECONDS))  # noqa: S311 - no secret
                self._wake.set()
                continue
            self._batch, failures = None, 0
            if self.is_away:
                self.is_away = False
                log.info("limits_store_back")
                self._tell_all_scopes()
            if reply:
                self._take_reply(batch, reply)
            else:
                self._recover_lost_data(batch)
            if self._waiting or self._settlements or self._untold:
                self._wake.set()

    async def _call(self, batch: _Batch) -> bytes:
        """Run the script. Raises RedisError or OSError."""
        keys = len(batch.scopes) + 2
        try:
            reply: bytes = await self._store.evalsha(_SCRIPT_SHA, keys, *batch.arguments)
        except NoScriptError:
            reply = await self._store.eval(_SCRIPT.decode(), keys, *batch.arguments)
        return reply

    def _take_batch(self) -> _Batch:
        """Return what is to be told, settled and admitted."""
        numbers: dict[LimitScope, int] = {}

        def number(scope: LimitScope) -> int:
            return numbers.setdefault(scope, len(numbers) + 1)  # as Lua counts

        for scope in list(self._untold)[:_MOST_SCOPES]:
            number(scope)
            del self._untold[scope]
        settlements, self._settlements = self._settlements[:_MOST_SCOPES], self._settlements[_MOST_SCOPES:]
        taken = [self._waiting.popleft() for _ in range(min(len(self._waiting), _MOST_REQUESTS))]
        waiting = [request for request in taken if not request.answer.done()]
        self._batch_number += 1
        content = {
            "number": self._batch_number,
            "is_first": self._is_first_batch,
            "lease_us": _LEASE_US,
            "settlements": [(number(scope), *times) for scope, *times in settlements],
            "requests": [
                [
                    (number(scope), *costs, scope.limits.concurrent_requests or 0)
                    for scope, costs in zip(request.scopes, request.costs, strict=True)
                ]
                for request in waiting
            ],
            "scopes": [self._read_state(scope) for scope in numbers],
        }
        self._is_first_batch = False
        keys = ("replicas", f"replica:{self._replica}", *(f"scope:{scope.scope_id}" for scope in numbers))
        prefixed = (f"pomona:limits:{key}" for key in keys)
        return _Batch(list(numbers), settlements, waiting, (*prefixed, self._replica, _encode(content)))

    def _read_state(self, scope: LimitScope) -> tuple[int, int, int]:
        """Return a scope's running requests, and its backlogs as far as the store may not know them; 0: it does."""
        now_us = self._clock() // 1000
        has_told_requests, scope.told_outage = scope.told_outage == self._outage, self._outage
        has_told_tokens, scope.told_session = scope.told_session == self._session, self._session
        return (
            0 if scope.limits.concurrent_requests is None else scope.running,
            0 if has_told_requests else scope.requests.backlog_us(now_us),
            0 if has_told_tokens else scope.tokens.backlog_us(now_us),
        )

    def _take_reply(self, batch: _Batch, reply: _Reply) -> None:
        """Take over the store's backlogs, and answer the requests; take those back that were answered before."""
        now_us = self._clock() // 1000
        for scope, (requests_us, tokens_us) in zip(batch.scopes, reply.backlogs, strict=True):
            scope.tokens.ends_at_us = now_us + tokens_us
            if scope.told_outage == self._outage:  # else more was counted here since the batch was made
                scope.requests.ends_at_us = now_us + requests_us
        for request, (wait_us, *values) in zip(batch.waiting, reply.answers, strict=True):
            if wait_us and not request.answer.done():
                scope, kind = request.scopes[values[0] - 1], values[1] - 1  # as Lua counts
                place_us = scope.mean_us // (scope.limits.concurrent_requests or 1)
                reached = ReachedLimit(scope, kind, place_us if kind == RUNNING else wait_us)
                request.answer.set_exception(self.build_refusal(reached, request.scopes, request.route))
            elif not wait_us:
                self._take_admission(request, values[::2], values[1::2], reply.now_us)

    def _take_admission(
        self, request: _WaitingRequest, request_marks: Sequence[int], token_marks: Sequence[int], store_us: int
    ) -> None:
        """Answer a request that was admitted, or take it back if it was answered before."""
        admitted = AdmittedRequest(
            self,
            request.scopes,
            request.tokens,
            began_us=self._clock() // 1000,
            costs=request.costs,
            marks=token_marks,
            charged_at_us=store_us,
            session=self._session,
        )
        if not request.answer.done():
            request.answer.set_result(admitted)
            return
        admitted.settle(0)
        for scope, mark_us, (cost_us, _) in zip(request.scopes, request_marks, request.costs, strict=True):
            self._settlements.append(_Settlement(scope, REQUESTS, mark_us, store_us + cost_us, cost_us))

    # The outages

    def _lose_store(self, batch: _Batch, error: Exception) -> None:
        """Answer all that wait, without the store."""
        if not self.is_away:
            self.is_away = True
            self._outage += 1
            log.warning("limits_store_away", error=str(error) or type(error).__name__)
        for request in (*batch.waiting, *self._waiting):
            if not request.answer.done():
                try:
                    admitted = self._admit_without_store(request.scopes, request.tokens, request.route)
                    request.answer.set_result(admitted)
                except RequestError as refusal:
                    request.answer.set_exception(refusal)
        self._waiting.clear()

    def _recover_lost_data(self, batch: _Batch) -> None:
        """Begin a session with a store that has lost data: what this replica knows is told, debts are not forgotten.

        Marks of the session before mean nothing any more: what was reserved in it is not given back.
        """
        log.warning("limits_store_lost_data")
        self._waiting.extendleft(reversed(batch.waiting))
        settlements = (*batch.settlements, *self._settlements)
        self._settlements = [settlement for settlement in settlements if settlement.unused_us < 0]
        self._session += 1
        self._outage += 1
        self._is_first_batch = True
        self._tell_all_scopes()

    def _tell_all_scopes(self) -> None:
        """Note all scopes that are used, so that the store is told of them."""
        now_us = self._clock() // 1000
        for scope in list(self._scopes.values()):
            if scope.running or scope.requests.backlog_us(now_us) or scope.tokens.backlog_us(now_us):
                self._untold[scope] = None
