"""The comparison of desired and observed objects, and conditions that keep their transition time."""

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kube.apply import UndeclaredFields, is_applied, merge_conditions
from kube.comparison import Comparison
from kube.errors import ApiError
from kube.resources import DEPLOYMENTS, METAL_HOSTS, METAL_PROCESSES

NAMES = st.text("abcxyz", min_size=1, max_size=3)
SCALARS = st.one_of(st.text("ab0", max_size=3), st.integers(1, 9), st.booleans())
OBJECTS = st.dictionaries(
    NAMES,
    st.recursive(
        SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3), max_leaves=4
    ),
    max_size=3,
)


def covers(desired: Any, observed: Any) -> bool:
    """Compare values only, without field owners."""
    return Comparison(zero_is_absent=True).covers(observed, desired, None)


@given(OBJECTS)
def test_object_covers_itself(obj: dict[str, Any]) -> None:
    assert covers(obj, json.loads(json.dumps(obj)))


@given(OBJECTS, OBJECTS)
def test_fields_of_other_managers_are_no_difference(obj: dict[str, Any], more: dict[str, Any]) -> None:
    assert covers(obj, {**more, **obj})
    assert covers({"spec": obj}, {"spec": {**more, **obj}, "status": more})


@given(OBJECTS, st.data())
def test_every_changed_leaf_is_a_difference(obj: dict[str, Any], data: st.DataObject) -> None:
    leaves: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key, value in list(node.items() if isinstance(node, dict) else enumerate(node)):
            walk(value) if isinstance(value, dict | list) else leaves.append((node, key))

    observed = json.loads(json.dumps(obj))
    walk(observed)
    if leaves:
        node, key = data.draw(st.sampled_from(leaves))
        node[key] = f"{node[key]}!"
        assert not covers(obj, observed)


@pytest.mark.parametrize(
    ("desired", "observed"),
    [
        ("1000m", "1"),
        ("1Gi", "1073741824"),
        ("1024Mi", "1Gi"),
        (2, "2"),
        ("0.5", "500m"),
        ("1e3", "1k"),
        ("1E", "1e18"),
    ],
)
def test_only_quantities_are_compared_by_value(desired: Any, observed: str) -> None:
    assert covers({"resources": {"limits": {"cpu": desired}}}, {"resources": {"limits": {"cpu": observed}}})
    assert not covers({"resources": {"limits": {"cpu": desired}}}, {"resources": {"limits": {"cpu": "7"}}})
    assert not covers({"env": [{"name": "A", "value": desired}]}, {"env": [{"name": "A", "value": observed}]})
    assert not covers({"labels": {"limits": desired}}, {"labels": {"limits": observed}})


@pytest.mark.parametrize(
    ("desired", "observed"),
    [
        ({"a": True}, {"a": 1}),
        ({"a": 1}, {"a": "1"}),
        ({"a": [1]}, {"a": [1, 2]}),
        ({"a": {"b": 1}}, {"a": None}),
        ({"a": {"b": 1}}, {"a": [1]}),
        ({"a": [1]}, {"a": {"b": 1}}),
        ({"a": "x"}, {}),
        ({"limits": {"cpu": "many"}}, {"limits": {"cpu": "1"}}),
    ],
)
def test_different_values_are_not_covered(desired: Any, observed: Any) -> None:
    assert not covers(desired, observed)


@pytest.mark.parametrize(
    ("desired", "observed"),
    [
        ({"a": None}, {}),
        ({"a": ""}, {}),
    ],
)
def test_empty_values_count_as_absent(desired: Any, observed: Any) -> None:
    assert covers(desired, observed)


def test_custom_resources_keep_zeros_and_built_in_ones_drop_them() -> None:
    fields = {"manager": "pomona", "operation": "Apply", "fieldsV1": {"f:spec": {"f:n": {}}}}
    observed = {"metadata": {"name": "a", "managedFields": [fields]}, "spec": {}}
    assert is_applied(DEPLOYMENTS, {"spec": {"n": 0}}, observed, "pomona")
    assert not is_applied(METAL_PROCESSES, {"spec": {"n": 0}}, observed, "pomona")


def test_an_object_without_our_fields_is_not_applied() -> None:
    updated = {"manager": "pomona", "operation": "Update", "fieldsV1": {"f:spec": {}}}
    other = {"manager": "other", "operation": "Apply", "fieldsV1": {"f:spec": {}}}
    status = {"manager": "pomona", "operation": "Apply", "subresource": "status", "fieldsV1": {}}
    observed = {"metadata": {"name": "a", "managedFields": [updated, other, status]}}
    assert not is_applied(DEPLOYMENTS, {"metadata": {"name": "a"}}, observed, "pomona")


def test_a_condition_keeps_its_time_until_its_status_changes() -> None:
    now = datetime(2026, 11, 21, 13, 10, 0, 123, tzinfo=UTC)
    before = "2026-01-01T00:00:00Z"
    old = [
        {"type": "Ready", "status": "False", "reason": "Waiting", "lastTransitionTime": before},
        {"type": "Cached", "status": "False", "lastTransitionTime": before},
        {"type": "Dropped", "status": "True", "lastTransitionTime": before},
    ]
    new = [
        {"type": "Ready", "status": "False", "reason": "Starting"},
        {"type": "Cached", "status": "True"},
        {"type": "New", "status": "Unknown"},
    ]
    assert merge_conditions(old, new, now) == [
        {"type": "Ready", "status": "False", "reason": "Starting", "lastTransitionTime": before},
        {"type": "Cached", "status": "True", "lastTransitionTime": "2026-11-21T13:10:00Z"},
        {"type": "New", "status": "Unknown", "lastTransitionTime": "2026-11-21T13:10:00Z"},
    ]


def refusal(message: str, status: int = 500) -> ApiError:
    return ApiError("PATCH metalhosts/studio-1/status", status=status, reason="", message=message)


@pytest.mark.parametrize(
    ("path", "left"),
    [
        (".status.chip", {"levels": [{"name": "a", "cores": 6}], "power": {"source": "ac"}}),
        (".status.levels[0].cores", {"chip": "M4", "levels": [{"name": "a"}], "power": {"source": "ac"}}),
        ('.status.levels[name="a]: \\"b"].cores', {"chip": "M4", "levels": [{"name": "a"}], "power": {"source": "ac"}}),
        (".status.power.source", {"chip": "M4", "levels": [{"name": "a", "cores": 6}], "power": {}}),
        (".status.power.source.of", {"chip": "M4", "levels": [{"name": "a", "cores": 6}]}),
    ],
)
def test_only_the_field_that_a_refusal_names_is_left_out(path: str, left: Any) -> None:
    """One that is not found in the status, as names with dots are not told apart, takes the whole field with it."""
    status = {"chip": "M4", "levels": [{"name": "a", "cores": 6}], "power": {"source": "ac"}}
    undeclared = UndeclaredFields()
    error = refusal(f"failed to create typed patch object: {path}: field not declared in schema")
    assert undeclared.note_refusal(METAL_HOSTS, error, status)
    assert undeclared.leave_out(METAL_HOSTS, status) == left
    assert undeclared.leave_out(METAL_PROCESSES, status) == status
    assert undeclared.note_refusal(METAL_HOSTS, error, status), "another request was refused meanwhile"
    assert undeclared.leave_out(METAL_HOSTS, status) == left


def test_object_that_is_invalid_without_a_field_is_left_out_as_a_whole() -> None:
    status = {"chip": "M4", "power": {"kind": "ac"}}
    undeclared = UndeclaredFields()
    assert not undeclared.note_refusal(METAL_HOSTS, refusal("status.chip: too long", 422), status), "for another reason"
    assert undeclared.note_refusal(METAL_HOSTS, refusal(".status.power.kind: field not declared in schema"), status)
    sent = undeclared.leave_out(METAL_HOSTS, status)
    assert sent == {"chip": "M4", "power": {}}
    assert not undeclared.note_refusal(METAL_HOSTS, refusal("etcd is away"), sent)
    assert undeclared.note_refusal(METAL_HOSTS, refusal("status.power.source: Required value", 422), sent)
    sent = undeclared.leave_out(METAL_HOSTS, status)
    assert sent == {"chip": "M4"}
    assert not undeclared.note_refusal(METAL_HOSTS, refusal("status.chip: too long", 422), sent)
