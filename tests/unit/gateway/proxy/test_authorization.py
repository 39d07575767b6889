"""The headers that admit a request to a listener, without a network; test_forwarding.py tests the running proxy."""

import pytest

from gateway.http.headers import Headers
from gateway.proxy import authorization
from gateway.proxy.errors import RequestError


def authorize(headers: dict[str, str], token: str | None) -> None:
    authorization.authorize(Headers((name.encode(), value.encode()) for name, value in headers.items()), token)


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
    with pytest.raises(RequestError, match=r"^a bearer token is needed") as refused:
        authorize(headers, "right")
    assert refused.value.status == 401


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8080", "127.0.0.1:8080", "127.1.2.3", "[::1]:8080"])
def test_listener_without_a_token_admits_programs_of_this_machine(host: str) -> None:
    authorize({"Host": host}, None)
    authorize({"Host": host, "Origin": "http://localhost:3000"}, None)


@pytest.mark.parametrize(
    "headers", [{}, {"Host": "evil"}, {"Host": "127.0.0.\u0661"}, {"Host": "localhost", "Origin": "https://evil"}]
)
def test_listener_without_a_token_refuses_foreign_names_and_pages(headers: dict[str, str]) -> None:
    with pytest.raises(RequestError, match="no web pages") as refused:
        authorize(headers, None)
    assert refused.value.status == 403
