"""The identity of a caller, and what he may see: the API server reviews his token, and RBAC decides.

Answers are kept for seconds, by a digest of the token. What cannot be reviewed is refused: an API server that is down
opens nothing.
"""

import asyncio
import hashlib
import time
from collections.abc import Callable, Hashable, Iterable
from typing import Final, Generic, NamedTuple, TypeVar

import msgspec
import structlog

from console.density_snapshot import Visibility
from kube.client import Client, Obj
from kube.errors import ApiError, Unreachable
from kube.resources import INFERENCE_SERVICES, NODE_FITNESSES, SUBJECT_ACCESS_REVIEWS, TOKEN_REVIEWS, Resource

log = structlog.get_logger()

YES_SECONDS: Final = 30.0
"""Time for which a caller keeps what he was allowed, at most, after it was taken from him."""
NO_SECONDS: Final = 5.0
MOST_KEPT: Final = 4096
MOST_AT_ONCE: Final = 16
MOST_WAITING: Final = 256
"""Tokens that wait for their review; a flood of false tokens gets no further into the API server."""

T = TypeVar("T")


class ReviewFailedError(Exception):
    """The API server does not answer, or too much waits for it: nothing is known, so nothing is shown."""


class Caller(NamedTuple):
    """The user of a token."""

    username: str
    uid: str = ""
    groups: tuple[str, ...] = ()
    extra: tuple[tuple[str, tuple[str, ...]], ...] = ()


class AccessDemand(NamedTuple):
    """A right that RBAC may grant."""

    verb: str
    resource: Resource
    namespace: str = ""
    """Empty: in all namespaces, or of the whole cluster."""


SEE_NODES: Final = AccessDemand("list", NODE_FITNESSES)
"""The right to see nodes, hosts, and what fits there."""


class _UserInfo(msgspec.Struct, frozen=True):
    username: str = ""
    uid: str = ""
    groups: tuple[str, ...] = ()
    extra: dict[str, tuple[str, ...]] = {}


class _TokenStatus(msgspec.Struct, frozen=True):
    authenticated: bool = False
    user: _UserInfo = _UserInfo()


class _AccessStatus(msgspec.Struct, frozen=True):
    allowed: bool = False
    denied: bool = False


class _Kept(Generic[T]):
    """Answers for a time, of which the oldest are forgotten first."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._answers: dict[Hashable, tuple[float, T]] = {}

    def get(self, key: Hashable) -> tuple[T] | None:
        found = self._answers.get(key)
        return (found[1],) if found is not None and found[0] > self._clock() else None

    def put(self, key: Hashable, answer: T, seconds: float) -> None:
        self._answers.pop(key, None)
        while len(self._answers) >= MOST_KEPT:
            del self._answers[next(iter(self._answers))]
        self._answers[key] = self._clock() + seconds, answer


class AccessReviews:
    """The reviews of one API server.

    Args:
        client: the API server.
        clock: seconds that never go back.
    """

    def __init__(self, client: Client, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._callers = _Kept[Caller | None](clock)
        self._rights = _Kept[bool](clock)
        self._slots = asyncio.Semaphore(MOST_AT_ONCE)
        self._waiting = 0

    async def identify(self, token: str) -> Caller | None:
        """Return the user of a token; None: it is of nobody. Raises ReviewFailedError."""
        key = hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
        known = self._callers.get(key)
        if known is not None:
            return known[0]
        if self._waiting >= MOST_WAITING:
            raise ReviewFailedError("too many tokens are being reviewed: try again")
        self._waiting += 1
        try:
            answer = await self._review(TOKEN_REVIEWS, {"token": token})
        finally:
            self._waiting -= 1
        status = _read(answer, _TokenStatus)
        user = status.user
        caller = None
        if status.authenticated and user.username:
            caller = Caller(user.username, user.uid, user.groups, tuple(sorted(user.extra.items())))
        self._callers.put(key, caller, YES_SECONDS if caller is not None else NO_SECONDS)
        return caller

    async def allows(self, caller: Caller, demand: AccessDemand) -> bool:
        """Return whether a caller has a right. Raises ReviewFailedError."""
        key = (caller, demand)
        known = self._rights.get(key)
        if known is not None:
            return known[0]
        attributes = {
            "verb": demand.verb,
            "group": demand.resource.group,
            "resource": demand.resource.plural,
            "namespace": demand.namespace,
        }
        spec = {
            "user": caller.username,
            "uid": caller.uid,
            "groups": caller.groups,
            "extra": dict(caller.extra),
            "resourceAttributes": attributes,
        }
        status = _read(await self._review(SUBJECT_ACCESS_REVIEWS, spec), _AccessStatus)
        is_allowed = status.allowed and not status.denied
        self._rights.put(key, is_allowed, YES_SECONDS if is_allowed else NO_SECONDS)
        return is_allowed

    async def find_visible(self, caller: Caller, namespaces: Iterable[str]) -> Visibility:
        """Return the namespaces whose services a caller may list; None: all. Raises ReviewFailedError."""
        if await self.allows(caller, AccessDemand("list", INFERENCE_SERVICES)):
            return None
        asked = sorted(namespaces)
        answers = await asyncio.gather(
            *(self.allows(caller, AccessDemand("list", INFERENCE_SERVICES, each)) for each in asked)
        )
        return frozenset(each for each, is_allowed in zip(asked, answers, strict=True) if is_allowed)

    async def _review(self, resource: Resource, spec: Obj) -> Obj:
        try:
            async with self._slots:
                return await self._client.review(resource, spec)
        except (ApiError, Unreachable) as error:
            # The message of a server could have the token in it.
            status = error.status if isinstance(error, ApiError) else None
            log.warning("review_failed", resource=str(resource), error=type(error).__name__, status=status)
            raise ReviewFailedError("the API server could not review the token: try again") from None


def _read(answer: Obj, kind: type[T]) -> T:
    try:
        return msgspec.convert(answer.get("status") or {}, kind)
    except msgspec.ValidationError:
        log.warning("review_not_read", kind=kind.__name__)
        raise ReviewFailedError("the API server answered a review with something else") from None
