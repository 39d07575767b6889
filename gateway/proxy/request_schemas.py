"""Schemas, patterns and grammars in a request, by which an engine limits what it generates.

llama.cpp and Ollama make a grammar of them before they serve anybody else, and trust them: an array of at least 9 and
at most 3 items is to them one that repeats 2^64 times, which takes all memory of the machine. A reference that leads
only to itself ends Ollama's engine, and vLLM answers it with 500. So what contradicts itself, refers to itself or makes
a grammar of much memory is refused here, for every engine: none could follow it.
"""

import re
from typing import Any, Final, NamedTuple

import msgspec

from gateway.proxy import errors
from gateway.proxy.config import ServiceListener
from runtimes.error_tables import SCHEMA_LIMITS

SCHEMA_FIELDS: Final = frozenset(
    {
        *("response_format", "json_schema", "grammar", "tools", "functions", "text", "output_config", "output_format"),
        *("structured_outputs", "guided_json", "guided_regex", "guided_grammar", "regex", "ebnf"),
    }
)
"""Fields of a request in lower case: of OpenAI's and Anthropic's APIs, llama.cpp, vLLM, SGLang and TGI."""
LONGEST_BYTES: Final = 512 << 10
"""The longest field with bounds, patterns, references or grammars, which is decoded at once: some milliseconds."""
MOST_WORK: Final = 1 << 24
"""Elements of a grammar, each of 8 bytes: 128 MiB."""

_WORK_OF_A_BOUND: Final = 64
"""Elements for each repetition of an item: llama.cpp took 250 bytes."""
_WITHOUT_COST: Final = 2000
"""llama.cpp makes no rules for more repetitions than this, its MAX_REPETITION_THRESHOLD."""
_BOUND_MARKS = re.compile(rb'(?:min|max)(?:Items|Length)|"(?:pattern|regex|grammar|ebnf)"|\\u00')
_MARKS = re.compile(rb"\$ref|\[\s*\]")
_TOOLS: Final = frozenset({"tools", "functions"})
"""Schemas of these are examples to some engines, and a grammar to others; only their bounds are looked at."""
_BOUNDS: Final = (("minItems", "maxItems"), ("minLength", "maxLength"))
_PATTERN: Final = "pattern"
_CHOICES: Final = ("anyOf", "oneOf", "type")
_TEXTS: Final = frozenset({_PATTERN, "grammar", "regex", "ebnf", "guided_regex", "guided_grammar"})
_ROOTS: Final = frozenset({"schema", "parameters", "input_schema", "json", "json_schema", "guided_json"})
"""Keys of a schema, to which the references in it are relative."""
_DATA: Final = frozenset({"const", "enum", "default", "example", "examples"})
_REPETITION = re.compile(r"\{([\s0-9,]*)([}#]?)")
"""The counts of a repetition in a pattern or a grammar; `#` begins a comment of a grammar."""
_LONGEST_COUNT: Final = 18


class SchemaDemand(NamedTuple):
    """The demand on an engine that the schema of an answer makes."""

    most_repetitions: int = 0
    """The largest number of repetitions that a bound, a pattern or a grammar of the answer states."""
    has_pattern: bool = False
    """The schema of the answer has a regular expression."""


class SchemaReader:
    """Reads the schemas of a request, and raises RequestError where an engine could not follow them."""

    def __init__(self) -> None:
        self.demand = SchemaDemand()
        self._work = 0

    def read_field(self, name: str, value: bytes) -> None:
        """Read the JSON value of the request's field `name`, in lower case."""
        is_marked = name in _TEXTS or _BOUND_MARKS.search(value) or (name not in _TOOLS and _MARKS.search(value))
        if not is_marked:
            return
        if len(value) > LONGEST_BYTES:
            raise errors.invalid_schema(name, f"it is longer than {LONGEST_BYTES >> 10} KiB")
        try:
            self._read_value(name, msgspec.json.decode(value))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise errors.invalid_schema(name, f"it is no JSON, or too deep: {error}") from error

    def _read_value(self, field: str, value: Any) -> None:
        """Read all objects of a field, and all patterns and grammars."""
        finished: set[int] = set()
        left: list[tuple[str, Any, Any]] = [(field, value, None)]
        while left:
            key, node, root = left.pop()
            if isinstance(node, str) and key in _TEXTS:
                if key == _PATTERN and field not in _TOOLS:
                    self.demand = self.demand._replace(has_pattern=True)
                self._read_text(field, node)
            elif isinstance(node, list):
                left += ((key, item, root) for item in node)
            elif isinstance(node, dict):
                if root is None and key in _ROOTS and not (key == "json_schema" and "schema" in node):
                    root = node
                self._read_bounds(field, node)
                if field not in _TOOLS:
                    _check_choices(field, node, root, finished)
                left += ((name.lower(), item, root) for name, item in node.items() if name not in _DATA)

    def _read_bounds(self, field: str, schema: dict[str, Any]) -> None:
        for names in _BOUNDS:
            least, most = (schema.get(name) for name in names)
            bounds = [bound for bound in (least, most) if isinstance(bound, int | float)]
            if not bounds:
                continue
            if min(bounds) < 0 or (len(bounds) == len(names) and bounds[0] > bounds[1]):
                raise errors.invalid_schema(field, f"{names[0]} is above {names[1]}, or one of them is below 0")
            self._count(field, int(min(max(bounds), 1 << 62)), _WORK_OF_A_BOUND)

    def _read_text(self, field: str, text: str) -> None:
        """Read a pattern or a grammar."""
        for found in _REPETITION.finditer(text):
            counts, end = found.groups()
            if not counts.strip() or not end:
                continue
            if end == "#":
                raise errors.invalid_schema(field, "a repetition of it has a comment between its braces")
            least, _, most = (part.strip() for part in counts.partition(","))
            if most and _read_count(least) > _read_count(most):
                raise errors.invalid_schema(field, f"a repetition of it has no end: {{{least[:40]},{most[:40]}}}")
            self._count(field, max(_read_count(least), _read_count(most)), len(text))

    def _count(self, field: str, repetitions: int, size: int) -> None:
        if repetitions > self.demand.most_repetitions and field not in _TOOLS:
            self.demand = self.demand._replace(most_repetitions=repetitions)
        if repetitions <= _WITHOUT_COST:
            self._work += repetitions * size
        if self._work > MOST_WORK:
            raise errors.invalid_schema(field, "it states so many repetitions that a grammar of it takes much memory")


def check_engines(demand: SchemaDemand, service: ServiceListener) -> None:
    """Raise RequestError if an engine of the service would end by the schemas of a request."""
    for engine in {backend.engine or "" for backend in service.backends}:
        limits = SCHEMA_LIMITS.get(engine)
        if limits is None:
            continue
        if demand.has_pattern and not limits.takes_patterns:
            raise errors.dangerous_schema(service.name, f"{engine} may end by a `pattern` of a schema")
        if demand.most_repetitions > limits.most_repetitions:
            raise errors.dangerous_schema(service.name, f"{engine} ends by a bound above {limits.most_repetitions}")


def _check_choices(field: str, schema: dict[str, Any], root: Any, finished: set[int]) -> None:
    if any(schema.get(name) == [] for name in _CHOICES):
        raise errors.invalid_schema(field, f"it leaves no choice: one of {', '.join(_CHOICES)} is empty")
    if "$ref" in schema and _leads_to_itself(schema, root, set(), finished):
        raise errors.invalid_schema(field, "a reference of it leads only to itself")


def _read_count(digits: str) -> int:
    """Return a count; 0 for none, or for what the engine refuses."""
    return int(digits[:_LONGEST_COUNT]) if digits.isdecimal() else 0


def _leads_to_itself(schema: Any, root: Any, path: set[int], finished: set[int]) -> bool:
    """Decide whether references, and choices of them, lead back to one of the objects in `path`.

    What lies within a property or an item ends in time, as a tree does. `finished` has what was followed to its end.
    """
    if not isinstance(schema, dict) or id(schema) in finished:
        return False
    if id(schema) in path:
        return True
    path.add(id(schema))
    followed = [_resolve(root, schema.get("$ref"))]
    for name in ("allOf", *_CHOICES):
        choices = schema.get(name)
        followed += choices if isinstance(choices, list) else []
    leads = any(_leads_to_itself(one, root, path, finished) for one in followed)
    path.discard(id(schema))
    finished.add(id(schema))
    return leads


def _resolve(root: Any, reference: Any) -> Any:
    """Return the part of a schema to which a reference points; None if there is none."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found = root
    for part in reference.split("/")[1:]:
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found
