"""Services that a GatewayKey may use: patterns come from tenants, and cost no more than their length."""

import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crds.gatewaykey import GatewayKeySpec, digest_key, may_use, read_expiry_seconds

LETTERS = st.text("ab-", max_size=8)
PATTERNS = st.lists(LETTERS, min_size=1, max_size=5).map("*".join)


def test_key_uses_all_services_of_its_namespace_without_patterns() -> None:
    assert may_use("team", (), "team", "chat", ())
    assert not may_use("team", (), "other", "chat", ())


def test_service_admits_keys_of_other_namespaces() -> None:
    assert may_use("team", (), "shared", "chat", ("team",))
    assert may_use("team", (), "shared", "chat", ("*",))
    assert not may_use("team", (), "shared", "chat", ("te*",)), "names of namespaces are no patterns"


@pytest.mark.parametrize(
    ("pattern", "uses"),
    [
        ("chat", {"team/chat"}),
        ("chat-*", {"team/chat-1", "team/chat-1-b"}),
        ("*", {"team/chat", "team/chat-1", "team/chat-1-b"}),
        ("*-*b", {"team/chat-1-b"}),
        ("shared/chat", {"shared/chat"}),
        ("shared/*", {"shared/chat", "shared/chat-1"}),
        ("*/chat", {"team/chat", "shared/chat"}),
        ("*/*", {"team/chat", "team/chat-1", "team/chat-1-b", "shared/chat", "shared/chat-1"}),
        ("closed/*", set()),
        ("sha*chat", set()),
        ("c*t*t", set()),
        ("chat**1", {"team/chat-1"}),
    ],
)
def test_pattern_names_services_that_the_namespace_may_use(pattern: str, uses: set[str]) -> None:
    services = {
        **dict.fromkeys(("team/chat", "team/chat-1", "team/chat-1-b"), ()),
        **dict.fromkeys(("shared/chat", "shared/chat-1"), ("team",)),
        "closed/chat": ("others",),
    }
    found = set()
    for service, access in services.items():
        namespace, name = service.split("/")
        if may_use("team", ("none", pattern), namespace, name, access):
            found.add(service)
    assert found == uses


def glob(pattern: str, text: str) -> bool:
    """Decide the same letter by letter, without any speed."""
    if not pattern:
        return not text
    if pattern[0] == "*":
        return any(glob(pattern[1:], text[end:]) for end in range(len(text) + 1))
    return text[:1] == pattern[0] and glob(pattern[1:], text[1:])


@given(PATTERNS, LETTERS)
def test_star_stands_for_any_letters(pattern: str, name: str) -> None:
    assert may_use("team", (pattern,), "team", name, ()) == glob(pattern, name)


def test_hostile_patterns_cost_little() -> None:
    """As regular expressions they would take years."""
    hostile = tuple("*".join("a" * 62) + "*" + "b" * number for number in range(1, 65))
    started = time.process_time()
    for _ in range(100):
        assert not may_use("team", hostile, "team", "a" * 63, ())
    assert time.process_time() - started < 1


def test_digest_is_that_of_the_key_as_clients_send_it() -> None:
    assert digest_key("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (None, math.inf),
        ("1970-01-02T00:00:00Z", 86_400),
        ("1970-01-02t00:00:00.5z", 86_400.5),
        ("1970-01-01T01:00:00.123456789+01:00", 0.123456),
        ("1970-01-02T00:00:60Z", -math.inf),
        ("1970-01-02T00:00:00x5Z", -math.inf),
    ],
)
def test_time_that_cannot_be_read_has_passed(text: str | None, seconds: float) -> None:
    """The API server takes more than Python: a key with such a time is valid no more, rather than for ever."""
    assert read_expiry_seconds(GatewayKeySpec(expires_at=text)) == pytest.approx(seconds)
