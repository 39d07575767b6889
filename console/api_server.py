"""The HTTP server of the density API: it checks the caller, answers as JSON with an ETag, and fails as JSON."""

import asyncio
import hashlib
import weakref
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec
import structlog
from aiohttp import web
from aiohttp.typedefs import Handler

from console.access_reviews import AccessReviews, ReviewFailedError
from console.api_requests import MOST_BODY_BYTES, BadRequestError, read_token
from console.api_routes import ROUTES, ApiRoute, AskedRequest, DensityContext, NothingFoundError
from console.density_answers import ErrorAnswer
from console.density_simulation import SimulationRefused
from console.openapi_document import build_document

log = structlog.get_logger()

BODY_SECONDS: Final = 10.0
"""Time in which a body must have come."""
_ETAG_CHARACTERS: Final = 32
_JSON: Final = "application/json"
_KEPT_HEADERS: Final = ("Allow", "WWW-Authenticate")
_SAFE_HEADERS: Final = {
    "Cache-Control": "private, no-cache",
    "Vary": "Authorization",
    "X-Content-Type-Options": "nosniff",
}

_encode = msgspec.json.Encoder().encode
_Turns = weakref.WeakValueDictionary[str, asyncio.Lock]
"""By user, while requests of his are answered."""
_Handle = Callable[[web.Request], Awaitable[web.StreamResponse]]


def build_api(context: DensityContext, reviews: AccessReviews) -> web.Application:
    """Return the server of the API.

    Args:
        context: what routes answer by.
        reviews: who callers are, and what they may see.
    """
    application = web.Application(middlewares=[_answer_errors], client_max_size=MOST_BODY_BYTES)
    turns = _Turns()
    for route in ROUTES:
        path = route.path.replace("{name}", "{name:.+}")
        application.router.add_route(route.method, path, _build_handler(route, context, reviews, turns))
        if route.method == "GET":
            application.router.add_route("HEAD", path, _build_handler(route, context, reviews, turns))
    document = _encode(build_document())

    async def answer_document(request: web.Request) -> web.StreamResponse:
        return _respond(request, document)

    application.router.add_get("/openapi.json", answer_document)
    return application


def _build_handler(route: ApiRoute, context: DensityContext, reviews: AccessReviews, turns: _Turns) -> _Handle:
    async def handle(request: web.Request) -> web.StreamResponse:
        token = read_token(request.headers.get("Authorization", ""))
        caller = await reviews.identify(token) if token else None
        if caller is None:
            return refuse(401, "a valid token of the cluster is needed: Authorization: Bearer TOKEN", challenge=True)
        if not context.service.feed.is_complete:
            return refuse(503, "the cluster is still being read: try again")
        demand = route.demand
        if demand is not None and not await reviews.allows(caller, demand):
            return refuse(403, f"the user of the token may not {demand.verb} {demand.resource}")
        body = await _read_body(request) if route.body_type is not None else b""
        namespaces = context.service.feed.take_snapshot().namespaces
        visible = await reviews.find_visible(caller, namespaces)
        asked = AskedRequest(request.query, request.match_info.get("name", ""), body, visible)
        # Answers are computed one at a time: whoever asks much waits for himself, and not others for him.
        async with turns.setdefault(caller.username, asyncio.Lock()):
            return _respond(request, _encode(await route.answer(context, asked)))

    return handle


async def _read_body(request: web.Request) -> bytes:
    """Return the body. Raises BadRequestError, or the error of one that is too large."""
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await request.read()
    except TimeoutError as error:
        raise BadRequestError("the body did not come in time") from error


def _respond(request: web.Request, body: bytes) -> web.Response:
    """Answer with a body, or that it is the one that the client has."""
    etag = f'"{hashlib.sha256(body).hexdigest()[:_ETAG_CHARACTERS]}"'
    headers = {**_SAFE_HEADERS, "ETag": etag}
    known = {each.strip().removeprefix("W/") for each in request.headers.get("If-None-Match", "").split(",")}
    if request.method in {"GET", "HEAD"} and known & {etag, "*"}:
        return web.Response(status=304, headers=headers)
    return web.Response(body=body, headers=headers, content_type=_JSON)


def refuse(status: int, message: str, *, challenge: bool = False) -> web.Response:
    """Return a failure; `challenge`: the client has to authenticate."""
    headers = {**_SAFE_HEADERS, **({"WWW-Authenticate": "Bearer"} if challenge else {})}
    return web.Response(status=status, body=_encode(ErrorAnswer(error=message)), headers=headers, content_type=_JSON)


@web.middleware
async def _answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer each failure as JSON; none names what was in the request but a checked text."""
    try:
        return await handler(request)
    except (BadRequestError, SimulationRefused) as error:
        return refuse(400, str(error))
    except NothingFoundError as error:
        return refuse(404, str(error))
    except ReviewFailedError as error:
        return refuse(503, str(error))
    except web.HTTPException as error:
        response = refuse(error.status, error.reason)
        response.headers.update({name: error.headers[name] for name in _KEPT_HEADERS if name in error.headers})
        return response
    except Exception:  # a defect ends no connection, and its words are for the log
        log.exception("answer_failed", method=request.method)
        return refuse(500, "the server has failed: its log has the cause")
