"""Promises of the documentation about env, envFrom, the downward API, command and args."""

import base64
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.controlplane.kubelet.environment import (
    ConfigError,
    command,
    expand,
    field,
    quantity,
    resolve,
    resource_field,
)

POD: dict[str, Any] = {
    "metadata": {
        "name": "web",
        "namespace": "shop",
        "uid": "u-1",
        "labels": {"app": "web", "tier": "front"},
        "annotations": {"a/b": "note"},
    },
    "spec": {"nodeName": "node-1", "serviceAccountName": "robot", "containers": []},
}
ADDRESSES = {"status.podIP": "10.77.1.10", "status.hostIP": "10.77.0.11"}
OBJECTS = {
    ("configmaps", "settings"): {"data": {"mode": "fast", "level": "3"}},
    ("secrets", "keys"): {"data": {"token": base64.b64encode(b"s3cret").decode()}},
}


async def lookup(kind: str, name: str) -> dict[str, Any] | None:
    return OBJECTS.get((kind, name))


async def variables(container: dict[str, Any], **base: str) -> dict[str, str]:
    return await resolve(
        container, POD, base, addresses=ADDRESSES, allocatable={"cpu": "8", "memory": "32Gi"}, lookup=lookup
    )


def test_a_reference_is_replaced() -> None:
    assert expand("http://$(HOST):$(PORT)/", {"HOST": "h", "PORT": "80"}) == "http://h:80/"


def test_an_unknown_reference_is_not_changed() -> None:
    assert expand("$(NOPE) $HOME ${X}", {"HOME": "/root"}) == "$(NOPE) $HOME ${X}"


def test_a_doubled_dollar_is_never_expanded() -> None:
    assert expand("$$(HOST) $$$(HOST)", {"HOST": "h"}) == "$(HOST) $h"


@given(st.text(alphabet=st.characters(exclude_characters="$")))
def test_text_without_a_dollar_is_not_changed(text: str) -> None:
    assert expand(text, {"A": "b"}) == text


def test_command_replaces_the_entry_point_and_args_follow() -> None:
    image = ["/entry", "serve"]
    assert command({"args": ["--port", "$(PORT)"]}, image, {"PORT": "1"}) == ["/entry", "serve", "--port", "1"]
    assert command({"command": ["sh", "-c"], "args": ["ls"]}, image, {}) == ["sh", "-c", "ls"]


async def test_a_variable_may_refer_only_to_earlier_variables() -> None:
    entries = [
        {"name": "LATE", "value": "$(PORT)"},
        {"name": "PORT", "value": "80"},
        {"name": "URL", "value": "http://h:$(PORT)"},
    ]
    found = await variables({"env": entries})
    assert (found["LATE"], found["URL"]) == ("$(PORT)", "http://h:80")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("metadata.name", "web"),
        ("metadata.namespace", "shop"),
        ("metadata.uid", "u-1"),
        ("metadata.labels['app']", "web"),
        ("metadata.annotations['a/b']", "note"),
        ("metadata.labels", 'app="web"\ntier="front"'),
        ("spec.nodeName", "node-1"),
        ("spec.serviceAccountName", "robot"),
        ("status.podIP", "10.77.1.10"),
        ("status.hostIP", "10.77.0.11"),
    ],
)
async def test_fields_of_the_pod_are_read(path: str, value: str) -> None:
    assert field(POD, path, ADDRESSES) == value
    found = await variables({"env": [{"name": "X", "valueFrom": {"fieldRef": {"fieldPath": path}}}]})
    assert found == {"X": value}


def test_an_unsupported_field_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"status\.nope"):
        field(POD, "status.nope", ADDRESSES)


def test_resources_in_units_of_the_divisor_rounded_up() -> None:
    container = {"resources": {"limits": {"memory": "1500Mi", "cpu": "250m"}, "requests": {"memory": "1Gi"}}}
    ask = {"resource": "limits.memory", "divisor": "1Gi"}
    assert resource_field(POD, ask, container, {}) == "2"
    assert resource_field(POD, {"resource": "limits.cpu"}, container, {}) == "1"
    assert resource_field(POD, {"resource": "limits.cpu", "divisor": "1m"}, container, {}) == "250"
    assert resource_field(POD, {"resource": "requests.memory"}, container, {}) == str(2**30)


def test_a_missing_limit_is_the_allocatable_amount_of_the_node() -> None:
    assert resource_field(POD, {"resource": "limits.cpu"}, {}, {"cpu": "8"}) == "8"


@given(st.integers(0, 10**6), st.sampled_from([("Ki", 2**10), ("Mi", 2**20), ("k", 1000), ("", 1)]))
def test_quantities(number: int, suffix: tuple[str, int]) -> None:
    assert quantity(f"{number}{suffix[0]}") == number * suffix[1]


def test_quantities_with_fractions_and_exponents() -> None:
    assert (quantity("250m"), quantity("1.5Gi"), quantity("2e3")) == (
        Decimal("0.25"),
        Decimal(3 * 2**29),
        Decimal(2000),
    )
    with pytest.raises(ValueError, match="'1Qi'"):
        quantity("1Qi")


async def test_keys_of_config_maps_and_secrets() -> None:
    entries = [
        {"name": "MODE", "valueFrom": {"configMapKeyRef": {"name": "settings", "key": "mode"}}},
        {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "token"}}},
    ]
    assert await variables({"env": entries}) == {"MODE": "fast", "TOKEN": "s3cret"}


async def test_all_keys_with_a_prefix_and_env_over_them() -> None:
    container = {
        "envFrom": [{"configMapRef": {"name": "settings"}, "prefix": "S_"}, {"secretRef": {"name": "keys"}}],
        "env": [{"name": "S_level", "value": "9"}],
    }
    assert await variables(container) == {"S_mode": "fast", "S_level": "9", "token": "s3cret"}


async def test_a_missing_source_is_an_error_unless_it_is_optional() -> None:
    reference = {"name": "settings", "key": "nope"}
    with pytest.raises(ConfigError, match="couldn't find key nope in configmap settings"):
        await variables({"env": [{"name": "X", "valueFrom": {"configMapKeyRef": reference}}]})
    with pytest.raises(ConfigError, match="secret 'nope' not found"):
        await variables({"envFrom": [{"secretRef": {"name": "nope"}}]})
    optional = {"env": [{"name": "X", "valueFrom": {"configMapKeyRef": {**reference, "optional": True}}}]}
    assert await variables(optional) == {}
