"""Schemas, patterns and grammars that would end or fill an engine are refused, and those that people use pass."""

import contextlib
import json
import time
from typing import Any

import pytest

from gateway.proxy.config import Backend, ServiceListener
from gateway.proxy.errors import RequestError
from gateway.proxy.request_body import SHORT_BODY_BYTES, RequestBody
from gateway.proxy.request_schemas import LONGEST_BYTES, check_engines
from tests.unit.gateway.proxy.test_request_body import read_short


def read(*, is_long: bool = False, **fields: Any) -> RequestBody:
    """Read a request with these fields, by either way."""
    content = json.dumps({"model": "chat", "padding": "x" * SHORT_BODY_BYTES * is_long, **fields}).encode()
    return read_short(content)


def answer(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}


def thing(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


def array(**bounds: Any) -> dict[str, Any]:
    return thing(a={"type": "array", "items": {"type": "string"}, **bounds})


def function(schema: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": schema}}


WRONG = array(minItems=9, maxItems=3)
LOOP = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
LEAF_OR_TREE = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"$ref": "#/$defs/tree"}}]}
TREE = {"$defs": {"tree": LEAF_OR_TREE}, "$ref": "#/$defs/tree"}


@pytest.mark.parametrize("is_long", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        answer(WRONG),
        answer(array(maxItems=-1)),
        answer(thing(a={"type": "string", "minLength": 1e30, "maxLength": 5})),
        answer(thing(a={"type": "string", "pattern": "^(ab{9,3})$"})),
        answer(thing(a={"type": "string", "pattern": "^a{2000}" + "b{2000}" * 300})),
        answer(thing(a={"anyOf": []})),
        answer(thing(a={"type": []})),
        answer(LOOP),
        answer({"$defs": {"a": {"oneOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}),
        answer(thing(schema={"$ref": "#/properties/schema"})),
        answer({"schema": {}, **LOOP}),
        answer(thing(**{f"a{n}": {"maxItems": 2000} for n in range(300)})),
        {"Response_Format": answer(WRONG)["response_format"]},
        {"response_format": {"type": "json_object", "schema": WRONG}},
        {"json_schema": WRONG},
        {"json_schema": LOOP},
        {"grammar": 'root ::= "a"{ 9 , 3 }'},
        {"grammar": 'root ::= "a"{9,# comment\n3}'},
        {"grammar": 'root ::= "' + "a" * 20_000 + '"{1900}'},
        {"grammar": "x" * LONGEST_BYTES},
        {"grammar": 'root ::= ("a"{#\n9,3})'},
        {"grammar": 'root ::= "a"{0000000000000000009,3}'},
        {"grammar": 'root ::= "a"{2000}{2000}{2000}'},
        {"grammar": 'root ::= "a"' + "+" * 99},
        {"grammar": 'root ::= ((("a"?){200}){200}){200}'},
        *(answer(thing(a={"type": "string", "pattern": p})) for p in ("^a{9x,3}$", "^a{+9,3}$", r"^\\\\{9,3}$")),
        answer(array(minItems=4, maxItems=(1 << 32) + 3)),
        answer(thing(a={"type": "integer", "minimum": 10**15})),
        answer(thing(a={"type": "integer", "exclusiveMaximum": -(10**15)})),
        answer(thing(default={"minItems": 9, "maxItems": 3})),
        answer(thing(a={"type": ["string", "string"]})),
        answer(thing(**{f"a{n}": {"type": "null"} for n in range(501)})),
        answer([{"minItems": 1}] * 30_000),
        {"re\u017fponse_format": answer(WRONG)["response_format"]},
        {"tools": [function({"allOf": [{"$ref": "#/d/0"}], "d": [{"$ref": "#/d/0"}]})]},
        {"tools": [function({}), function(WRONG)]},
        {"tools": [{"name": "f", "input_schema": WRONG}]},
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": WRONG}}},
        {"output_config": {"format": {"type": "json_schema", "schema": LOOP}}},
        {"structured_outputs": {"json": LOOP}},
        {"structured_outputs": {"regex": "a{5,2}"}},
    ],
)
def test_what_no_engine_can_follow_is_refused(fields: dict[str, Any], is_long: bool) -> None:
    with pytest.raises(RequestError) as refused:
        read(is_long=is_long, **fields)
    error = json.loads(refused.value.body)["error"]
    assert (refused.value.status, error["code"], error["param"]) == (
        400,
        "invalid_schema",
        next(iter(fields)).casefold(),
    )


def test_tools_that_are_sent_again_are_judged_alike() -> None:
    """The remembered work of tools still counts with the other schemas of each request."""
    repeated = function(thing(a={"type": "string", "pattern": "^a{2000}" + "b{2000}" * 200}))
    for _ in range(2):
        read(tools=[repeated])
        with pytest.raises(RequestError, match="takes much memory"):
            read(tools=[repeated], functions=[repeated])
        with pytest.raises(RequestError, match="minItems is above maxItems"):
            read(tools=[function(WRONG)])


def test_letters_that_are_escaped_hide_nothing() -> None:
    content = json.dumps(answer(WRONG)).replace("minItems", "min\\u0049tems").encode()
    with pytest.raises(RequestError):
        read_short(content)


@pytest.mark.parametrize("is_long", [False, True])
@pytest.mark.parametrize(
    ("fields", "most_repetitions"),
    [
        ({}, 0),
        (answer(array(minItems=1, maxItems=1)), 1),
        (answer(array(minItems=3)), 3),
        (answer(thing(a={"type": "string", "maxLength": 100_000})), 100_000),
        (answer(thing(minItems={"type": "integer"}, maxItems={"type": "integer", "default": 3})), 0),
        (answer(TREE), 0),
        (answer({"$defs": {"a": {"type": "string"}}, **thing(x={"$ref": "#/$defs/a"}, y={"$ref": "#/$defs/a"})}), 0),
        (answer(thing(a={"$ref": "#/$defs/missing"})), 0),
        (answer(thing(day={"type": "string", "pattern": r"^\d{4}-\d{2}-\d{2}$"})), 4),
        (answer(thing(a={"type": "string", "pattern": r"^\{9,3\}$"})), 0),
        (answer(thing(a={"type": "string", "pattern": r"^a{2,}b{,5}$"})), 5),
        ({"grammar": 'root ::= "a"{1,3} # {9,3 is no repetition'}, 3),
        ({"grammar": "".join(f"r{n} ::= [a-z]{{1,64}}\n" for n in range(800))}, 64),
        (answer(thing(a={"type": "string", "pattern": r"^[a-z]{1,63}(\.[a-z]{1,63})?$" * 9})), 63),
        (answer(thing(**{f"a{n}": {"type": "string", "maxLength": 1000} for n in range(270)})), 1000),
        (answer(thing(a={"type": "integer", "minimum": -(2**53) + 1, "maximum": 2**53 - 1})), 0),
        (answer(thing(a={"type": "string", "pattern": "^.{3#}$"})), 3),
        ({"grammar": "root ::= [a-z]*\n" + " " * 20 + "| [0-9]+"}, 0),
        (answer(thing(a={"type": "string", "pattern": r"^(([0-9]{1,3}\.){3}|\([a-z]{1,64}\)){0,1000}$"})), 1000),
        ({"tools": [function(array(maxItems=20)), function({"anyOf": []})]}, 0),
        ({"text": "a text, {9,3}", "response_format": "json", "tools": [5], "json_schema": None}, 0),
        ({"messages": [{"role": "user", "content": '{"minItems": 9, "maxItems": 3}'}]}, 0),
    ],
)
def test_what_people_use_passes(fields: dict[str, Any], most_repetitions: int, is_long: bool) -> None:
    assert read(is_long=is_long, **fields).schema_demand.most_repetitions == most_repetitions


def test_engine_that_would_end_by_a_pattern_or_a_large_bound_gets_neither() -> None:
    pattern = thing(a={"type": "string", "pattern": "^a$"})
    demands = [read(**fields).schema_demand for fields in (answer(pattern), answer(array(maxItems=2001)))]
    harmless = read(**answer(array(maxItems=2000)), tools=[function(pattern), function(array(maxItems=9999))])
    ollama, *others = (
        ServiceListener("a/chat", "127.0.0.1", 0, "token", (Backend("one", "http://127.0.0.1:1", engine=engine),))
        for engine in ("ollama", "llama.cpp", None)
    )
    check_engines(harmless.schema_demand, ollama)
    for demand in demands:
        for other in others:
            check_engines(demand, other)
        with pytest.raises(RequestError, match=r"a/chat: ollama .*: leave it out"):
            check_engines(demand, ollama)


@pytest.mark.parametrize("piece", ["(", "{", "{1}", '"{1}', "]{1}", "a{", "* ", "\\", " ", "#", "{#", "()", "(a{1})"])
def test_text_of_any_kind_is_read_in_little_time(piece: str) -> None:
    """A grammar whose reading takes the square of its length would hold up all other requests: minutes, for these."""
    started = time.process_time()
    with contextlib.suppress(RequestError):
        read(grammar=piece * ((LONGEST_BYTES - 1000) // (len(json.dumps(piece)) - 2)))
    assert time.process_time() - started < 5
