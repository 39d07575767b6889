"""Promises of the documentation about env, envFrom, the downward API, command and args."""

import base64
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.controlplane.kubelet.environment import (
    ConfigError,
    command,
    expand,
    field,
    resolve,
)

POD: dict[str, Any] = {
    "metadata": {
        "name": "web",
        "namespace": "shop",
        "uid": "u-1",
    },
    "spec": {"nodeName": "node-1", "serviceAccountName": "robot", "containers": []},
}
ADDRESSES = {"status.podIP": "10.77.1.10", "status.hostIP": "10.77.0.11"}
OBJECTS = {
    ("secrets", "keys"): {"data": {"token": base64.b64encode(b"s3cret").decode()}},
}


async def lookup(kind: str, name: str) -> dict[str, Any] | None:
    return OBJECTS.get((kind, name))


async def variables(container: dict[str, Any], **base: str) -> dict[str, str]:
    return await resolve(container, POD, base, addresses=ADDRESSES, lookup=lookup)


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
    environment = await variables({"env": entries})
    assert (environment["LATE"], environment["URL"]) == ("$(PORT)", "http://h:80")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("metadata.name", "web"),
        ("metadata.namespace", "shop"),
        ("metadata.uid", "u-1"),
        ("spec.nodeName", "node-1"),
        ("spec.serviceAccountName", "robot"),
        ("status.podIP", "10.77.1.10"),
        ("status.hostIP", "10.77.0.11"),
    ],
)
async def test_fields_of_the_pod_are_read(path: str, value: str) -> None:
    assert field(POD, path, ADDRESSES) == value
    environment = await variables({"env": [{"name": "X", "valueFrom": {"fieldRef": {"fieldPath": path}}}]})
    assert environment == {"X": value}


def test_an_unsupported_field_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"status\.nope"):
        field(POD, "status.nope", ADDRESSES)


async def test_a_missing_source_is_an_error_unless_it_is_optional() -> None:
    def read(name: str, key: str, **more: bool) -> dict[str, Any]:
        return {"env": [{"name": "X", "valueFrom": {"secretKeyRef": {"name": name, "key": key, **more}}}]}

    assert await variables(read("keys", "token")) == {"X": "s3cret"}
    with pytest.raises(ConfigError, match="couldn't find key nope in secret keys"):
        await variables(read("keys", "nope"))
    with pytest.raises(ConfigError, match="secret 'nope' not found"):
        await variables(read("nope", "token"))
    assert await variables(read("keys", "nope", optional=True)) == {}
