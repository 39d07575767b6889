"""The extender's JSON: any case in, capitals out, and nothing that a client sends breaks it."""

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extender.wire import (
    ExtenderArgs,
    UndecodableArgsError,
    decode_args,
    encode_filter_error,
    encode_filter_result,
    encode_priorities,
    encode_priority,
)

PRINTABLE = st.characters(exclude_categories=("C", "Z"))
NAMES = st.lists(st.text(PRINTABLE, min_size=1, max_size=20), max_size=20)
POD: Any = {
    "metadata": {"namespace": "team", "labels": {"a": "b"}},
    "spec": {
        "containers": [
            {"resources": {"limits": {"nvidia.com/gpu": "2", "cpu": "4"}, "requests": {"nvidia.com/gpu": 2}}},
            {"resources": {"limits": {"nvidia.com/gpu": "1"}}},
            {},
        ],
        "initContainers": [{"resources": {"limits": {"nvidia.com/gpu": "4"}}}],
    },
}


def encode(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


@pytest.mark.parametrize("case", [str, str.lower, str.upper, str.swapcase])
def test_keys_are_read_in_any_case(case: Any) -> None:
    args = decode_args(encode(**{case("Pod"): POD, case("Nodes"): None, case("NodeNames"): ["n1", "n2"]}))
    assert args.names == ["n1", "n2"]
    assert args.nodes is None
    assert args.pod is not None
    assert (args.pod.namespace, args.pod.labels) == ("team", {"a": "b"})


def test_devices_of_a_pod_are_those_of_its_containers_or_of_a_larger_init_container() -> None:
    args = decode_args(encode(Pod=POD, NodeNames=[]))
    assert args.pod is not None
    assert args.pod.devices == {"nvidia.com/gpu": 4}


@pytest.mark.parametrize(
    "pod",
    [
        {"metadata": {"labels": {"a": 1}}},
        {"metadata": None},
        7,
        None,
        {"metadata": {}, "spec": {"containers": [{}] * 300}},
        {"metadata": {}, "spec": {"containers": {"a": 1}}},
    ],
)
def test_pod_that_cannot_be_read_is_unknown_and_the_nodes_are_answered(pod: Any) -> None:
    args = decode_args(encode(Pod=pod, NodeNames=["n1"]))
    assert args.pod is None
    assert json.loads(encode_filter_result(args))["NodeNames"] == ["n1"]


@pytest.mark.parametrize("count", ["0", "-1", "1e3", "1k", "999999", "٣", "", 0, -4, 1 << 40])
def test_number_of_devices_that_no_pod_has_is_ignored(count: Any) -> None:
    pod = {"metadata": {}, "spec": {"containers": [{"resources": {"limits": {"nvidia.com/gpu": count}}}]}}
    args = decode_args(encode(Pod=pod, NodeNames=[]))
    assert args.pod is not None
    assert args.pod.devices == {}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"{",
        b'{"NodeNames": 7}',
        b'{"NodeNames": [7]}',
        b'{"NodeNames": ["\xff"]}',
        b'{"NodeNames": ["\\ud800"]}',
        b'{"Nodes": {"items": [{}]}}',
        b'{"Nodes": {"items": [{"metadata": {"name": 1}}]}}',
        b'{"Pod": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"NodeNames": [], "x": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}",
        b'{"NodeNames": ["n1"]} x',
    ],
)
def test_request_without_readable_nodes_is_refused(body: bytes) -> None:
    with pytest.raises(UndecodableArgsError, match="no ExtenderArgs"):
        decode_args(body)


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_else(body: bytes) -> None:
    with contextlib.suppress(UndecodableArgsError):
        decode_args(body)


@pytest.mark.parametrize(
    "fields", [{}, {"NodeNames": None}, {"Nodes": None}, {"Nodes": {"items": None}}, {"NodeNames": []}]
)
def test_request_without_nodes_gets_an_empty_answer(fields: Any) -> None:
    answer = json.loads(encode_filter_result(decode_args(encode(Pod=POD, **fields))))
    assert answer["NodeNames"] == []
    assert answer["Error"] == ""
    assert encode_priorities([]) == b"[]"


def decode_names(names: list[str]) -> ExtenderArgs:
    return decode_args(encode(Pod=POD, Nodes=None, NodeNames=names))


@given(NAMES, NAMES, NAMES)
def test_answer_is_a_part_of_the_request_in_its_order(names: list[str], failed: list[str], never: list[str]) -> None:
    answer = json.loads(
        encode_filter_result(decode_names(names), dict.fromkeys(failed, "busy"), dict.fromkeys(never, "too small"))
    )
    assert answer["NodeNames"] == [name for name in names if name not in {*failed, *never}]
    assert answer["Nodes"] is None


@given(NAMES, NAMES)
def test_nodes_come_back_as_they_were_sent(names: list[str], failed: list[str]) -> None:
    nodes: list[Any] = [
        {"metadata": {"name": name, "annotations": {"deep": "x" * 50}}, "status": {"n": 1}} for name in names
    ]
    args = decode_args(encode(Pod=POD, Nodes={"metadata": {}, "items": nodes}, NodeNames=None))
    assert args.names == names
    answer = json.loads(encode_filter_result(args, dict.fromkeys(failed, "busy")))
    assert answer["Nodes"]["items"] == [node for node in nodes if node["metadata"]["name"] not in failed]
    assert answer["NodeNames"] is None


def test_answer_has_the_keys_of_the_scheduler() -> None:
    answer = json.loads(encode_filter_result(decode_names(["n1", "n2", "n3"]), {"n2": "busy"}, {"n3": "too small"}))
    assert answer == {
        "Nodes": None,
        "NodeNames": ["n1"],
        "FailedNodes": {"n2": "busy"},
        "FailedAndUnresolvableNodes": {"n3": "too small"},
        "Error": "",
    }
    assert set(json.loads(encode_filter_error('a "bad" one'))) == set(answer)
    assert json.loads(encode_filter_error('a "bad" one'))["Error"] == 'a "bad" one'


@given(st.text(PRINTABLE | st.just(" "), max_size=30), st.integers(0, 10))
def test_priority_is_valid_json_for_every_name(name: str, score: int) -> None:
    assert json.loads(encode_priorities([encode_priority(name, score)] * 2)) == [{"Host": name, "Score": score}] * 2
