"""The identity of a caller, and what he may see: the API server reviews his token, and RBAC decides.

Answers are kept for seconds, by a digest of the token, and requests that wait for the same review share it. What cannot
be reviewed is refused: an API server that is down opens nothing.
"""

import asyncio
import hashlib
import time
import weakref
from collections.abc import Callable, Coroutine, Hashable, Iterable
from typing import Any, Final, Generic, NamedTuple, TypeVar

import msgspec
import structlog

from console.density_snapshot import Visibility
from kube.client import Client, Obj
from kube.errors import ApiError, Unreachable
from kube.resources import INFERENCE_SERVICES, NODE_FITNESSES, SUBJECT_ACCESS_REVIEWS, TOKEN_REVIEWS, Resource

log = structlog.get_logger()

YES_SECONDS: Final = 30.0
"""Longest time for which a right still counts after it was revoked."""
NO_SECONDS: Final = 5.0
MOST_KEPT: Final = 4096
MOST_RIGHTS: Final = 65_536
"""Rights that are kept: some users of a cluster with 1,000 namespaces."""
MOST_AT_ONCE: Final = 16
MOST_OF_USER: Final = 4
"""Reviews of the rights of one user at once, whatever his tokens: a namespace each, they would keep others waiting."""
MOST_OF_PEER: Final = 4
"""Tokens from one address that are reviewed at once: a flood of false ones waits for itself, and not others for it."""

T = TypeVar("T")


class ReviewFailedError(Exception):
    """The API server does not answer: nothing is known, so nothing is shown."""


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


class _CachedAnswer(NamedTuple, Generic[T]):
    expires_at: float
    answer: T


class _AnswerCache(Generic[T]):
    """A cache of answers with an expiry; when it is full, the oldest answer goes first."""

    def __init__(self, clock: Callable[[], float], most: int) -> None:
        self._clock = clock
        self._most = most
        self._answers: dict[Hashable, _CachedAnswer[T]] = {}

    def get(self, key: Hashable) -> _CachedAnswer[T] | None:
        """Return the cached answer, which may be None itself; None: it is not known, or has expired."""
        cached = self._answers.get(key)
        return cached if cached is not None and cached.expires_at > self._clock() else None

    def put(self, key: Hashable, answer: T, seconds: float) -> None:
        """Keep an answer for so many seconds, in place of the oldest one if the cache is full."""
        # A dict keeps the order of insertion: an answer is taken out first, so that its renewal makes it the newest
        # again.
        self._answers.pop(key, None)
        # _most: the number of answers that are kept
        while len(self._answers) >= self._most:
            del self._answers[next(iter(self._answers))]  # the oldest
        self._answers[key] = _CachedAnswer(self._clock() + seconds, answer)


class _SharedQuestion:
    """A question to the API server, and the number of requests that wait for its answer."""

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self.task = task
        self.waiting = 0


class AccessReviews:
    """The reviews of one API server.

    Args:
        client: the API server.
        clock: seconds that never go back.
    """

    def __init__(self, client: Client, clock: Callable[[], float] = time.monotonic) -> None:
        """Ask the API server by `client`; `clock` says when a cached answer has expired."""
        self._client = client

        # Answers that are kept for some seconds. Invalid tokens have a cache of their own, so that a flood of them
        # evicts no caller.
        self._callers = _AnswerCache[Caller](clock, MOST_KEPT)  # the user of a valid token, by the token's digest
        self._invalid_tokens = _AnswerCache[None](clock, MOST_KEPT)  # by the token's digest, too
        self._rights = _AnswerCache[bool](clock, MOST_RIGHTS)  # True or False, by caller and right

        # Each review that runs holds one slot of all, and one of its user or address, so that few run at once. The
        # semaphore of a user or an address is held weakly: it vanishes when its last review has ended.
        self._slots = asyncio.Semaphore(MOST_AT_ONCE)
        self._slots_by_user = weakref.WeakValueDictionary[str, asyncio.Semaphore]()  # for reviews of his rights
        self._slots_by_peer = weakref.WeakValueDictionary[str, asyncio.Semaphore]()  # for reviews of tokens from there

        # The questions whose answer is awaited, by what is asked: equal ones are asked once.
        self._running: dict[Hashable, _SharedQuestion] = {}

    async def identify(self, token: str, peer: str) -> Caller | None:
        """Return the user of a token that came from address `peer`; None if the token is invalid.

        The API server is asked unless a cached answer is still valid. Few tokens from one address are reviewed at once.

        Raises ReviewFailedError.
        """
        # Look into the caches: `_callers` keeps the user of each valid token, `_invalid_tokens` the digests of invalid
        # ones, whose answer is None. `cached` is None if neither has the token.
        digest = hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
        cached = self._callers.get(digest) or self._invalid_tokens.get(digest)
        if cached is not None:
            return cached.answer

        # At most MOST_OF_PEER tokens from one address wait for a review at once. The semaphore of an address vanishes
        # with its last user, since the dictionary holds it weakly.
        async with self._slots_by_peer.setdefault(peer, asyncio.Semaphore(MOST_OF_PEER)):
            # While this request waited for its slot, another one may have got the answer.
            cached = self._callers.get(digest) or self._invalid_tokens.get(digest)
            if cached is not None:
                return cached.answer
            return await self._share_question(digest, lambda: self._identify(digest, token))

    async def _identify(self, key: bytes, token: str) -> Caller | None:
        """Ask the API server for the user of a token by a TokenReview; None if the token is invalid.

        The answer is kept under `key`, the digest of the token; that for an invalid token, for a shorter time.

        Raises ReviewFailedError.
        """
        answer = await self._review(TOKEN_REVIEWS, {"token": token})
        status = _read(answer, _TokenStatus)
        user = status.user

        # An invalid token goes into a cache of its own, so that a flood of them evicts no user.
        if not status.authenticated or not user.username:
            self._invalid_tokens.put(key, None, NO_SECONDS)
            return None
        caller = Caller(user.username, user.uid, user.groups, tuple(sorted(user.extra.items())))
        self._callers.put(key, caller, YES_SECONDS)
        return caller

    async def allows(self, caller: Caller, demand: AccessDemand) -> bool:
        """Return whether a caller has a right. Raises ReviewFailedError.

        `_rights` caches such answers; `_share_question` asks the API server once for all requests that wait for the
        same one.
        """
        key = (caller, demand)
        cached = self._rights.get(key)
        if cached is not None:
            return cached.answer
        return await self._share_question(key, lambda: self._allows(caller, demand))

    async def _allows(self, caller: Caller, demand: AccessDemand) -> bool:
        """Ask the API server by a SubjectAccessReview whether RBAC grants a caller a right, and keep the answer.

        Few reviews of one user run at once, so that he does not keep others waiting.

        Raises ReviewFailedError.
        """
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

        # Wait for one of the user's slots: each user whose rights are being reviewed has a semaphore, held weakly.
        async with self._slots_by_user.setdefault(caller.username, asyncio.Semaphore(MOST_OF_USER)):
            answer = await self._review(SUBJECT_ACCESS_REVIEWS, spec)

        # An authorizer may deny what others allow. A right that was granted is kept longer than one that was not.
        status = _read(answer, _AccessStatus)
        is_allowed = status.allowed and not status.denied
        self._rights.put((caller, demand), is_allowed, YES_SECONDS if is_allowed else NO_SECONDS)
        return is_allowed

    async def find_visible(self, caller: Caller, namespaces: Iterable[str]) -> Visibility:
        """Return those of `namespaces` whose services a caller may list; None: he may list those of all namespaces.

        The right in all namespaces is asked for first: with it, no other question is needed. Without it, each namespace
        whose answer is not cached is a question of its own.

        Raises ReviewFailedError.
        """
        # 1. All namespaces: a demand without a namespace.
        if await self.allows(caller, AccessDemand("list", INFERENCE_SERVICES)):
            return None

        # 2. The cache, `_rights`, answers for some namespaces: True or False by caller and right.
        allowed, unknown = set[str](), list[AccessDemand]()
        for namespace in sorted(namespaces):
            demand = AccessDemand("list", INFERENCE_SERVICES, namespace)
            cached = self._rights.get((caller, demand))
            if cached is None:
                unknown.append(demand)
            elif cached.answer:
                allowed.add(namespace)

        # 3. Ask for the rest, once for all requests of the caller that wait for the same answers.
        if unknown:
            key = caller, tuple(unknown)
            allowed |= await self._share_question(key, lambda: self._find_allowed(caller, unknown))
        return frozenset(allowed)

    async def _find_allowed(self, caller: Caller, demands: list[AccessDemand]) -> set[str]:
        """Return the namespaces of those demands that are allowed; few of them are reviewed at once.

        Raises ReviewFailedError.
        """
        allowed = set[str]()
        for first in range(0, len(demands), MOST_OF_USER):
            asked = demands[first : first + MOST_OF_USER]
            answers = await asyncio.gather(*(self.allows(caller, demand) for demand in asked))
            allowed |= {demand.namespace for demand, is_allowed in zip(asked, answers, strict=True) if is_allowed}
        return allowed

    async def _share_question(self, key: Hashable, ask: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the answer of `ask`, which is called once for all requests that wait for the same `key`.

        A request that is cancelled leaves the question running for the others; the last one cancels it.
        """
        # Join the question that is being asked under this key, or ask it in a task of its own.
        question = self._running.get(key)
        if question is None:
            question = self._running[key] = _SharedQuestion(asyncio.create_task(ask()))
        question.waiting += 1  # the number of requests that wait for its answer

        try:
            # Shielded, so that a request that is cancelled does not cancel the question of the others.
            answer: T = await asyncio.shield(question.task)
        finally:
            # The last request ends the question, if it still runs, and forgets it.
            question.waiting -= 1
            if not question.waiting:
                question.task.cancel()
                # By now another question may be running under the same key: it stays.
                if self._running.get(key) is question:
                    del self._running[key]
        return answer

    async def _review(self, resource: Resource, spec: Obj) -> Obj:
        """Send a review, and return it with its status. Raises ReviewFailedError."""
        try:
            # _slots bounds the reviews that run at once, of all callers together.
            async with self._slots:
                return await self._client.review(resource, spec)
        except (ApiError, Unreachable) as error:
            # The message of a server could have the token in it.
            status = error.status if isinstance(error, ApiError) else None
            log.warning("review_failed", resource=str(resource), error=type(error).__name__, status=status)
            raise ReviewFailedError("the API server could not review the token: try again") from None


def _read(answer: Obj, kind: type[T]) -> T:
    """Return the status of a review. Raises ReviewFailedError."""
    try:
        return msgspec.convert(answer.get("status") or {}, kind)
    except msgspec.ValidationError:
        log.warning("review_not_read", kind=kind.__name__)
        raise ReviewFailedError("the API server answered a review with something else") from None
