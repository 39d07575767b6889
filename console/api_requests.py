"""The parameters of a request, checked: everything in it comes from outside and is bounded."""

from collections.abc import Mapping
from typing import Final, NamedTuple

import msgspec

from console.density_answers import SimulateRequest
from console.density_models import USE_CASES, UseCase
from console.density_queries import DEFAULT_LIMIT, MOST_LIMIT, DensityQuery, Page
from fitness.fit import FIT_LEVELS, FitLevel
from gateway.http.whole_answers import AskedQuestion

MOST_BODY_BYTES: Final = 64 << 10
LONGEST_TEXT: Final = 256
_FIT_LEVEL_OF: Final[Mapping[str, FitLevel]] = {level: level for level in FIT_LEVELS}
_USE_CASE_OF: Final[Mapping[str, UseCase]] = {use_case: use_case for use_case in USE_CASES}
_MOST_OFFSET: Final = 10**9
_MOST_DIGITS: Final = 10
_LONGEST_TOKEN: Final = 16 << 10


class ParameterSchema(NamedTuple):
    """A parameter of a query, for the OpenAPI document."""

    name: str
    description: str
    schema: Mapping[str, object]
    is_required: bool = False


PAGE_PARAMETERS: Final = (
    ParameterSchema(
        "limit",
        "Entries to answer with at most.",
        {"type": "integer", "minimum": 1, "maximum": MOST_LIMIT, "default": DEFAULT_LIMIT},
    ),
    ParameterSchema(
        "offset",
        "Entries to skip: nextOffset of the page before.",
        {"type": "integer", "minimum": 0, "maximum": _MOST_OFFSET, "default": 0},
    ),
)
QUERY_PARAMETERS: Final = (
    ParameterSchema(
        "min_fit",
        "Lowest level of fit to answer with.",
        {"type": "string", "enum": list(FIT_LEVELS), "default": "marginal"},
    ),
    ParameterSchema(
        "use_case", "Only models for this use case. Absent: all.", {"type": "string", "enum": list(USE_CASES)}
    ),
)
_TEXT: Final = {"type": "string", "maxLength": LONGEST_TEXT}
MODEL_PARAMETER: Final = ParameterSchema(
    "model",
    "Part of the name, title or source of a model in any case, or * for all.",
    {**_TEXT, "minLength": 1},
    is_required=True,
)
SEARCH_PARAMETER: Final = ParameterSchema("search", "Part of a name. Absent: all models.", _TEXT)
NODE_PARAMETER: Final = ParameterSchema("node", "Name of a node or host.", _TEXT)


class BadRequestError(ValueError):
    """A request that cannot be answered; the message is for the client."""


def read_query(question: AskedQuestion) -> dict[str, str]:
    """Return the parameters of a request. Raises BadRequestError: they are too many."""
    try:
        return question.read_query()
    except ValueError as error:
        raise BadRequestError("the query has too many parameters") from error


def read_page(query: Mapping[str, str]) -> Page:
    """Return the page that is asked for. Raises BadRequestError."""
    # llmfit names the limit n.
    limit = _read_number(query, "limit", query.get("n", str(DEFAULT_LIMIT)), least=1, most=MOST_LIMIT)
    return Page(_read_number(query, "offset", "0", least=0, most=_MOST_OFFSET), limit)


def read_text(query: Mapping[str, str], name: str, default: str | None = None) -> str:
    """Return a text of a query. Raises BadRequestError: it is missing, too long, or no text.

    Without a `default`, the parameter is required and must not be blank.
    """
    text = query.get(name, default)
    if text is None or (default is None and not text.strip()):
        raise BadRequestError(f"{name} is missing: add ?{name}=")
    return check_text(name, text)


def check_text(name: str, text: str) -> str:
    """Return a text that an answer may repeat. Raises BadRequestError."""
    if len(text) > LONGEST_TEXT:
        raise BadRequestError(f"{name} has at most {LONGEST_TEXT} characters")
    try:
        # Half of a surrogate pair has no UTF-8, and no answer could repeat it.
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRequestError(f"{name} is no UTF-8") from error
    return text


def read_density_query(query: Mapping[str, str], text: str) -> DensityQuery:
    """Return the question of a query about models that have `text`. Raises BadRequestError."""
    # Both tables lead from a text to the level or use case of that name; any other text gives None.
    min_fit = _FIT_LEVEL_OF.get(query.get("min_fit", "marginal"))
    if min_fit is None:
        raise BadRequestError(f"min_fit is one of {', '.join(FIT_LEVELS)}")
    stated_use_case = query.get("use_case", "")
    use_case = _USE_CASE_OF.get(stated_use_case)
    if stated_use_case and use_case is None:
        raise BadRequestError(f"use_case is one of {', '.join(USE_CASES)}")
    return DensityQuery(text, min_fit, use_case)


def read_simulation(body: bytes) -> SimulateRequest:
    """Return the body of a simulation. Raises BadRequestError."""
    try:
        request = msgspec.json.decode(body, type=SimulateRequest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequestError(f"the body is no simulation: {str(error)[:LONGEST_TEXT]}") from error
    check_text("model", request.model)
    check_text("quantization", request.quantization or "")
    return request


def read_token(header: str) -> str:
    """Return the token of an Authorization header; empty: there is none."""
    scheme, _, token = header.partition(" ")
    token = token.strip()
    return token if scheme.lower() == "bearer" and len(token) <= _LONGEST_TOKEN else ""


def _read_number(query: Mapping[str, str], name: str, default: str, least: int, most: int) -> int:
    """Return a number of a query, or its default. Raises BadRequestError unless it is from `least` to `most`."""
    text = query.get(name, default)
    is_number = text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS
    if not is_number or not least <= int(text) <= most:
        raise BadRequestError(f"{name} is a number from {least} to {most}")
    return int(text)
