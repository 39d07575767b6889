"""The JSON of a request: the model that it names, and the body that an engine gets.

Engines differ in which of two equal keys they use, and some (Go's decoder) accept `Model` for `model`. If the name of
the model decides which weights an engine loads, exactly one such key is left, and its value is the proxy's. Fields that
make an engine load other weights are removed. All other values stay byte by byte.

A short body is decoded at once. A large one, or one that may have media, is scanned in pieces, between which other
requests go on, and it is not copied: `json_scanner` says why.
"""

import asyncio
import codecs
import sys
from collections import Counter
from collections.abc import Container, Generator, Mapping
from typing import Final, TypeAlias, TypeVar

import msgspec

from gateway.proxy import errors
from gateway.proxy.errors import RequestError
from gateway.proxy.json_scanner import InvalidJsonError, JsonScanner, PausingWork, check_encoding
from gateway.proxy.request_media import FIELDS_WITH_PARTS, MediaReader, may_have_media
from gateway.proxy.request_schemas import NO_SCHEMAS, SCHEMA_FIELDS, SchemaDemand, SchemaReader

SHORT_BODY_BYTES: Final = 256 << 10
"""A body up to this size is decoded at once, which takes half a millisecond, or three if it is made to be costly.

A scan of the same body takes ten times as long. Agents send 40 to 80 KiB at first, and all of it again with each turn.
"""
BUDGET_BYTES: Final = 256 << 20
"""For all bodies together: thousands of chats, or some dozens of requests with images."""
FIELDS_LIMIT: Final = 1000
"""The most fields of a request; all APIs together have about a hundred."""
LONGEST_MODEL_BYTES: Final = 4096
_DECODED_BYTES: Final = 16 << 10

MODEL: Final = "model"
_STREAM: Final = "stream"
_STREAM_OPTIONS: Final = "stream_options"
_INCLUDE_USAGE: Final = "include_usage"
_TRUE: Final = msgspec.Raw(b"true")
_ROUTES_WITH_USAGE_OPTION: Final = frozenset({"chat", "completions"})
"""Names of the paths whose streams count tokens only if a request asks for it."""
FIELDS_THAT_LOAD_WEIGHTS: Final = frozenset({"adapters", "draft_model", "lora"})
"""Fields by which a client would have other weights answer, and not it alone.

mlx_lm.server loads any that it names, from its disk or the internet. llama-server takes what it has computed with other
LoRA adapters for the beginning of the next client's prompt.
"""

NO_FIELDS: Final[Mapping[str, msgspec.Raw]] = {}
Pieces: TypeAlias = list[bytes | bytearray | memoryview]
_Result = TypeVar("_Result")

_encode = msgspec.json.Encoder().encode
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_model_name = msgspec.json.Decoder(str | None)
_options = msgspec.json.Decoder(dict[str, msgspec.Raw] | None)


class RequestBody:
    """A JSON object as the client sent it.

    Args:
        content: the text of the object.
        model: the name that the client gave; None: it gave none.
        other_fields: all fields without the model and without those that load weights: decoded, or their places.
        loads_weights: a field makes an engine load other weights, so the content must not go to an engine as it is.
        schema_demand: the demand on an engine that its schemas make.
    """

    def __init__(
        self,
        content: bytes | bytearray,
        model: str | None,
        other_fields: dict[str, msgspec.Raw] | Pieces,
        *,
        loads_weights: bool,
        schema_demand: SchemaDemand = NO_SCHEMAS,
    ) -> None:
        self.content = content
        self.model = model
        self.schema_demand = schema_demand
        self.fields = other_fields if isinstance(other_fields, dict) else {}
        """The JSON values of the fields beside the model, which share the memory of the content."""
        self.media_count = 0
        self.media_bytes = 0
        """The images, sounds and files in the body, and the size of their texts. One that is not scanned has none."""

        # For the body that an engine gets: the fields beside the model, decoded or as pieces of the text of a scanned
        # body. Fields that make an engine load other weights are not among them.
        self._other_fields = other_fields
        self._is_changed = loads_weights  # so the content must not go to an engine as it is

    @property
    def streams(self) -> bool:
        """True if the client wants a stream."""
        return self.fields.get(_STREAM) == _TRUE

    def include_usage(self, route: str) -> bool:
        """Ask an engine for its counts of tokens at the end of a stream; return False if the client asks for them.

        On other paths than those with the option, engines count in any case. A scanned body that has other options of
        streams stays as it is: its tokens are counted by the events.
        """
        if route not in _ROUTES_WITH_USAGE_OPTION:
            return False
        fields, stated = self._other_fields, self.fields.get(_STREAM_OPTIONS)
        try:
            options = (_options.decode(stated) if stated is not None else None) or {}
        except msgspec.DecodeError:
            return False  # the engine refuses it
        if options.get(_INCLUDE_USAGE) == _TRUE:
            return False
        rendered = _encode(options | {_INCLUDE_USAGE: _TRUE})
        if isinstance(fields, dict):
            fields[_STREAM_OPTIONS] = msgspec.Raw(rendered)
        elif stated is None:
            fields.append(b'"%b":%b' % (_STREAM_OPTIONS.encode(), rendered))
        else:
            return False
        self._is_changed = True
        return True

    def render_for_engine(self, model: str | None, added: Mapping[str, msgspec.Raw] = NO_FIELDS) -> Pieces:
        """Return the body for an engine, in pieces, with `model` as its only model; None: the client's name stays.

        Of the fields in `added`, those that the client has stated stay as they are. A short body is written anew: what
        was checked of two equal fields is what an engine gets. A scanned one, all of whose fields were checked, is the
        client's own text if its model stays, no field of it loads weights, and none is added.
        """
        name = self.model if model is None else model  # None: the client gave none, either
        fields = self._other_fields
        if added:
            fields = _add_fields(added, fields, self.fields)
        if isinstance(fields, dict):
            return [_encode(fields if name is None else {MODEL: name, **fields})]
        if model is None and not (self._is_changed or added):
            return [self.content]

        # Else the pieces of its text are put together, with commas between them.
        if name is not None:
            fields = [b'"model":' + msgspec.json.encode(name), *fields]
        pieces: Pieces = [b"{"]
        for number, field in enumerate(fields):
            if number:
                pieces.append(b",")
            pieces.append(field)
        pieces.append(b"}")
        return pieces


def _add_fields(
    added: Mapping[str, msgspec.Raw], fields: dict[str, msgspec.Raw] | Pieces, stated: Container[str]
) -> dict[str, msgspec.Raw] | Pieces:
    """Return the fields of a body, decoded or as pieces, with those of `added` that are not stated."""
    if isinstance(fields, dict):
        return {**added, **fields}
    return [*fields, *(b'"%b":%b' % (name.encode(), value) for name, value in added.items() if name not in stated)]


NO_BODY: Final = RequestBody(b"", None, {}, loads_weights=False)
"""A body that is not read yet, or is needed no more."""


class BodyBudget:
    """The memory that the request bodies of this process take, and its limit.

    A body is held whole from its first byte until an engine responds, and many clients may send large ones that all
    wait in a queue. A body that exceeds the budget is refused at once, so that a few clients with images cannot use up
    the memory. Of a gateway, the clients of one namespace may hold half of it: one that sends slowly stops no other.
    """

    def __init__(self, limit_bytes: int = BUDGET_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self.held_bytes = 0
        self._by_namespace: Counter[str] = Counter()

    def reserve(self, more_bytes: int, namespace: str = "") -> None:
        """Reserve memory for a body of a client of `namespace`. Raises RequestError if the budget has no room."""
        if self.held_bytes + more_bytes > self._limit_bytes:
            raise errors.too_busy()
        if namespace:
            if self._by_namespace[namespace] + more_bytes > self._limit_bytes // 2:
                raise errors.too_busy()
            self._by_namespace[namespace] += more_bytes
        self.held_bytes += more_bytes

    def free(self, freed_bytes: int, namespace: str = "") -> None:
        """Free memory that was reserved."""
        self.held_bytes -= freed_bytes
        if namespace:
            self._by_namespace[namespace] -= freed_bytes
            if not self._by_namespace[namespace]:
                del self._by_namespace[namespace]


async def run_in_turns(work: Generator[None, None, _Result], turns: asyncio.Lock) -> _Result:
    """Do work on a body, piece by piece, and return its result; between two pieces other requests run.

    All such work takes turns by the lock, so that in each pass of the event loop at most one piece is done, however
    many bodies there are. Raises what `work` raises.
    """
    while True:
        async with turns:
            try:
                next(work)
            except StopIteration as end:
                result: _Result = end.value  # what the generator returned
                return result
            await asyncio.sleep(0)


async def scan_large_body(content: bytes | bytearray, turns: asyncio.Lock) -> RequestBody:
    """Scan a body that is large or may have media, and return it.

    Raises RequestError if it is not a JSON object, or asks for what no engine may do.
    """
    return await run_in_turns(scan_body(content), turns)


def read_short_body(content: bytes | bytearray) -> RequestBody | None:
    """Decode a short body at once. None: it is large or may have media, so it has to be scanned.

    As some engines ignore the case of names, the fields are looked up by their names in lower case: schemas are
    checked, and fields that load weights, or spell `model` in another way, are left out.

    Raises RequestError if it is not a JSON object, or has schemas that no engine can follow.
    """
    if len(content) > SHORT_BODY_BYTES:
        return None

    # 1. Decode the object, whose values stay JSON texts, and take the model out of it.
    try:
        if not content.isascii():
            _check_utf_8(content)
        fields = _fields.decode(content)
        field_count = len(fields)
        model = _model_name.decode(fields.pop(MODEL)) if MODEL in fields else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _not_an_object(str(error)) from error
    if field_count > FIELDS_LIMIT:
        raise _too_many_fields()

    # 2. Look for media, check schemas, and delete what an engine must not get: the items are in a list because of that.
    loads_weights = False
    schemas: SchemaReader | None = None
    for key, value in list(fields.items()):
        name = key.casefold()
        if name in FIELDS_WITH_PARTS:
            if may_have_media(value):
                return None
        elif name in SCHEMA_FIELDS:
            schemas = schemas or SchemaReader()
            schemas.read_field(name, bytes(value))
        elif name == MODEL or name in FIELDS_THAT_LOAD_WEIGHTS:
            del fields[key]
            loads_weights = loads_weights or name != MODEL

    demand = schemas.demand if schemas else NO_SCHEMAS
    return RequestBody(content, model, fields, loads_weights=loads_weights, schema_demand=demand)


def count_copied_bytes(content: bytes | bytearray) -> int:
    """Return the memory that a body takes beside its content: a short one is copied, the buffer of a large one grew."""
    return len(content) if len(content) <= SHORT_BODY_BYTES else sys.getsizeof(content) - len(content)


def scan_body(content: bytes | bytearray) -> Generator[None, None, RequestBody]:
    """Read a large body in short pieces of work, with a pause after each, and return it. Raises RequestError."""
    scanner = JsonScanner(content)
    fields = _FieldReader(scanner)
    try:
        yield from check_encoding(content)
        yield from scanner.skip_blanks()
        yield from scanner.read_object(fields.read_field)
        yield from scanner.expect_end()
    except InvalidJsonError as error:
        raise _not_an_object(str(error)) from error
    view = memoryview(content)  # its slices share the content's memory
    other_fields: Pieces = [view[start:end] for start, end in fields.other_ranges]
    demand = fields.schemas.demand
    body = RequestBody(content, fields.model, other_fields, loads_weights=fields.loads_weights, schema_demand=demand)
    body.fields = fields.values
    body.media_count, body.media_bytes = fields.media.count, fields.media.size_bytes
    return body


class _FieldReader:
    """Reads the fields of a request, one after the other."""

    def __init__(self, scanner: JsonScanner) -> None:
        self.model: str | None = None
        self.loads_weights = False
        self.schemas = SchemaReader()
        self.values: dict[str, msgspec.Raw] = {}
        self.other_ranges: list[tuple[int, int]] = []
        """Start and end of what an engine may get: all but the model and fields that load weights. A range may have
        several fields, with the commas between them."""
        self.media = MediaReader(scanner)
        self._scanner = scanner
        self._view = memoryview(scanner.text)  # its slices share the content's memory
        self._field_count = 0
        self._last_was_kept = False
        """The last range ends with the field before, so that the next field can extend it."""

    def read_field(self, key: str, start: int) -> PausingWork:
        """Read the value of the field `key`, whose key starts at `start`: keep the model, or the range of the field.

        Left out are fields that load weights, and other spellings of `model`, such as `Model`, which some engines take
        for it. Raises RequestError.
        """
        self._field_count += 1
        if self._field_count > FIELDS_LIMIT:
            raise _too_many_fields()
        scanner = self._scanner  # at the value, which is read below
        value_start = scanner.position
        lowered = key.casefold()

        # 1. A field that is left out; of the spellings of `model`, only the usual one counts.
        if lowered == MODEL or lowered in FIELDS_THAT_LOAD_WEIGHTS:
            yield from scanner.skip_value()
            self._last_was_kept = False
            if lowered != MODEL:
                self.loads_weights = True
            elif key == MODEL:
                self.model = _read_model(scanner, value_start)
            return

        # 2. Any other field: check its media and schemas, and keep its range.
        yield from self.media.read_field(lowered)
        self.values[key] = msgspec.Raw(self._view[value_start : scanner.position])
        if lowered in SCHEMA_FIELDS:
            self.schemas.read_field(lowered, bytes(scanner.text[value_start : scanner.position]))
        if self._last_was_kept:  # nothing that is left out lies between that field and this one: one range has both
            start, _ = self.other_ranges.pop()
        self.other_ranges.append((start, scanner.position))
        self._last_was_kept = True


def _read_model(scanner: JsonScanner, start: int) -> str | None:
    """Return the model, whose value lies between `start` and the scanner's position. Raises RequestError."""
    if scanner.position - start > LONGEST_MODEL_BYTES:
        raise errors.bad_request(f"the name of the model is longer than {LONGEST_MODEL_BYTES} bytes")
    try:
        name: str | None = _model_name.decode(scanner.text[start : scanner.position])
    except (msgspec.DecodeError, RecursionError) as error:
        raise _not_an_object(f"{error} - at `$.model`") from error
    return name


def _check_utf_8(content: bytes | bytearray) -> None:
    """Raise UnicodeDecodeError if the text is not UTF-8.

    It is decoded in pieces: memory for all of it would be had from the system, and given back, at each request.
    """
    view = memoryview(content)
    start = 0
    while start < len(view):
        end = start + _DECODED_BYTES
        _, taken = codecs.utf_8_decode(view[start:end], "strict", end >= len(view))
        start += taken  # a character that the end of the piece cuts is read with the next one


def _not_an_object(reason: str) -> RequestError:
    return errors.bad_request(f"the request body is not the JSON object that this path takes: {reason}")


def _too_many_fields() -> RequestError:
    return errors.bad_request(f"the request body has more than {FIELDS_LIMIT} fields")
