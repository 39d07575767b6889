"""The headers that admit a request to a listener, without a network; test_forwarding.py tests the running proxy."""

import pytest

from gateway.http.headers import Headers
from gateway.proxy import inference_head
from gateway.proxy.config import RouterListener, ServiceListener
from gateway.proxy.errors import RequestError
from gateway.proxy.router import ModelRouter


def authorize(headers: dict[str, str], *tokens: str) -> None:
    inference_head.authorize(_read_headers(headers), tokens)


def authorize_local(headers: dict[str, str], hosts: tuple[str, ...] = (), origins: tuple[str, ...] = ()) -> None:
    """Authorize a request to a router without keys."""
    router = ModelRouter()
    router.configure(RouterListener("127.0.0.1", 1, allowed_hosts=hosts, allowed_origins=origins), {})
    assert router.authorize(_read_headers(headers)) is router


def _read_headers(headers: dict[str, str]) -> Headers:
    return Headers((name.encode(), value.encode(errors="surrogateescape")) for name, value in headers.items())


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
def test_router_without_keys_admits_programs_of_this_machine(host: str) -> None:
    authorize_local({"Host": host})
    authorize_local({"Host": host, "Origin": "http://localhost:3000"})


@pytest.mark.parametrize(
    ("headers", "refusal"),
    [
        ({}, "the Host '' is not served: use localhost or 127.0.0.1, or start `pomona up` with --allow-host NAME, or"),
        ({"Host": "Evil:80"}, "the Host 'Evil:80' is not served: .* --allow-host evil, or with --api-key"),
        ({"Host": "$(id)"}, "--allow-host NAME"),
        ({"Host": "127.0.0.\u0661"}, "--allow-host NAME"),
        ({"Host": "\udcff"}, "--allow-host NAME"),
        ({"Host": "[fe80::1]:80"}, r"--allow-host \[fe80::1\], or"),
        (
            {"Host": "localhost", "Origin": "https://evil:8443"},
            "the Origin 'https://evil:8443' is not served: start `pomona up` with --allow-origin https://evil:8443$",
        ),
        ({"Host": "localhost", "Origin": "null"}, r"with --api-key and --allow-origin '\*'$"),
        ({"Host": "localhost", "Origin": "http://a b"}, r"with --api-key and --allow-origin '\*'$"),
    ],
)
def test_router_without_keys_refuses_foreign_names_and_pages_with_the_way_out(
    headers: dict[str, str], refusal: str
) -> None:
    with pytest.raises(RequestError, match=refusal) as refused:
        authorize_local(headers)
    assert (refused.value.status, refused.value.code) == (403, "foreign_origin")
    assert refused.value.body


def test_allowed_names_and_origins_are_admitted_without_a_key() -> None:
    hosts, origins = ("host.docker.internal", "[fe80::1]"), ("https://chat.example",)
    authorize_local({"Host": "Host.Docker.Internal:8080"}, hosts)
    authorize_local({"Host": "[fe80::1]:8080"}, hosts)
    authorize_local({"Host": "localhost", "Origin": "https://chat.example"}, hosts, origins)
    for headers in (
        {"Host": "host.docker.internal.evil"},
        {"Host": "host.docker.internal", "Origin": "https://evil"},
        {"Host": "localhost", "Origin": "https://chat.example:1"},
        {"Host": "evil", "Origin": "https://chat.example"},
    ):
        with pytest.raises(RequestError):
            authorize_local(headers, hosts, origins)
