"""The headers that admit a request to a listener, without a network; test_forwarding.py tests the running proxy."""

import pytest

from gateway.proxy.authorization import authorize
from gateway.proxy.errors import RequestError


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
    authorize(headers, "right", "service ns/tiny")


@pytest.mark.parametrize(
    "headers", [{}, {"Authorization": "Bearer wrong", "X-Api-Key": "right"}, {"X-Api-Key": ""}, {"Host": "localhost"}]
)
def test_any_other_header_is_refused_with_the_name_of_the_listener(headers: dict[str, str]) -> None:
    with pytest.raises(RequestError, match="service ns/tiny needs its bearer token") as refused:
        authorize(headers, "right", "service ns/tiny")
    assert refused.value.status == 401


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8080", "127.0.0.1:8080", "127.1.2.3", "[::1]:8080"])
def test_listener_without_a_token_admits_programs_of_this_machine(host: str) -> None:
    authorize({"Host": host}, None, "the router")
    authorize({"Host": host, "Origin": "http://localhost:3000"}, None, "the router")


@pytest.mark.parametrize("headers", [{}, {"Host": "evil"}, {"Host": "localhost", "Origin": "https://evil"}])
def test_listener_without_a_token_refuses_foreign_names_and_pages(headers: dict[str, str]) -> None:
    with pytest.raises(RequestError, match="no web pages") as refused:
        authorize(headers, None, "the router")
    assert refused.value.status == 403
