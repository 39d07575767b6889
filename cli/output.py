"""Output of commands: tables that fit the terminal, and the objects of the API as JSON, YAML or names."""

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import click

from cli.api_objects import Obj
from cli.options import Decorator
from crds.text import escape_controls

DATA_FORMATS: Final = frozenset({"json", "yaml"})
"""Formats for programs, which every command that prints facts has."""
WIDTH: Final = 80
"""Columns of output that goes to no terminal."""
_GAP: Final = "  "
_LEAST_WIDTH: Final = 4
"""Letters that are left of a cell that is cut."""
_UNLIMITED: Final = 1_000_000
"""Width of lines that are not wrapped."""
_JSON_ESCAPES: Final = {code: f"\\u{code:04x}" for code in range(0x7F, 0xA0)}
"""The control characters that JSON leaves as they are, and a terminal does not."""
_UNITS: Final = (("d", 86400), ("h", 3600), ("m", 60))

output_option = click.option(
    "--output",
    "-o",
    "output_format",
    type=click.Choice(["table", "wide", "json", "yaml", "name"]),
    default="table",
    show_default=True,
    help="table fits the terminal; wide has more columns and cuts nothing.",
)
"""Option of the commands that list objects."""


def facts_option(default: str, *others: str) -> Decorator:
    """Return the option of a command that prints facts: as `default` for people, or as JSON or YAML for programs.

    The command gets the chosen form as `output_format`; those for people are, for example, a text, a table or a tree.

    Args:
        default: the form for people.
        others: further forms for people.
    """
    return click.option(
        "--output",
        "-o",
        "output_format",
        type=click.Choice([default, *others, "json", "yaml"]),
        default=default,
        show_default=True,
    )


def print_note(text: str) -> None:
    """Print a line on standard error that quotes others, as `escape_controls` shows it."""
    click.echo(escape_controls(text), err=True)


def dim(text: str) -> str:
    """Return text that a terminal shows dimly; the text alone if NO_COLOR is set, or TERM is of a dumb terminal."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") == "dumb":
        return text
    return f"\033[2m{text}\033[0m"


def print_asked(who: str) -> None:
    """Print on standard error who was asked, a `pomona up` or a cluster; dimly on a terminal."""
    line = escape_controls(who)
    click.echo(dim(line) if sys.stderr.isatty() else line, err=True)


def show_raw(text: str) -> str:
    """Return text that a file or another program gets as it is, and a terminal without control characters."""
    return escape_controls(text) if sys.stdout.isatty() else text


@dataclass(frozen=True, slots=True)
class TableColumn:
    """One column of a table of objects."""

    title: str
    read: Callable[[Obj], str]
    is_wide: bool = False
    """Only in wide tables."""
    is_name: bool = False
    """Cut only when nothing else can be cut any more."""


def print_objects(objects: Sequence[Obj], columns: Sequence[TableColumn], output_format: str, *, empty: str) -> None:
    """Print a list of objects; `empty` is the line for an empty table."""
    match output_format:
        case "json" | "yaml":
            print_manifests(build_list(objects), output_format)
        case "name":
            for manifest in objects:
                print(name_of(manifest))
        case "table" | "wide":
            if not objects:
                print(empty, file=sys.stderr)
                return
            # `wide` has further columns (is_wide), and cuts no cell; `name` above prints kind and name alone.
            shown = [column for column in columns if output_format == "wide" or not column.is_wide]
            rows = [[column.read(manifest) for column in shown] for manifest in objects]
            names = {number for number, column in enumerate(shown) if column.is_name}
            width = None if output_format == "wide" else progress_width()
            print(render_table([column.title for column in shown], rows, width, names))


def build_list(objects: Iterable[Obj]) -> Obj:
    """Return the objects as a List, as kubectl prints them."""
    return {"apiVersion": "v1", "kind": "List", "items": [without_managed_fields(manifest) for manifest in objects]}


def print_manifests(obj: Obj | Sequence[Obj], output_format: str) -> None:
    """Print one object, or several as documents of YAML or as a List in JSON."""
    if output_format == "json":
        print_facts(obj if isinstance(obj, dict) else build_list(obj), output_format)
        return
    for number, manifest in enumerate([obj] if isinstance(obj, dict) else obj):
        if number:
            print("---")
        print_facts(manifest, output_format)


def print_facts(facts: Obj | Sequence[Obj], output_format: str) -> None:
    """Print facts for a program: one document."""
    if output_format == "json":
        # _JSON_ESCAPES writes control characters that JSON leaves as they are as \u escapes.
        print(json.dumps(facts, indent=2, ensure_ascii=False).translate(_JSON_ESCAPES))
        return
    import yaml  # noqa: PLC0415 - not needed for tables

    print(yaml.safe_dump(facts, sort_keys=False, allow_unicode=True, width=10_000), end="")


def without_managed_fields(obj: Obj) -> Obj:
    """Return the object without the owners of its fields, which are longer than the object, as kubectl prints it."""
    metadata = {name: value for name, value in obj.get("metadata", {}).items() if name != "managedFields"}
    return {**obj, "metadata": metadata}


def name_of(obj: Obj) -> str:
    """Return an object as kubectl names it: inferenceservice.inference.pomona.dev/chat."""
    group = str(obj["apiVersion"]).rpartition("/")[0]
    kind = str(obj["kind"]).lower()
    return f"{kind}.{group}/{obj['metadata']['name']}" if group else f"{kind}/{obj['metadata']['name']}"


def render_table(
    titles: Sequence[str], rows: Sequence[Sequence[str]], width: int | None, name_columns: set[int]
) -> str:
    """Return a table with lines of at most `width` characters; to fit, cells of the widest columns are cut.

    Args:
        titles: the first row.
        rows: the others.
        width: the width of the terminal; None: nothing is cut.
        name_columns: numbers of the columns with names, which are cut only when no other can be cut any more.
    """
    # Line ends and blanks in a cell become one blank, and control characters visible text.
    cells = [list(titles), *([escape_controls(" ".join(cell.split())) for cell in row] for row in rows)]

    # Each column is as wide as its longest cell; the gaps between columns take a part of the width.
    widths = [max(len(row[number]) for row in cells) for number in range(len(titles))]
    if width is not None:
        _shrink(widths, width - len(_GAP) * (len(titles) - 1), name_columns)

    return "\n".join(
        _GAP.join(_cut(cell, size).ljust(size) for cell, size in zip(row, widths, strict=True)).rstrip()
        for row in cells
    )


def _shrink(widths: list[int], width: int, name_columns: set[int]) -> None:
    """Reduce the widths of columns in place until their sum is at most `width`, each time the largest by one.

    No column gets narrower than `_LEAST_WIDTH`, so the sum may stay too large. Those of `name_columns` shrink last.
    """
    other_columns = set(range(len(widths))) - name_columns
    for group in (other_columns, name_columns):
        while sum(widths) > width:
            widest = max(group, key=lambda number: widths[number], default=None)
            if widest is None or widths[widest] <= _LEAST_WIDTH:
                break
            widths[widest] -= 1


def _cut(text: str, size: int) -> str:
    """Return at most `size` letters of a text, the last of which shows that it is cut."""
    return text if len(text) <= size else text[: size - 1] + "…"


def terminal_width() -> int:
    """Return the columns of the terminal; 80 if the output goes to a file or another program."""
    return shutil.get_terminal_size((WIDTH, 24)).columns if sys.stdout.isatty() else WIDTH


def progress_width() -> int:
    """Return the columns for tables and progress: those of the terminal; what a file or program gets stays whole."""
    return terminal_width() if sys.stdout.isatty() else _UNLIMITED


def wrap_text(text: str, width: int, indent: str = "", *, first: str | None = None) -> list[str]:
    """Return the text in lines of at most `width` columns, each with the indentation; `first` begins the first one.

    The text keeps its own lines, and the blanks at their beginning and between words.
    """
    # wrapped: the lines so far; while there are none, `first` begins the next one
    wrapped: list[str] = []
    for line in escape_controls(text).expandtabs().splitlines():
        # The line's own blanks at its beginning, but no more than a quarter of the width.
        line_indent = line[: len(line) - len(line.lstrip())][: width // 4]
        wrapped += textwrap.wrap(
            line.strip(),
            width,
            initial_indent=(indent if wrapped or first is None else first) + line_indent,
            subsequent_indent=indent + line_indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
    return wrapped


def age_text(timestamp: str | None, now: datetime | None = None) -> str:
    """Return the time since a timestamp of the API: 3d, 5h, 2m, 10s; empty if there is none."""
    if not timestamp:
        return ""
    return duration_text(((now or datetime.now(UTC)) - datetime.fromisoformat(timestamp)).total_seconds())


def duration_text(seconds: float) -> str:
    """Return a time in its largest unit: 3d, 5h, 2m, 10s."""
    whole = int(seconds)
    # _UNITS: letter and seconds of days, hours and minutes, the largest first
    for unit, length in _UNITS:
        if whole >= length:
            return f"{whole // length}{unit}"
    return f"{max(whole, 0)}s"
