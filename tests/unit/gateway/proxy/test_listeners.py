"""The plan from bound to desired listeners, as a pure function; and refused configurations."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.proxy.config import Backend, ProxyConfig, ServiceListener, Tls
from gateway.proxy.listeners import ListenAddress, plan_listeners

places = st.dictionaries(
    st.sampled_from(["ns/a", "ns/b", "ns/c", ""]),
    st.builds(
        ListenAddress,
        address=st.sampled_from(["127.0.0.1", "127.0.0.2"]),
        port=st.integers(18000, 18002),
        tls=st.sampled_from([None, Tls("a.pem", "a.key")]),
    ),
)


@given(bound=places, wanted=places)
def test_plan_reaches_the_desired_listeners_and_keeps_the_unchanged_ones(
    bound: dict[str, ListenAddress], wanted: dict[str, ListenAddress]
) -> None:
    change = plan_listeners(bound, wanted)
    after = {name: place for name, place in bound.items() if name not in change.unbind}
    for name in change.bind:
        assert name not in after
        after[name] = wanted[name]
    assert after == wanted
    for name, place in wanted.items():
        if bound.get(name) == place:
            assert name not in change.unbind


def decode(**service: object) -> ProxyConfig:
    whole = {"name": "ns/a", "address": "127.0.0.1", "port": 18000, "token": "t"} | service
    return msgspec.json.decode(msgspec.json.encode({"services": [whole]}), type=ProxyConfig)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("token", ""),
        ("name", ""),
        ("port", 70000),
        ("backends", [{"uid": "u", "url": "https://127.0.0.1:1"}]),
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
