"""The headers that admit a request to a listener, without a network; test_forwarding.py tests the running proxy."""

import pytest

from gateway.http.headers import Headers
from gateway.proxy import inference_head
from gateway.proxy.config import ServiceListener
from gateway.proxy.errors import RequestError


def authorize(headers: dict[str, str], *tokens: str) -> None:
    """Authorize a request; without tokens the listener needs none."""
    sent = Headers((name.encode(), value.encode()) for name, value in headers.items())
    inference_head.authorize(sent, tokens or None)


def test_token_that_was_replaced_admits_until_its_end() -> None:
    listener = ServiceListener("ns/tiny", "127.0.0.1", 1, "new", previous_token="old", previous_token_until=100.0)
    for token in ("new", "old"):
        authorize({"Authorization": f"Bearer {token}"}, *listener.valid_tokens(99.9))
    authorize({"Authorization": "Bearer new"}, *listener.valid_tokens(100.0))
    for now, token in ((99.9, "older"), (100.0, "old")):
        with pytest.raises(RequestError, match="bearer token is missing"):
            authorize({"Authorization": f"Bearer {token}"}, *listener.valid_tokens(now))
    assert "old" not in repr(listener)


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer right"},
        {"Authorization": "bearer right"},
        {"X-Api-Key": "right"},
        {"Authorization": "Basic x", "X-Api-Key": "right"},
    ],
)
def test_the_token_admits(headers: dict[str, str]) -> None:
    authorize(headers, "right")


@pytest.mark.parametrize(
    "headers", [{}, {"Authorization": "Bearer wrong", "X-Api-Key": "right"}, {"X-Api-Key": ""}, {"Host": "localhost"}]
)
def test_any_other_header_is_refused_without_a_name_of_what_is_served(headers: dict[str, str]) -> None:
    with pytest.raises(RequestError, match=r"^the bearer token is missing or wrong") as refused:
        authorize(headers, "right")
    assert refused.value.status == 401


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8080", "127.0.0.1:8080", "127.1.2.3", "[::1]:8080"])
def test_listener_without_a_token_admits_programs_of_this_machine(host: str) -> None:
    authorize({"Host": host})
    authorize({"Host": host, "Origin": "http://localhost:3000"})


@pytest.mark.parametrize(
    "headers", [{}, {"Host": "evil"}, {"Host": "127.0.0.\u0661"}, {"Host": "localhost", "Origin": "https://evil"}]
)
def test_listener_without_a_token_refuses_foreign_names_and_pages(headers: dict[str, str]) -> None:
    with pytest.raises(RequestError, match="no web pages") as refused:
        authorize(headers)
    assert refused.value.status == 403
