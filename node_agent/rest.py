"""The REST API of a node, in the shapes of `llmfit serve`: health for everybody, the hardware behind a key.

Metrics and health are a server of their own, so that a scraper and the kubelet need no key. Without a key the API is
served on loopback only, and to no web page of a browser there.
"""

import asyncio
import contextlib
import functools
import hmac
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import structlog
from prometheus_client import CONTENT_TYPE_LATEST

from crds.nodefitness import NodeFitnessStatus
from gateway.http.whole_answers import (
    JSON,
    AnswerServer,
    AskedQuestion,
    PacedRendering,
    Route,
    WholeAnswer,
    serve_answers,
)

LOOPBACK: Final = "127.0.0.1"
EVERYWHERE: Final = "0.0.0.0"
_LONGEST_KEY: Final = 4096
_TOP_LIMIT: Final = 5
_NAME_LIMIT: Final = 20
"""Rows that llmfit answers with if the client states no limit."""

log = structlog.get_logger()


def read_key(path: Path) -> bytes:
    """Return the key of the REST API in a file. Raises OSError: it cannot be read, or is empty or too long."""
    with path.open("rb") as file:
        key = file.read(_LONGEST_KEY + 1).strip()  # one byte more, to notice a key that is too long
    if not key or len(key) > _LONGEST_KEY:
        raise OSError(f"the key in {path} has {len(key)} bytes: write one of 1 to {_LONGEST_KEY}")
    return key


def build_rest_server(node: str, read: Callable[[], NodeFitnessStatus | None], key_file: Path | None) -> AnswerServer:
    """Return the REST API.

    Args:
        node: the name of the Node.
        read: returns the hardware as it was read last; None: not yet.
        key_file: the file of the key that all but /health ask for, read at each request, because a mounted Secret may
            change; None: no key.
    """
    identity = {"name": node, "os": "linux"}

    async def answer_models(question: AskedQuestion, *, top_only: bool = False) -> WholeAnswer:
        """Answer with a page of the models that fit; `top_only` leaves out those that are too tight.

        The path may name a part of models' names (`question.name`). `read` returns the hardware, or None before the
        first probe, which is answered as not read.
        """
        # The estimates and the catalog take some MiB, which an agent that nobody asks does without.
        from node_agent import model_fits  # noqa: PLC0415 - as said

        hardware = read()
        if hardware is None:
            return _NOT_READ
        try:
            query = model_fits.parse_fit_query(
                question.read_query(), limit=_TOP_LIMIT if top_only else _NAME_LIMIT, search=question.name
            )
        except ValueError as error:
            return _fail(400, str(error))
        # `top` answers with what fits, whatever level the client asks for.
        if top_only and query.min_fit == "too_tight":
            query = query._replace(min_fit="marginal")
        rows = await asyncio.to_thread(model_fits.list_fits, hardware, query)
        return _answer_json(
            {
                "node": identity,
                "system": _describe_system(hardware),
                "total_models": len(rows),
                "returned_models": min(len(rows), query.limit),
                "filters": model_fits.describe_filters(query, top_only=top_only),
                "models": rows[: query.limit],
            }
        )

    def answer_system(_: AskedQuestion) -> WholeAnswer:
        """Answer with the hardware; `read` returns None before the first probe."""
        hardware = read()
        if hardware is None:
            return _NOT_READ
        return _answer_json({"node": identity, "system": _describe_system(hardware)})

    # _NOT_READ is a 503: no probe has ended yet.
    routes = {
        "/health": Route(lambda _: _answer_json({"status": "ok", "node": identity})),
        "/api/v1/system": Route(answer_system),
        "/api/v1/models": Route(answer_models),
        "/api/v1/models/": Route(answer_models),
        "/api/v1/models/top": Route(functools.partial(answer_models, top_only=True)),
    }
    return AnswerServer(routes, _fail, functools.partial(_check_key, key_file) if key_file else lambda _: None)


def build_metrics_server(render: Callable[[], bytes]) -> AnswerServer:
    """Return the server of metrics and health, which needs no key."""
    rendering = PacedRendering(render)
    return AnswerServer(
        {
            "/metrics": Route(lambda _: WholeAnswer(200, rendering.read(), CONTENT_TYPE_LATEST.encode())),
            "/healthz": Route(lambda _: WholeAnswer(200, b"ok\n")),
        },
        _fail,
    )


@contextlib.asynccontextmanager
async def serve(server: AnswerServer, option: str, host: str, port: int) -> AsyncIterator[None]:
    """Serve while the block runs; a port that is taken is logged with `option`, and ends nothing."""
    async with contextlib.AsyncExitStack() as stack:
        try:
            await stack.enter_async_context(serve_answers(server, host, port))
            log.info("port_served", option=option, address=host, port=port)
        except OSError as error:
            log.warning("port_not_served", option=option, error=str(error), remedy=f"give {option} another port, or 0")
        yield


def _answer_json(body: Mapping[str, Any], status: int = 200) -> WholeAnswer:
    """Return an answer with this body."""
    return WholeAnswer(status, msgspec.json.encode(body), JSON)


def _fail(status: int, message: str) -> WholeAnswer:
    """Return an error as JSON, without words of the request."""
    return _answer_json({"error": message}, status)


_NOT_READ: Final = _fail(503, "the hardware was not read yet: ask again")


def _check_key(key_file: Path, question: AskedQuestion) -> WholeAnswer | None:
    """Return the refusal of a request without the key; None if it has the key, or is for /health.

    A request with the key keeps its connection, while those of strangers give way when there are too many.
    """
    if question.path == "/health":
        return None
    try:
        key = read_key(key_file)
    except OSError as error:
        log.warning("api_key_not_read", error=str(error))
        return _fail(503, "the key of this server cannot be read")

    scheme, _, token = question.headers.get("Authorization").partition(" ")
    given = token.strip().encode("utf-8", "surrogateescape")
    # compare_digest takes the same time wherever two keys differ, so that none is guessed letter by letter.
    if hmac.compare_digest(given, key) and scheme.lower() == "bearer":
        question.keep_connection()
        return None
    return _fail(401, "a key is missing or wrong")._replace(fields=((b"WWW-Authenticate", b"Bearer"),))


def _describe_system(hardware: NodeFitnessStatus) -> dict[str, Any]:
    """Return the hardware in the shape of llmfit's /api/v1/system."""
    # The estimates and the catalog take some MiB, which an agent that nobody asks does without.
    from fitness.llmfit_rows import describe_system  # noqa: PLC0415 - as said
    from fitness.machine_facts import describe_node_machine  # noqa: PLC0415 - as said

    machine = describe_node_machine(hardware.vendor, hardware, hardware.devices, hardware.available_bytes)
    return describe_system(machine)
