"""The blame for an error that an engine answers: the form of each engine's table, and its one reader.

A status alone misleads: llama.cpp answers 500 to an image that its model cannot see, and mlx-lm 404 once it is dead.
Each engine's module has rows for its own answers. The row decides what the client gets, so that it repeats a request
only if that helps, and what is learnt about the engine. An answer without a row is judged by its status.
"""

import re
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any, Final, Literal, NamedTuple

import msgspec

Lesson = Literal["nothing", "failure", "sick"]
"""The lesson of an error about the engine: nothing, since the client or the load is to blame; that it failed this
request; or that it cannot answer any request more."""

_LONGEST_TEXT: Final = 2000


class EngineError(NamedTuple):
    """A row: one kind of error answer of an engine, in any of the forms of its body."""

    status: int
    """Status of the engine's answer."""
    begin: str
    """Begin of the message; empty: any message. Not a part of it, which may quote what the client has sent."""
    client_status: int
    """Status that the client gets; its type and, if a repetition helps, its Retry-After follow from it."""
    lesson: Lesson
    source: str
    """Origin of the row: the engine's version, and the place in its code or the recorded answer."""
    advice: str = ""
    """Way out that the engine's message does not name; the client gets it, too."""


ErrorTable = Sequence[EngineError]


class SchemaLimits(NamedTuple):
    """The limits of the schemas that an engine survives, where it does not refuse what ends it."""

    most_repetitions: int
    takes_patterns: bool


class ErrorMessage(NamedTuple):
    """The content of an error body. Engines use OpenAI's form, a plain text, or FastAPI's details."""

    text: str
    kind: str = ""
    """The engine's own type of the error, or empty."""
    code: str = ""
    param: str | None = None


class Judgement(NamedTuple):
    """The consequences of an error answer, for the client and for the engine."""

    status: int
    lesson: Lesson
    advice: str = ""


def judge_error(table: ErrorTable, status: int, text: str) -> Judgement:
    """Return what an error of an engine means for the client (its status) and for the engine (the lesson).

    The lesson is nothing, failure (of this request) or sick (it can answer no other either). The first row of the
    table with this status and the beginning of this text decides, else the status alone.
    """
    for row in table:
        if row.status == status and text.startswith(row.begin):
            return Judgement(row.client_status, row.lesson, row.advice)
    return judge_status(status)


def judge_status(status: int) -> Judgement:
    """Judge an answer of which nothing but the status is known.

    501 is an engine's answer on a path that its mode does not serve: clients would repeat a 5xx in vain.
    """
    if status == HTTPStatus.NOT_IMPLEMENTED:
        return Judgement(HTTPStatus.BAD_REQUEST, "nothing")
    return Judgement(status, "failure" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "nothing")


def read_error(body: bytes) -> ErrorMessage:
    """Return the message, type, code and parameter of an engine's error; of one that is only a text, the text."""
    try:
        parsed = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ErrorMessage(body.decode(errors="replace").strip()[:_LONGEST_TEXT])
    if not isinstance(parsed, dict):
        return ErrorMessage(str(parsed)[:_LONGEST_TEXT])
    # OpenAI's form nests the error; others have its fields at the top, or FastAPI's `detail`.
    error = parsed.get("error", parsed)
    if not isinstance(error, dict):
        return ErrorMessage(str(error))
    message = error.get("message") or _read_details(error.get("detail"))
    kind, code, param = (_read_text(error.get(field)) for field in ("type", "code", "param"))
    return ErrorMessage(str(message or ""), kind=kind, code=code, param=param or None)


def _read_text(value: Any) -> str:
    """Return the value of a field if it is a text, else ""."""
    # A code that is a number only repeats the status.
    return value if isinstance(value, str) else ""


def _read_details(detail: Any) -> str:
    """Return FastAPI's details as one text: they are a text, or a list of fields and their problems."""
    if not isinstance(detail, list):
        return str(detail or "")
    problems = [problem for problem in detail if isinstance(problem, dict)]
    return "; ".join(
        f"{'.'.join(str(part) for part in problem.get('loc', []))}: {problem.get('msg', '')}" for problem in problems
    )


_MOST_CHARACTERS: Final = 300
_LEVEL: Final = re.compile(r"^\d[\d.]*\s+E\s+")
"""Begin of an error of llama-server: the time, and its level."""
_ERROR: Final = re.compile(
    r"^\d[\d.]*\s+E\s|\b\w*(Error|Exception): |\berror\s*:|^error\b|\bfatal\b|\bpanic\b|GGML_ASSERT|^terminate called",
    re.IGNORECASE,
)


def find_cause(log: str) -> str:
    """Return the first line of a log that reports an error, else its last line, as printable text; "" for none."""
    lines = [line.rstrip() for line in log.splitlines() if line.strip()]
    # The indented lines of a traceback are source text, which may name an error.
    errors = (line for line in lines if not line[0].isspace() and _ERROR.search(line))
    last_line = lines[-1] if lines else ""
    error = next(errors, last_line)
    # _LEVEL: time and level, with which errors of llama-server begin; they are left out.
    printable = "".join(character if character.isprintable() else " " for character in _LEVEL.sub("", error))
    return " ".join(printable.split())[:_MOST_CHARACTERS]
