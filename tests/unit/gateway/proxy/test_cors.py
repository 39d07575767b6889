"""The header fields for web pages, without a network; test_router_clients.py has them in real answers."""

import pytest

from gateway.http.headers import Headers
from gateway.http.request_head import RequestHead
from gateway.proxy.cors import is_preflight, render_preflight_fields

PREFLIGHT = {"Origin": "https://a", "Access-Control-Request-Method": "POST"}


def make_headers(**fields: str) -> Headers:
    return Headers((name.replace("_", "-").encode(), value.encode()) for name, value in fields.items())


@pytest.mark.parametrize(
    ("method", "fields", "expected"),
    [
        ("OPTIONS", PREFLIGHT, True),
        ("POST", PREFLIGHT, False),
        ("OPTIONS", {"Origin": "https://a"}, False),
        ("OPTIONS", {"Access-Control-Request-Method": "POST"}, False),
    ],
)
def test_preflight_is_told_by_its_fields(method: str, fields: dict[str, str], *, expected: bool) -> None:
    assert is_preflight(RequestHead(method, "/", "", make_headers(**fields), is_http_1_0=False)) is expected


@pytest.mark.parametrize("requested", ["", "a b", "a,,b", "a,", "a:b", "a\u00e9", '"a"'])
def test_requested_fields_that_are_no_names_are_not_echoed(requested: str) -> None:
    fields = render_preflight_fields(
        make_headers(Origin="https://a", Access_Control_Request_Headers=requested), ("https://a",)
    )
    assert b"Access-Control-Allow-Headers" not in fields


@pytest.mark.parametrize(("requested", "allowed"), [("true", True), ("false", False)])
def test_page_of_a_public_address_may_ask_a_private_one(requested: str, *, allowed: bool) -> None:
    headers = make_headers(Origin="https://a", Access_Control_Request_Private_Network=requested)
    fields = render_preflight_fields(headers, ("https://a",))
    assert (b"Access-Control-Allow-Private-Network: true\r\n" in fields) is allowed
