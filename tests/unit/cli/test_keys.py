"""Times of `pomona key`: what its options take, and when a key of the list ends."""

from datetime import timedelta

import pytest

from cli.key.list import COLUMNS, describe_end, describe_last_use, shorten_count
from cli.options import parse_overlap
from cli.output import render_table
from kube.client import Obj
from kube.time import rfc3339
from tests.support.api_objects import NOW


@pytest.mark.parametrize("text", ["0", "0s", "0d"])
def test_overlap_may_be_nothing(text: str) -> None:
    assert parse_overlap(text) == 0
    assert parse_overlap("2d") == 172_800


@pytest.mark.parametrize(("days", "words"), [(None, "never"), (3, "in 3d"), (0, "over"), (-3, "over")])
def test_end_of_a_key_is_told_in_words(days: float | None, words: str) -> None:
    spec = {} if days is None else {"expiresAt": rfc3339(NOW + timedelta(days=days))}
    assert describe_end({"spec": spec}, NOW) == words


def test_key_whose_end_cannot_be_read_is_over() -> None:
    assert describe_end({"spec": {"expiresAt": "2026-11-21T12:00:60Z"}}, NOW) == "over"


def test_key_without_a_spec_opens_all_and_never_ends() -> None:
    key = {"metadata": {"name": "demo"}}  # as the API server has it if nothing is stated
    cells = {column.title: column.read(key) for column in COLUMNS}
    assert (cells["SERVICES"], cells["EXPIRES"], cells["CONCURRENT"]) == ("all", "never", "")


@pytest.mark.parametrize(
    ("usage", "cells"),
    [
        (None, ("unknown", "", "")),
        ({"since": "2026-11-18T12:00:00Z", "requests": 0, "tokens": 0}, ("not in 3d", "0", "0")),
        (
            {"since": "2026-11-18T12:00:00Z", "requests": 999, "tokens": 12_399, "lastUsedAt": "2026-11-21T11:55:00Z"},
            ("5m ago", "999", "12.3k"),
        ),
    ],
)
def test_usage_of_a_key_is_described(usage: Obj | None, cells: tuple[str, str, str]) -> None:
    key = {"metadata": {"name": "demo"}, "status": {"usage": usage} if usage else {}}
    columns = {column.title: column.read for column in COLUMNS}
    assert (describe_last_use(key, NOW), columns["REQUESTS"](key), columns["TOKENS"](key)) == cells


@pytest.mark.parametrize(
    ("count", "text"), [(1000, "1.0k"), (999_999, "999.9k"), (4_560_000, "4.5M"), (12_000_000_000, "12.0G")]
)
def test_large_counts_are_short(count: int, text: str) -> None:
    assert shorten_count(count) == text


def test_list_of_busy_keys_fits_100_columns() -> None:
    condition = {"type": "Ready", "status": "True", "reason": "WaitingForKey"}
    usage = {
        "since": "2026-11-18T12:00:00Z",
        "requests": 999_999,
        "tokens": 999_999_999,
        "lastUsedAt": "2026-11-20T12:00:00Z",
    }
    key = {
        "metadata": {"name": "nightly-evaluation", "creationTimestamp": "2025-11-21T12:00:00Z"},
        "spec": {"services": ["chat-*", "embed"], "expiresAt": rfc3339(NOW + timedelta(days=365))},
        "status": {"conditions": [condition], "usage": usage},
    }
    shown = [column for column in COLUMNS if not column.is_wide]
    table = render_table([column.title for column in shown], [[column.read(key) for column in shown]], None, set())
    assert max(map(len, table.splitlines())) <= 100
