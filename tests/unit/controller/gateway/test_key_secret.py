"""The keys that are valid after the Secret of a GatewayKey was read, and the content of the Secret."""

import base64
from datetime import datetime, timedelta

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.gateway.key_secret import build_key_secret, follow_key, generate_key, read_digest, replace_key
from crds.gatewaykey import MOST_PREVIOUS_KEYS, GatewayKey, GatewayKeyStatus, PreviousKey, digest_key
from crds.meta import KEY_ROTATION
from kube.client import Obj
from kube.time import rfc3339
from tests.support.api_objects import NOW
from tests.unit.controller.gateway.key_objects import gateway_key, key_secret

DAY = 86_400


def previous(digest: str, seconds: float) -> PreviousKey:
    return PreviousKey(digest=digest, valid_until=rfc3339(NOW + timedelta(seconds=seconds)))


def test_first_key_replaces_none() -> None:
    assert follow_key(GatewayKeyStatus(), "a", DAY, NOW) == ("a", [])


def test_former_key_is_valid_for_the_overlap() -> None:
    valid = follow_key(GatewayKeyStatus(digest="a", previous=[previous("z", 60)]), "b", DAY, NOW)
    assert valid == ("b", [previous("a", DAY), previous("z", 60)])
    assert valid.next_end == NOW + timedelta(seconds=60)


def test_former_key_ends_at_once_without_overlap() -> None:
    status = GatewayKeyStatus(digest="a", previous=[previous("z", 60)])
    assert follow_key(status, "b", 0, NOW) == ("b", [])


def test_smaller_overlap_shortens_the_time_of_replaced_keys() -> None:
    status = GatewayKeyStatus(digest="b", previous=[previous("a", DAY)])
    assert follow_key(status, "b", 600, NOW) == ("b", [previous("a", 600)])
    assert follow_key(status, "b", 0, NOW) == ("b", [])


def test_replaced_key_ends_when_its_time_is_over() -> None:
    status = GatewayKeyStatus(digest="b", previous=[previous("a", 1), previous("z", 0)])
    assert follow_key(status, "b", DAY, NOW) == ("b", [previous("a", 1)])


def test_key_that_comes_back_is_no_previous_one() -> None:
    status = GatewayKeyStatus(digest="b", previous=[previous("a", 60)])
    assert follow_key(status, "a", DAY, NOW) == ("a", [previous("b", DAY)])


def test_secret_without_a_key_ends_the_former_one_after_the_overlap() -> None:
    assert follow_key(GatewayKeyStatus(digest="a"), "", DAY, NOW) == ("", [previous("a", DAY)])


def test_key_of_another_is_valid_at_no_time() -> None:
    status = GatewayKeyStatus(digest="a", previous=[previous("z", 60)])
    assert follow_key(status, "", DAY, NOW, foreign=("a", "z")) == ("", [])


@given(
    st.lists(st.tuples(st.sampled_from("abcdefg"), st.integers(0, 3 * DAY)), max_size=12),
    st.integers(0, 2 * DAY),
)
def test_no_key_is_valid_for_longer_than_the_overlap_after_its_replacement(
    changes: list[tuple[str, int]], overlap_seconds: int
) -> None:
    """Whatever the Secret has at which time, and however often it is read."""
    now, status = NOW + timedelta(milliseconds=300), GatewayKeyStatus()
    replaced_at: dict[str, datetime] = {}
    for digest, pause_seconds in changes:
        now += timedelta(seconds=pause_seconds)
        valid = follow_key(status, digest, overlap_seconds, now)
        if status.digest != digest:
            replaced_at[status.digest] = now
        assert valid.digest == digest
        assert len(valid.previous) <= MOST_PREVIOUS_KEYS
        assert follow_key(status_of(valid), digest, overlap_seconds, now) == valid
        for key in valid.previous:
            assert key.digest != digest
            end = datetime.fromisoformat(key.valid_until)
            assert now < end <= replaced_at[key.digest] + timedelta(seconds=overlap_seconds + 1)
        recent = {
            key
            for key, moment in replaced_at.items()
            if key not in {"", digest} and moment + timedelta(seconds=overlap_seconds) > now
        }
        kept = {key.digest for key in valid.previous}
        assert kept >= recent or len(kept) == MOST_PREVIOUS_KEYS
        status = status_of(valid)


def status_of(valid: tuple[str, list[PreviousKey]]) -> GatewayKeyStatus:
    digest, keys = valid
    return GatewayKeyStatus(digest=digest, previous=keys)


def test_keys_are_random_and_recognisable() -> None:
    keys = {generate_key("team") for _ in range(100)}
    assert len(keys) == 100
    assert {(key[:7], len(key)) for key in keys} == {("pomona-", 59)}


def test_key_that_was_made_for_another_namespace_is_none() -> None:
    """So a thief gets nothing of a leaked key, once its owner has withdrawn it."""
    made = generate_key("team")
    assert read_digest(key_secret(made, namespace="team"))
    assert not read_digest(key_secret(made, namespace="thieves"))


@pytest.mark.parametrize(
    ("text", "is_key"),
    [("k" * 32, True), (" " + "k" * 32 + "\n", True), ("k" * 31, False), ("k" * 16 + " " + "k" * 16, False)],
)
def test_key_of_a_user_is_long_and_fits_into_a_header(text: str, is_key: bool) -> None:
    assert read_digest(key_secret(text)) == (digest_key(text.strip()) if is_key else "")


@pytest.mark.parametrize("data", [None, {}, {"key": None}, {"key": base64.b64encode(b"\xff" * 40).decode()}])
def test_secret_without_a_text_has_no_key(data: Obj | None) -> None:
    assert read_digest(key_secret("k" * 32) | {"data": data}) == ""


def test_replaced_key_leaves_what_else_the_secret_has() -> None:
    secret = key_secret("k" * 32)
    secret["metadata"]["annotations"] = {"owner": "me"}
    secret["data"]["note"] = "Zm9v"
    test, annotations, data = replace_key(secret, "n" * 32, "r1").operations
    assert test == {"op": "test", "path": "/metadata/resourceVersion", "value": "5"}
    assert annotations["value"] == {"owner": "me", KEY_ROTATION: "r1"}
    assert data["value"] == {"note": "Zm9v", "key": base64.b64encode(b"n" * 32).decode()}


def test_secret_belongs_to_its_key_and_notes_the_request_for_which_it_was_made() -> None:
    key = msgspec.convert(gateway_key(rotate="monday"), GatewayKey)
    resource, secret = build_key_secret(key, "k" * 32)
    metadata = secret["metadata"]
    assert (resource.kind, metadata["name"], secret["type"]) == ("Secret", "app-key", "Opaque")
    assert [(owner["kind"], owner["uid"]) for owner in metadata["ownerReferences"]] == [("GatewayKey", "uid-app")]
    assert "monday" not in str(secret)
    assert metadata["annotations"][KEY_ROTATION]
