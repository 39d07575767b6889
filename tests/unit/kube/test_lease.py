"""The rule by which a lease may be taken over."""

import pytest

from kube.lease import may_take


@pytest.mark.parametrize(
    ("holder", "unchanged_seconds", "may"),
    [("", 0, True), (None, 0, True), ("me", 0, True), ("other", 14.9, False), ("other", 15, True)],
)
def test_a_lease_is_taken_when_free_or_ours_or_unchanged_for_its_duration(
    holder: str | None, unchanged_seconds: float, may: bool
) -> None:
    assert may_take({"holderIdentity": holder, "leaseDurationSeconds": 15}, "me", unchanged_seconds) is may


def test_a_lease_without_content_is_free() -> None:
    assert may_take({}, "me", 0)
