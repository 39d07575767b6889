"""The HTTP server of the density API: it checks the caller, answers as JSON with an ETag, and fails as JSON."""

import asyncio
import contextlib
import hashlib
import weakref
from collections import Counter
from collections.abc import Awaitable, Iterator
from typing import Final

import msgspec
import structlog

from console.access_reviews import AccessReviews, Caller, ReviewFailedError
from console.api_requests import MOST_BODY_BYTES, BadRequestError, read_query, read_token
from console.api_routes import ROUTES, ApiRoute, AskedRequest, DensityContext, NothingFoundError
from console.density_answers import ErrorAnswer
from console.density_simulation import SimulationRefused
from console.density_snapshot import DensitySnapshot
from console.fit_table import FitTable
from console.openapi_document import build_document
from gateway.http.headers import Field
from gateway.http.limits import ConnectionCaps
from gateway.http.whole_answers import JSON, Answer, AnswerServer, AskedQuestion, BodyLimits, Route, WholeAnswer

log = structlog.get_logger()

ANSWER_SECONDS: Final = 20.0
"""Time in which an answer must have been made."""
MOST_KEPT_CONNECTIONS: Final = 8
"""Requests of one user whose connections give way to no others."""
CAPS: Final = ConnectionCaps(total=128, per_peer=32, buffered_bytes=16 << 10)
_BODIES: Final = BodyLimits(MOST_BODY_BYTES, CAPS.total * MOST_BODY_BYTES)
"""As many as there are connections, so that nobody's bodies keep those of others out."""
_ETAG_CHARACTERS: Final = 32
_SAFE_FIELDS: Final[tuple[Field, ...]] = (
    (b"Cache-Control", b"private, no-cache"),
    (b"Vary", b"Authorization"),
    (b"X-Content-Type-Options", b"nosniff"),
)

_encode = msgspec.json.Encoder().encode
_UserLocks = weakref.WeakValueDictionary[str, asyncio.Lock]
"""The lock of each user, for as long as requests of his are answered or wait."""


def build_api(context: DensityContext, reviews: AccessReviews) -> AnswerServer:
    """Return the server of the API: all routes, and its OpenAPI document, which needs no token.

    Args:
        context: the cluster and the prices, from which routes answer.
        reviews: finds out who callers are, and what they may see.
    """
    # Both are shared by all routes: a lock for each user, and the number of connections that each user keeps.
    user_locks, connection_shares = _UserLocks(), _ConnectionShares()

    routes = dict[str, Route]()
    for route in ROUTES:
        # _BODIES limits the size of bodies; without a body type, a body is not read.
        body_limits = _BODIES if route.body_type is not None else None
        answer = _build_answer(route, context, reviews, user_locks, connection_shares)
        # A path that ends with a slash takes whatever name follows it.
        routes[route.path.removesuffix("{name}")] = Route(answer, route.method, body_limits)

    # The document is encoded once, and needs no token.
    document = _encode(build_document())
    routes["/openapi.json"] = Route(lambda question: _respond(question, document))
    return AnswerServer(routes, refuse)


class _ConnectionShares:
    """The connections that requests in progress keep, at most some for each user; further ones may be closed."""

    def __init__(self) -> None:
        self._kept = Counter[str]()

    @contextlib.contextmanager
    def keep(self, question: AskedQuestion, user: str) -> Iterator[None]:
        """Count a request of a user while it is answered, and protect its connection, unless he has too many already.

        When there are too many connections, the server closes those that are not protected.
        """
        # _kept: requests in progress, by user
        if self._kept[user] < MOST_KEPT_CONNECTIONS:
            question.keep_connection()
        self._kept[user] += 1
        try:
            yield
        finally:
            self._kept[user] -= 1
            if not self._kept[user]:
                del self._kept[user]


def _build_answer(
    route: ApiRoute,
    context: DensityContext,
    reviews: AccessReviews,
    user_locks: _UserLocks,
    connection_shares: _ConnectionShares,
) -> Answer:
    """Return the function that answers the requests of a route.

    1. `answer` turns each failure into an answer, and bounds the time.
    2. `answer_stranger` identifies the caller by his token.
    3. `answer_caller` checks his right, finds out what he may see, and computes the answer.
    """

    # These functions use the parameters above: `reviews` asks the API server, `connection_shares` and `user_locks`
    # bound what one user may take.
    async def answer_stranger(question: AskedQuestion) -> WholeAnswer:
        """Identify the caller by the bearer token, and answer him; without a valid token, answer with 401.

        `reviews` asks the API server whose token it is. `connection_shares` keeps the connections of known users.
        """
        token = read_token(question.headers.get("Authorization"))
        caller = await reviews.identify(token, question.peer) if token else None
        if caller is None:
            return refuse(401, "a valid token of the cluster is needed: Authorization: Bearer TOKEN", challenge=True)
        with connection_shares.keep(question, caller.username):
            return await answer_caller(question, caller)

    async def answer_caller(question: AskedQuestion, caller: Caller) -> WholeAnswer:
        """Answer a known caller by what he may see; with 503 until the cluster is read, with 403 without the right."""
        if not context.service.view.is_complete:
            return refuse(503, "the cluster is still being read: try again")

        # 1. His right. demand: what the route takes; None: any valid token will do
        demand = route.demand
        if demand is not None and not await reviews.allows(caller, demand):
            return refuse(403, f"the user of the token may not {demand.verb} {demand.resource}")

        # 2. His view. visible: the namespaces whose Models and services he may see; None: all
        service = context.service
        visible = await reviews.find_visible(caller, service.take_snapshot().namespaces)
        query, name, body = read_query(question), question.name, bytes(question.body)

        def compute(snapshot: DensitySnapshot, table: FitTable) -> object:
            """Return the answer of the route, before it is encoded; runs in a thread."""
            return route.answer(
                AskedRequest(snapshot, table, service.view.vendors, context.prices, visible, query, name, body)
            )

        # 3. A user has one answer computed at a time: his further requests wait here, and delay no other user.
        async with user_locks.setdefault(caller.username, asyncio.Lock()):
            return _respond(question, _encode(await service.compute(compute)))

    async def answer(question: AskedQuestion) -> WholeAnswer:
        """Answer a request; a failure is an answer, too."""
        return await _report_failures(question, answer_stranger(question))

    return answer


async def _report_failures(question: AskedQuestion, answer: Awaitable[WholeAnswer]) -> WholeAnswer:
    """Return an answer, or its failure as JSON with the fitting status; it takes too long after `ANSWER_SECONDS`.

    A message may repeat words of the request only if they were checked: others, such as a token, do not come back.
    """
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            return await answer
    except (BadRequestError, SimulationRefused) as error:
        return refuse(400, str(error))
    except NothingFoundError as error:
        return refuse(404, str(error))
    except ReviewFailedError as error:
        return refuse(503, str(error))
    except TimeoutError:
        return refuse(503, "the answer took too long: try again")
    except Exception:  # a defect: the connection stays, and the message, which may hold anything, is only logged
        log.exception("answer_failed", method=question.method)
        return refuse(500, "internal error: the log of the server has the cause")


def _respond(question: AskedQuestion, body: bytes) -> WholeAnswer:
    """Answer with a body, or with 304 if the client has it already: its If-None-Match names the ETag of this body."""
    # _SAFE_FIELDS keep the answer out of shared caches.
    etag = f'"{hashlib.sha256(body).hexdigest()[:_ETAG_CHARACTERS]}"'
    fields = (*_SAFE_FIELDS, (b"ETag", etag.encode()))

    # If-None-Match lists ETags; `W/` marks a weak one, `*` means any.
    known_etags = {text.strip().removeprefix("W/") for text in question.headers.get("If-None-Match").split(",")}
    if question.method in {"GET", "HEAD"} and known_etags & {etag, "*"}:
        return WholeAnswer(304, b"", JSON, fields)
    return WholeAnswer(200, body, JSON, fields)


def refuse(status: int, message: str, *, challenge: bool = False) -> WholeAnswer:
    """Return a failure; `challenge`: the client has to authenticate."""
    fields = (*_SAFE_FIELDS, (b"WWW-Authenticate", b"Bearer")) if challenge else _SAFE_FIELDS
    return WholeAnswer(status, _encode(ErrorAnswer(error=message)), JSON, fields)
