"""Refused configurations."""

import msgspec
import pytest

from gateway.proxy.config import Backend, ProxyConfig, ServiceListener


def decode(**service: object) -> ProxyConfig:
    whole = {"name": "ns/a", "address": "127.0.0.1", "port": 18000, "token": "t"} | service
    return msgspec.json.decode(msgspec.json.encode({"services": [whole]}), type=ProxyConfig)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("token", ""),
        ("name", ""),
        ("port", 70000),
        ("backends", [{"uid": "u", "url": "ftp://127.0.0.1:1"}]),
        ("backends", [{"uid": "u", "url": "http://127.0.0.1:1/path"}]),
        ("backends", [{"uid": "", "url": "http://127.0.0.1:1"}]),
    ],
)
def test_invalid_configuration_is_refused(field: str, value: object) -> None:
    with pytest.raises(msgspec.ValidationError, match=field):
        decode(**{field: value})


def test_names_and_uids_are_unique() -> None:
    service = ServiceListener("ns/a", "127.0.0.1", 18000, "t", (Backend("u", "http://127.0.0.1:1"),))
    with pytest.raises(ValueError, match="name 'ns/a' more than once"):
        ProxyConfig((service, service))
    with pytest.raises(ValueError, match="backend uid 'u' more than once"):
        ProxyConfig((service, msgspec.structs.replace(service, name="ns/b")))


def test_tokens_do_not_appear_in_a_repr() -> None:
    assert "s3cret" not in repr(ProxyConfig((ServiceListener("ns/a", "127.0.0.1", 1, "s3cret"),)))
