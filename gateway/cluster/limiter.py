"""Admits requests within the limits of their scopes, counted in the memory of this replica.

Of several replicas without a common store, each has its share of every limit: the limit divided by their number. What
it has used is kept as a part of its share, so that a change of the number needs no more than the new number; a replica
that starts brings an unused share. A request of more tokens than a share is admitted when the share is unused, and the
next ones wait the longer. So together they hold every limit over time, and exceed it for a moment at most by one
request per replica.
"""

import math
import time
from collections.abc import Callable, Sequence
from typing import Final

from gateway.cluster.rate_headers import render_rate_headers
from gateway.cluster.rate_limits import (
    TOKENS,
    LimitScope,
    RateLimits,
    ReachedLimit,
    find_reached_limit,
    find_smaller_limit,
)
from gateway.proxy import errors
from gateway.proxy.errors import RequestError
from gateway.proxy.upstream_request import MOST_RETRY_SECONDS

_MEAN_SHIFT: Final = 3
"""An ended request counts as 1 / 2^3 in the mean time of requests."""


class AdmittedRequest:
    """A request that its scopes have admitted. It holds its place among the concurrent ones until it is settled.

    Args:
        limiter: the limiter that settles it.
        scopes: the scopes.
        tokens: the tokens that are reserved.
        began_us: the time.
        costs: for each scope, the time that the request and its tokens take; 0: no limit.
        marks: for each scope, the mark by which its tokens are settled.
        charged_at_us: the time by the clock of the marks, which is a store's, or this replica's.
        session: the session with that store; 0: none.
    """

    __slots__ = (
        "_is_settled",
        "_limiter",
        "began_us",
        "charged_at_us",
        "costs",
        "marks",
        "scopes",
        "session",
        "tokens",
    )

    def __init__(
        self,
        limiter: "Limiter",
        scopes: Sequence[LimitScope],
        tokens: int,
        *,
        began_us: int,
        costs: Sequence[tuple[int, int]],
        marks: Sequence[int],
        charged_at_us: int,
        session: int = 0,
    ) -> None:
        self._limiter = limiter
        self.scopes = scopes
        self.tokens = tokens
        self.began_us = began_us
        self.costs = costs
        self.marks = marks
        self.charged_at_us = charged_at_us
        self.session = session
        self._is_settled = False
        for scope in scopes:
            scope.running += 1

    def settle(self, used_tokens: int | None) -> None:
        """Replace the reservation by the tokens of prompt and answer, and free the request's place.

        Only the first call counts. None: the usage is unknown, so the reservation stays; 0: the request was not served.
        """
        if not self._is_settled:
            self._is_settled = True
            self._limiter.settle(self, self.tokens if used_tokens is None else used_tokens)

    def headers(self, route: str) -> dict[str, str]:
        """Return the header fields about what its limits still admit now, in the form of the path named `route`."""
        return self._limiter.headers(self.scopes, route)


class Limiter:
    """The limits of this replica.

    Args:
        clock: a monotonic time in nanoseconds.
        wall_clock: seconds since 1970, for headers only.
    """

    def __init__(
        self, clock: Callable[[], int] = time.monotonic_ns, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self.replicas = 1
        """The number of replicas that live, this one included; it may change at any time."""
        self._clock = clock
        self._wall_clock = wall_clock
        self._scopes: dict[str, LimitScope] = {}

    def find_scope(self, scope_id: str, path: str, limits: RateLimits) -> LimitScope:
        """Return the scope with that id, with these limits from now on; it is kept until `forget_scope`.

        `LimitScope` says what the parameters are.
        """
        scope = self._scopes.get(scope_id)
        if scope is None:
            scope = self._scopes[scope_id] = LimitScope(scope_id, path, limits)
        scope.path, scope.limits = path, limits
        return scope

    def forget_scope(self, scope_id: str) -> None:
        """Forget a scope, if there is one with that id; requests that it has admitted are settled all the same."""
        self._scopes.pop(scope_id, None)

    def admit_at_once(self, scopes: Sequence[LimitScope], tokens: int, route: str) -> AdmittedRequest | None:
        """Admit a request as `admit` does; None: that one has to be awaited. Raises RequestError."""
        self.refuse_oversized(scopes, tokens)
        return self.admit_by_share(scopes, tokens, route)

    async def admit(self, scopes: Sequence[LimitScope], tokens: int, route: str) -> AdmittedRequest:
        """Admit a request, and reserve its tokens.

        Args:
            scopes: its key, and its namespace; each one must admit it, or it is charged to none.
            tokens: the most that it may use; 0: none are counted.
            route: the name of its path, for the headers of an error.

        Raises RequestError: 429 if it has to wait, 400 if it would do so for ever, 503 if its limits cannot be counted.
        """
        self.refuse_oversized(scopes, tokens)
        return self.admit_by_share(scopes, tokens, route)

    def admit_by_share(self, scopes: Sequence[LimitScope], tokens: int, route: str) -> AdmittedRequest:
        """Admit a request by this replica's shares. Raises RequestError."""
        now_us, replicas = self._clock() // 1000, self.replicas
        costs = [scope.costs_us(tokens, replicas) for scope in scopes]
        if reached := find_reached_limit(scopes, costs, now_us, replicas):
            raise self.build_refusal(reached, scopes, route)
        marks = []
        for scope, (request_us, tokens_us) in zip(scopes, costs, strict=True):
            if request_us:
                scope.requests.charge(now_us, request_us)
            marks.append(scope.tokens.charge(now_us, tokens_us) if tokens_us else 0)
        return AdmittedRequest(self, scopes, tokens, began_us=now_us, costs=costs, marks=marks, charged_at_us=now_us)

    def settle(self, request: AdmittedRequest, used_tokens: int) -> None:
        """Settle an admitted request, once."""
        now_us = self._clock() // 1000
        for scope, *times in self.end_request(request, used_tokens, now_us):
            scope.tokens.settle(now_us, *times)

    def headers(self, scopes: Sequence[LimitScope], route: str) -> dict[str, str]:
        """Return the header fields about what these scopes still admit."""
        return render_rate_headers(scopes, route, self._clock() // 1000, self._wall_clock)

    @staticmethod
    def refuse_oversized(scopes: Sequence[LimitScope], tokens: int) -> None:
        """Raise RequestError if the request is larger than a limit."""
        if scope := find_smaller_limit(scopes, tokens):
            raise errors.request_over_limit(scope.name_limit(TOKENS), tokens)

    @staticmethod
    def end_request(request: AdmittedRequest, used_tokens: int, now_us: int) -> list[tuple[LimitScope, int, int, int]]:
        """Free the request's places; return each scope to settle, with the times that `Meter.settle` takes."""
        for scope in request.scopes:
            scope.running -= 1
            scope.mean_us += (now_us - request.began_us - scope.mean_us) >> _MEAN_SHIFT
        tokens = request.tokens
        if used_tokens == tokens or not tokens:
            return []
        began_us, parts = request.charged_at_us, zip(request.scopes, request.marks, request.costs, strict=True)
        return [
            (scope, mark, began_us + cost, cost - cost * used_tokens // tokens)
            for scope, mark, (_, cost) in parts
            if cost
        ]

    def build_refusal(self, reached: ReachedLimit, scopes: Sequence[LimitScope], route: str) -> RequestError:
        """Return the error for a request that has to wait."""
        retry_seconds = min(max(math.ceil(reached.wait_us / 1e6), 1), MOST_RETRY_SECONDS)
        limit = reached.scope.name_limit(reached.kind)
        return errors.rate_limit_exceeded(limit, retry_seconds, self.headers(scopes, route))
