"""Tables fit 80 columns, names are cut last, and objects are printed as kubectl prints them."""

import json
from datetime import UTC, datetime

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from cli.output import (
    TableColumn,
    age_text,
    dim,
    name_of,
    print_facts,
    print_objects,
    render_table,
    wrap_text,
)
from crds.text import escape_controls

SERVICE = {
    "apiVersion": "inference.pomona.dev/v1alpha1",
    "kind": "InferenceService",
    "metadata": {"name": "chat", "managedFields": [{"manager": "x"}]},
    "spec": {"modelRef": "tiny"},
}
COLUMNS = [TableColumn("NAME", lambda it: str(it["metadata"]["name"]), is_name=True)]


def test_short_table_is_printed_as_it_is() -> None:
    table = render_table(["NAME", "PHASE"], [["chat", "Ready"], ["a", ""]], 80, {0})
    assert table.splitlines() == ["NAME  PHASE", "chat  Ready", "a"]


def test_widest_columns_are_cut_and_the_name_stays() -> None:
    name, reason, model = "n" * 40, "R" * 40, "m" * 30
    lines = render_table(["NAME", "REASON", "MODEL"], [[name, reason, model]], 80, {0}).splitlines()
    assert lines[1] == f"{name}  {'R' * 17}…  {'m' * 17}…"
    assert len(lines[1]) == 80


@given(
    st.lists(st.lists(st.text("abc äß", max_size=60), min_size=4, max_size=4), max_size=4),
    st.integers(min_value=40, max_value=120),
)
def test_table_is_never_wider_than_the_terminal(rows: list[list[str]], width: int) -> None:
    for line in render_table(["NAME", "ONE", "TWO", "THREE"], rows, width, {0}).splitlines():
        assert len(line) <= width


def test_wide_table_is_not_cut() -> None:
    assert render_table(["NAME"], [["n" * 300]], None, {0}).splitlines()[1] == "n" * 300


def test_line_breaks_of_a_cell_become_blanks() -> None:
    assert render_table(["MESSAGE"], [["a\nb\t c"]], None, set()).splitlines()[1] == "a b c"


def test_objects_are_printed_as_json_yaml_and_names(capsys: pytest.CaptureFixture[str]) -> None:
    clean = {**SERVICE, "metadata": {"name": "chat"}}
    print_objects([SERVICE], COLUMNS, "json", empty="")
    assert json.loads(capsys.readouterr().out)["items"] == [clean]
    print_objects([SERVICE], COLUMNS, "yaml", empty="")
    assert yaml.safe_load(capsys.readouterr().out)["items"] == [clean]
    print_objects([SERVICE], COLUMNS, "name", empty="")
    assert capsys.readouterr().out == "inferenceservice.inference.pomona.dev/chat\n"
    assert name_of({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}}) == "pod/a"


def test_empty_list_is_said_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    print_objects([], COLUMNS, "table", empty="nothing here")
    assert capsys.readouterr() == ("", "nothing here\n")


@pytest.mark.parametrize(
    ("timestamp", "text"),
    [
        ("2026-11-21T11:59:50Z", "10s"),
        ("2026-11-21T11:00:00Z", "1h"),
        ("2026-11-18T11:00:00Z", "3d"),
        ("2026-11-21T12:00:09Z", "0s"),
        (None, ""),
    ],
)
def test_age_is_short(timestamp: str | None, text: str) -> None:
    assert age_text(timestamp, datetime(2026, 11, 21, 12, tzinfo=UTC)) == text


def test_long_words_are_not_broken() -> None:
    assert wrap_text("see http://a.example/" + "b" * 30 + " now", 20, "  ") == [
        "  see",
        "  http://a.example/" + "b" * 30,
        "  now",
    ]


def test_wrapped_text_keeps_its_own_lines_and_blanks() -> None:
    text = "it said:\n    tensor  blk.0 is missing, so that\n\n\tnothing loads\n"
    assert wrap_text(text, 30, "   ", first="-> ") == [
        "-> it said:",
        "       tensor  blk.0 is",
        "       missing, so that",
        "          nothing loads",
    ]
    assert wrap_text(" \n", 30) == []


@given(st.text(), st.integers(min_value=20, max_value=100))
def test_wrapped_text_loses_no_word(text: str, width: int) -> None:
    assert "".join("".join(wrap_text(text, width, "  ")).split()) == "".join(escape_controls(text).split())


@pytest.mark.parametrize(
    ("variables", "shown"),
    [
        ({"TERM": "xterm"}, "\033[2ma\033[0m"),
        ({"TERM": "dumb"}, "a"),
        ({}, "a"),
        ({"TERM": "xterm", "NO_COLOR": "1"}, "a"),
    ],
)
def test_thoughts_are_dim_where_that_is_wanted(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], shown: str
) -> None:
    for name in ("TERM", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert dim("a") == shown


def test_chip_of_a_hostile_host_is_shown_as_text() -> None:
    shown = render_table(["CHIP"], [["M4\x1b]52;c;Y3Vy\x07\x9b1A"]], 80, set())
    assert shown.splitlines()[1] == r"M4\x1b]52;c;Y3Vy\x07\x9b1A"


@pytest.mark.parametrize("output_format", ["json", "yaml"])
def test_facts_of_a_hostile_host_move_no_cursor_and_stay_the_same(
    capsys: pytest.CaptureFixture[str], output_format: str
) -> None:
    facts = {"chip": "M4\x1b]52;c;Y3Vy\x07\x7f\x9b1A\x85ü"}
    print_facts(facts, output_format)
    printed = capsys.readouterr().out
    assert escape_controls(printed) == printed
    assert "ü" in printed
    assert yaml.safe_load(printed) == facts
