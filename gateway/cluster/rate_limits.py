"""The arithmetic of rate limits (GCRA: one time per limit, no windows), and the check of a request against its scopes.

A limit of N a minute is a queue of work that drains in real time, where a request, or a token, takes a minute / N. A
request is admitted if all work would then be done within a minute from now. So the promise is: of what is admitted in
any window of w seconds, at most N * (1 + w / 60) counts, which is N at once after an idle minute, and N a minute over
time. Times are whole microseconds; a fraction is cut off, so that each request may count one of them too little.

Tokens are reserved before a request runs, because nothing else holds against parallel requests, and settled by its
real usage. A reservation is given back as far as its time still lies ahead: time that is over is not lent again, or
long requests would save up bursts. Usage beyond the reservation is a debt, which later requests wait for.

As the state is a time, it says which part of the limit is used, whatever the limit is. So it stays right when the limit
changes, or the number of replicas that share it.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

MINUTE_US: Final = 60_000_000
REQUESTS, TOKENS, RUNNING = range(3)
"""Places of the limits in `RateLimits`."""
LIMIT_FIELDS: Final = ("requestsPerMinute", "tokensPerMinute", "concurrentRequests")
"""Names of the limits in objects."""


class RateLimits(NamedTuple):
    """The limits of a key, or of a namespace over all its keys; None: there is none. Each is at least 1."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None


class Meter:
    """The work that was admitted under one limit."""

    __slots__ = ("ends_at_us", "given_back_us")

    def __init__(self) -> None:
        self.ends_at_us = 0
        """The time at which all work is done."""
        self.given_back_us = 0
        """All the time that was ever given back."""

    def backlog_us(self, now_us: int) -> int:
        """Return the time that the work still takes; a minute: the limit is used up."""
        return max(self.ends_at_us - now_us, 0)

    def wait_us(self, now_us: int, cost_us: int) -> int:
        """Return the time until work of `cost_us` is admitted; 0: now. Without backlog, work of any size is."""
        backlog_us = self.ends_at_us - now_us
        if backlog_us <= 0:
            return 0
        return max(backlog_us + min(cost_us, MINUTE_US) - MINUTE_US, 0)

    def charge(self, now_us: int, cost_us: int) -> int:
        """Add work, and return its mark, by which it is settled."""
        self.ends_at_us = max(self.ends_at_us, now_us) + cost_us
        return self.ends_at_us + self.given_back_us

    def settle(self, now_us: int, mark_us: int, earliest_us: int, unused_us: int) -> None:
        """Give back the unused time of the work with that mark, as far as it lies ahead; add a debt if it is negative.

        The work ends at its mark less what was given back before it in the queue, which is not known but no more than
        all; and not before `earliest_us`, as if nothing had been before it. All work behind it moves ahead, but not
        before now, so that no work is done before it was admitted: the promise holds for used tokens, too.
        """
        if unused_us < 0:
            self.charge(now_us, -unused_us)
            return
        end_us = max(mark_us - self.given_back_us, earliest_us)
        ahead_us = min(max(end_us - now_us, 0), unused_us)
        self.ends_at_us -= ahead_us
        self.given_back_us += ahead_us


class LimitScope:
    """A key, or a namespace with all its keys: its limits, which may be replaced, and what is used of them.

    Args:
        scope_id: name that is the same in all replicas and was never that of another object, such as a uid.
        path: the object and the place of its limits, for messages: "GatewayKey team-a/ci: spec".
        limits: its limits.
    """

    __slots__ = (
        *("limits", "mean_us", "path", "requests", "running", "scope_id", "tokens"),
        *("told_outage", "told_session"),
    )

    def __init__(self, scope_id: str, path: str, limits: RateLimits) -> None:
        self.scope_id = scope_id
        self.path = path
        self.limits = limits
        self.requests = Meter()
        self.tokens = Meter()
        self.running = 0
        """Requests of this replica that are not settled."""
        self.mean_us = 0
        """The mean time of a request, the latest ones counting most."""
        self.told_outage = self.told_session = 0
        """The outage, and the session, since which a store knows this replica's state."""

    def costs_us(self, tokens: int, replicas: int) -> tuple[int, int]:
        """Return the time of a request and of its tokens, in this replica's share of the limits; 0: no limit."""
        request_limit, token_limit, _ = self.limits
        scaled = MINUTE_US * replicas
        return (
            0 if request_limit is None else scaled // request_limit,
            0 if token_limit is None else scaled * tokens // token_limit,
        )

    def name_limit(self, kind: int) -> str:
        """Return the object, the field and the value of a limit."""
        return f"{self.path}.{LIMIT_FIELDS[kind]} {self.limits[kind]}"


class ReachedLimit(NamedTuple):
    """The limit that a request has to wait for, and for how long."""

    scope: LimitScope
    kind: int
    wait_us: int


def find_reached_limit(
    scopes: Sequence[LimitScope], costs: Sequence[tuple[int, int]], now_us: int, replicas: int
) -> ReachedLimit | None:
    """Return the limit that a request has to wait for longest; None: all scopes admit it. Nothing is charged.

    Args:
        scopes: scopes of the request.
        costs: time of the request and of its tokens, in each scope; without a cost it waits for nothing.
        now_us: the time.
        replicas: number of replicas, of which each has its share of every limit. A share of concurrent requests is
            rounded up, so that each replica serves a scope: together they exceed the limit by less than their number.
    """
    reached: ReachedLimit | None = None
    longest_us = 0
    for scope, (request_us, tokens_us) in zip(scopes, costs, strict=True):
        if request_us and (wait_us := scope.requests.wait_us(now_us, request_us)) > longest_us:
            reached, longest_us = ReachedLimit(scope, REQUESTS, wait_us), wait_us
        if tokens_us and (wait_us := scope.tokens.wait_us(now_us, tokens_us)) > longest_us:
            reached, longest_us = ReachedLimit(scope, TOKENS, wait_us), wait_us
        limit = scope.limits.concurrent_requests
        if limit is not None and scope.running >= -(-limit // replicas) and not reached:
            reached = ReachedLimit(scope, RUNNING, scope.mean_us // limit)
    return reached


def find_smaller_limit(scopes: Sequence[LimitScope], tokens: int) -> LimitScope | None:
    """Return the scope that has fewer tokens a minute than one request, which would wait for ever; None: no scope."""
    for scope in scopes:
        limit = scope.limits.tokens_per_minute
        if limit is not None and tokens > limit:
            return scope
    return None
