"""Schemas, patterns and grammars in a request, by which an engine limits what it generates.

llama.cpp and Ollama make a grammar of them before they serve anybody else, and trust them: an array of at least 9 and
at most 3 items is to them one that repeats 2^64 times, which takes all memory of the machine. A reference that leads
only to itself ends Ollama's engine, and vLLM answers it with 500. So what contradicts itself, refers to itself or makes
a grammar of much memory is refused here, for every engine.

This keeps the mistakes of honest clients, and cheap tricks, from everybody else's requests. It is no proof against a
client who studies an engine's parser: such a one meets the memory limit of the pod, or the host's watch of its memory.
"""

import functools
import re
from typing import Any, Final, NamedTuple

import msgspec

from gateway.proxy import errors
from gateway.proxy.service import ServiceConfig
from runtimes.registry import find_runtime

SCHEMA_FIELDS: Final = frozenset(
    {
        *("response_format", "json_schema", "grammar", "tools", "functions", "text", "output_config", "output_format"),
        *("structured_outputs", "guided_json", "guided_regex", "guided_grammar", "regex", "ebnf"),
    }
)
"""Fields of a request in lower case: of OpenAI's and Anthropic's APIs, llama.cpp, vLLM, SGLang and TGI."""
LONGEST_BYTES: Final = 512 << 10
"""The longest of these fields."""
MOST_OBJECTS: Final = 20_000
"""The most objects and arrays of a field, and brackets of a grammar: it is read at once, in a tenth of a second."""
MOST_WORK: Final = 1 << 24
"""Elements of a grammar, each of 8 bytes: 128 MiB."""

_MOST_PROPERTIES: Final = 500
"""llama.cpp takes 0.4 s for so many that are optional, and 2.7 s for twice as many, and serves nobody meanwhile."""
_LARGEST_BOUND: Final = (1 << 31) - 1
"""llama.cpp reads bounds as 32 bits: a larger one would come out as any other."""
_LARGEST_ENDLESS_BOUND: Final = 10**15
"""llama.cpp counts the digits of an integer without end, and backwards from 16 digits on."""
_WORK_OF_A_REPETITION: Final = 32
"""Elements for each repetition, beside those of what is repeated: llama.cpp took 250 bytes."""
_WITHOUT_COST: Final = 2000
"""llama.cpp makes no rules for more repetitions than this, its MAX_REPETITION_THRESHOLD."""
_LONGEST_SYMBOL: Final = 4096
_MARKS = re.compile(rb'(?:min|max)(?:Items|Length|imum)|M(?:in|ax)imum|"(?:pattern|regex|grammar|ebnf)"|\$ref|\\u00')
_TOOLS: Final = frozenset({"tools", "functions"})
"""Schemas of these are examples to some engines, and a grammar to others: what leaves no choice there is no mistake."""
_BOUNDS: Final = (("minItems", "maxItems"), ("minLength", "maxLength"))
_LOWER: Final = ("minimum", "exclusiveMinimum")
_UPPER: Final = ("maximum", "exclusiveMaximum")
_PATTERN: Final = "pattern"
_CHOICES: Final = ("anyOf", "oneOf", "type")
_TEXTS: Final = frozenset({_PATTERN, "grammar", "regex", "ebnf", "guided_regex", "guided_grammar"})
_ROOTS: Final = frozenset({"schema", "parameters", "input_schema", "json", "json_schema", "guided_json"})
"""Keys of a schema, to which the references in it are relative."""
_REPETITION = re.compile(r"\\.|[()]|\{[^{}]*\}|[*+?](?:\s*[*+?]){16,}", re.DOTALL)
"""A letter that is escaped, a bracket, a repetition with its counts, or signs of repetition in a row."""
_LARGEST_PRODUCT: Final = 200_000
_COMMENT = re.compile(r"#[^\n]*")
_COUNT = re.compile(r"[\s+]*([0-9]*)")
_LONGEST_COUNT: Final = 18
_SYMBOL_BEGINS: Final = {'"': '"', "]": "["}
_NUMBERS = int | float


class SchemaDemand(NamedTuple):
    """The demand on an engine that the schema of an answer makes."""

    most_repetitions: int = 0
    """The largest number of repetitions that a bound, a pattern or a grammar of the answer states."""
    has_pattern: bool = False
    """The schema of the answer has a regular expression."""


NO_SCHEMAS: Final = SchemaDemand()


class SchemaReader:
    """Reads the schemas of a request, and raises RequestError where an engine could not follow them."""

    def __init__(self) -> None:
        self.demand = NO_SCHEMAS
        """The demand on an engine that the schemas read so far make."""
        self._work = 0
        """The size of the grammar that an engine would make of the repetitions so far, in elements."""

    def read_field(self, name: str, value: bytes) -> None:
        """Decode and check the JSON value of the request's field `name`, in lower case. Raises RequestError.

        The work of tools is remembered: an agent sends the same ones with each request.
        """
        if len(value) > LONGEST_BYTES:
            raise errors.invalid_schema(name, f"it is longer than {LONGEST_BYTES >> 10} KiB")
        if name in _TOOLS:
            self._count_work(name, _measure_tools(name, value))
        else:
            self._decode_field(name, value)

    def _decode_field(self, name: str, value: bytes) -> None:
        """Decode and check a field. Raises RequestError."""
        try:
            self._read_value(name, msgspec.json.decode(value))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise errors.invalid_schema(name, f"it is no JSON: {error}") from error
        except RecursionError as error:
            raise errors.invalid_schema(name, "it has too many levels") from error

    def _read_value(self, field: str, value: Any) -> None:
        """Check all objects of a field, and all patterns and grammars, at any depth. Raises RequestError.

        The tree is walked with a list of what is left, without recursion. Each entry has the key of a node, the node,
        and the root of the schema that it lies in, to which references are relative; None outside of a schema.
        """
        finished: set[int] = set()  # schemas whose references lead to an end, by their id
        pending: list[tuple[str, Any, Any]] = [(field, value, None)]  # keys, nodes and roots that are left
        count = 0
        while pending:
            key, node, root = pending.pop()
            count += 1
            if count > MOST_OBJECTS:
                raise errors.invalid_schema(field, f"it has more than {MOST_OBJECTS} objects and arrays")

            if isinstance(node, str) and key in _TEXTS:  # a pattern or a grammar
                if key == _PATTERN and field not in _TOOLS:
                    self.demand = self.demand._replace(has_pattern=True)
                self._read_text(field, node)
            elif isinstance(node, list):
                pending += ((key, item, root) for item in node if isinstance(item, dict | list))
            elif isinstance(node, dict):
                # `_ROOTS` are keys whose value is a whole schema. A field `json_schema` is the schema itself, or (in
                # OpenAI's API) has it in its field `schema`, which is the root then.
                has_inner_schema = key == "json_schema" and "schema" in node
                if root is None and key in _ROOTS and not has_inner_schema:
                    root = node

                # Check this object, and look into its members later.
                self._read_bounds(field, node)
                _check_choices(field, node, root, finished)
                for name, item in node.items():
                    inner = name.casefold()
                    if isinstance(item, dict | list) or (isinstance(item, str) and inner in _TEXTS):
                        pending.append((inner, item, root))

    def _read_bounds(self, field: str, schema: dict[str, Any]) -> None:
        """Refuse bounds that contradict each other, are too large or lack an end; count their repetitions.

        1. `minItems` and `maxItems`, and those of lengths: a grammar repeats an item or a character so often.
        2. `minimum` and `maximum`: an open end beside a very large number is what llama.cpp cannot count.
        """
        # 1. _BOUNDS: pairs of names, such as minItems and maxItems; bounds: the one or two that are stated
        for names in _BOUNDS:
            least, most = (schema.get(name) for name in names)
            bounds = [bound for bound in (least, most) if isinstance(bound, _NUMBERS)]
            if not bounds:
                continue
            is_reversed = bounds != sorted(bounds)
            if min(bounds) < 0 or max(bounds) > _LARGEST_BOUND or is_reversed:
                problem = f"{names[0]} is above {names[1]}, or one of them is below 0 or above {_LARGEST_BOUND}"
                raise errors.invalid_schema(field, problem)
            self._count_repetitions(field, int(max(bounds)), _WORK_OF_A_REPETITION)

        # 2. lower: the values of minimum and exclusiveMinimum; upper: those of maximum and exclusiveMaximum
        lower, upper = (
            [schema[name] for name in names if isinstance(schema.get(name), _NUMBERS)] for names in (_LOWER, _UPPER)
        )
        has_endless_top = not upper and any(bound >= _LARGEST_ENDLESS_BOUND for bound in lower)
        has_endless_bottom = not lower and any(bound <= -_LARGEST_ENDLESS_BOUND for bound in upper)
        if has_endless_top or has_endless_bottom:
            raise errors.invalid_schema(field, "a number of 16 digits or more has no end: give it minimum and maximum")

    def _read_text(self, field: str, text: str) -> None:
        """Check the repetitions in a pattern or a grammar, such as `a{2,5}`. Raises RequestError.

        Repetitions of a repetition multiply: `((a{2}){3}){4}` and `a{2}{3}{4}` both repeat `a` 24 times. So the text is
        read sign by sign. `(` opens a group; `)` closes it, and leaves in `product` the largest product within it;
        `{...}` behind a group or another repetition multiplies this product, and begins a new one elsewhere. Refused
        are a product that is too large, more work than an engine may get, and too many signs.
        """
        group_products = [1]  # the largest product within the text and within each open group, the innermost last
        product, previous_end = 1, 0  # of the last group or repetition, and the place where it ends
        for number, match in enumerate(_REPETITION.finditer(text)):
            sign = match[0]
            if number > MOST_OBJECTS:
                raise errors.invalid_schema(field, f"it has more than {MOST_OBJECTS} brackets and repetitions")
            if sign[0] in "*+?":  # the expression finds these only if there are 17 or more
                raise errors.invalid_schema(field, "it has many signs of repetition in a row")

            if sign == "(":
                group_products.append(1)
            elif sign == ")":  # a repetition behind it repeats all in the group
                product = group_products.pop()
                group_products = group_products or [1]  # more groups are closed than open
            elif sign[0] == "{":
                repetitions = self._read_repetition(field, sign[1:-1])
                repeats_previous = not text[previous_end : match.start()].strip()  # only blanks lie between
                product = repetitions * (product if repeats_previous else 1)
                self._count_repetitions(
                    field, repetitions, _WORK_OF_A_REPETITION + _measure_symbol(text, match.start())
                )

            if sign[0] in "){":  # another repetition may follow, which multiplies the product
                group_products[-1] = max(group_products[-1], product)
                previous_end = match.end()
            if product > _LARGEST_PRODUCT:
                raise errors.invalid_schema(field, f"repetitions of it multiply to more than {_LARGEST_PRODUCT}")

    def _read_repetition(self, field: str, counts: str) -> int:
        """Return the largest count of a repetition; one that is not stated counts as 0. Raises RequestError."""
        # `counts` is what stands in the braces: `2`, `2,` or `2,5`, perhaps with comments of a grammar.
        least_text, comma, most_text = (_COMMENT.sub("", part) for part in counts.partition(","))
        least, most = _read_count(least_text) or 0, _read_count(most_text)
        if comma and most is not None and least > most:
            raise errors.invalid_schema(
                field, f"it has a repetition whose maximum is below its minimum: {{{counts[:80]}}}"
            )
        return max(least, most or 0)

    def _count_repetitions(self, field: str, repetitions: int, size: int) -> None:
        """Add the work of so many repetitions, of `size` elements each; keep the largest number for `check_engines`.

        More than 2000 repetitions cost nothing, because llama.cpp makes no rules for them. Raises RequestError.
        """
        if repetitions > self.demand.most_repetitions and field not in _TOOLS:
            self.demand = self.demand._replace(most_repetitions=repetitions)
        if repetitions <= _WITHOUT_COST:
            self._count_work(field, repetitions * size)

    def _count_work(self, field: str, work: int) -> None:
        """Add work of an engine. Raises RequestError if it is too much in all."""
        self._work += work
        if self._work > MOST_WORK:
            raise errors.invalid_schema(field, "it states so many repetitions that a grammar of it takes much memory")


@functools.lru_cache(maxsize=32)
def _measure_tools(name: str, value: bytes) -> int:
    """Return the work that the schemas of tools make. Raises RequestError.

    Tools that state no bound, pattern, grammar or reference are not looked into.
    """
    reader = SchemaReader()
    if _MARKS.search(value):
        reader._decode_field(name, value)  # noqa: SLF001 - a reader of its own
    return reader._work  # noqa: SLF001


def check_engines(demand: SchemaDemand, service: ServiceConfig) -> None:
    """Raise RequestError if the schemas of a request would make an engine of the service crash.

    All engines of the service are checked, as each of its backends may get the request.
    """
    if demand is NO_SCHEMAS:
        return
    for engine in {backend.engine or "" for backend in service.backends}:
        limits = find_runtime(engine).schema_limits
        if limits is None:  # this engine survives any schema, or refuses it by itself
            continue
        if demand.has_pattern and not limits.takes_patterns:
            raise errors.dangerous_schema(service.name, f"{engine} may end by a `pattern` of a schema")
        if demand.most_repetitions > limits.most_repetitions:
            raise errors.dangerous_schema(service.name, f"{engine} ends by a bound above {limits.most_repetitions}")


def _check_choices(field: str, schema: dict[str, Any], root: Any, finished: set[int]) -> None:
    """Refuse a schema with an empty choice, a type named twice, too many properties, or a reference only to itself.

    An empty choice is allowed in tools: some engines take their schemas for examples only. Raises RequestError.
    """
    types = schema.get("type")  # one type, or a list of the types that an answer may have
    if field not in _TOOLS and any(schema.get(name) == [] for name in _CHOICES):
        raise errors.invalid_schema(field, f"it leaves no choice: one of {', '.join(_CHOICES)} is empty")
    names = [name for name in types if isinstance(name, str)] if isinstance(types, list) else []
    if len(set(names)) < len(names):
        raise errors.invalid_schema(field, "it names a type twice")
    if len(schema) > _MOST_PROPERTIES:
        raise errors.invalid_schema(field, f"an object of it has more than {_MOST_PROPERTIES} properties")
    if "$ref" in schema and _leads_to_itself(schema, root, set(), finished):
        raise errors.invalid_schema(field, "a reference of it leads only to itself")


def _read_count(part: str) -> int | None:
    """Return a count of a repetition, by its leading digits as the engines read it; None: there is none."""
    match = _COUNT.match(part)
    if match is None or not match[1]:
        return None
    # 18 digits are beyond all limits here; a number of thousands of digits would raise.
    return int(match[1].lstrip("0")[:_LONGEST_COUNT] or "0")


def _measure_symbol(text: str, end: int) -> int:
    """Return the length of what stands before a repetition that begins at `end`, and is repeated by it.

    That is a quoted text or a class, such as `[a-z]`, with its marks; anything else counts as one symbol.
    """
    while end and text[end - 1].isspace():
        end -= 1
    opening = _SYMBOL_BEGINS.get(text[end - 1 : end])  # by its last sign: of a quotation mark the same, of `]` the `[`
    if opening is None:
        return 1
    # Searched for in the last 4096 signs only, without the closing one.
    opening_at = text.rfind(opening, max(0, end - _LONGEST_SYMBOL), end - 1)
    return len(text) if opening_at < 0 else end - opening_at  # without an opening, the size is at most that of the text


def _leads_to_itself(schema: Any, root: Any, path: set[int], finished: set[int]) -> bool:
    """Decide whether references lead from a schema back to itself without any content in between.

    Followed are `$ref` and the choices (`allOf`, `anyOf` and so on), each of which stands for the schema itself. What
    lies within a property or an item is not followed: there an answer grows by a level, so it may end.

    Args:
        schema: where to begin.
        root: the schema to which references are relative.
        path: the ids of the schemas on the way to this one.
        finished: the ids of schemas that were followed to their end already; more are added.
    """
    if not isinstance(schema, dict) or id(schema) in finished:
        return False
    if id(schema) in path:
        return True

    # Follow each schema that stands for this one.
    path.add(id(schema))
    followed = [_resolve(root, schema.get("$ref"))]
    for name in ("allOf", *_CHOICES):
        choices = schema.get(name)
        followed += choices if isinstance(choices, list) else []
    leads = any(_leads_to_itself(choice, root, path, finished) for choice in followed)

    path.discard(id(schema))  # two ways to one schema are no loop; only a way back to one above is
    finished.add(id(schema))
    return leads


def _resolve(root: Any, reference: Any) -> Any:
    """Return the part of a schema to which a reference (`#` and a JSON pointer) points; None if there is none."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    target = root
    for part in reference.split("/")[1:]:
        if isinstance(target, dict):
            target = target.get(part.replace("~1", "/").replace("~0", "~"))
        elif isinstance(target, list):
            index = _read_count(part)
            target = None if index is None or index >= len(target) else target[index]
        else:
            return None
    return target
