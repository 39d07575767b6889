"""Draw the table of services on a terminal: no line is wider than the terminal, and the table is not higher.

Widths are computed here and not by a library, as a line that the terminal wraps, or a table that it scrolls, cannot be
drawn again in place.
"""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from rich.console import Console
from rich.text import Text

from crds.size import size_text
from standalone.row_text import describe_detail, describe_requests
from standalone.service_rows import ServiceRow

_RESTING: Final = frozenset({"Stopped", "Suspended", "Idle"})
"""Phases of services for which nothing is done."""
_STYLES: Final = {"Ready": "green", "Failed": "red", "Rejected": "red", **dict.fromkeys(_RESTING, "dim")}
_TITLES: Final = {title: title for title in ("SERVICE", "PHASE", "MEMORY", "TOKENS/S", "REQUESTS")}
_NUMBERS: Final = frozenset({"MEMORY", "TOKENS/S"})
_LEFT_OUT: Final = ("TOKENS/S", "MEMORY", "REQUESTS")
"""Columns that a narrow terminal does not show, the first one first."""
_GAP: Final = "  "
_LEAST_NAME_WIDTH: Final = 10
"""Names are not folded to less, as long as other columns can be left out."""
_PRESENT_WIDTH: Final = len(" (2 running, 3 waiting)")
"""Width that is kept beside the number of requests, so that a request that begins or ends folds no name."""


class _Block(NamedTuple):
    """The lines of one service."""

    row: ServiceRow
    facts: list[Text]
    """One line, or more if the name is folded."""
    detail: list[Text]


def draw_table(console: Console, head: str, rows: Sequence[ServiceRow], foot: str) -> Text:
    """Draw the rows between two texts. Names and messages are drawn as text, never as markup.

    A detail is below its row, as a column of details would be narrow. If the table is too high, it has no empty lines;
    then rows are left out, and the last line says how many.
    """
    titles, blocks = _draw_blocks(console, rows)
    above, below = _wrap(console, head), _wrap(console, foot, "dim")
    lines = [*above, Text(), titles, *_list_lines(blocks), Text(), *below]
    if len(lines) > console.height:
        kept = _shorten(blocks, console.height - len(above) - len(below) - 1)
        more = len(blocks) - len(kept)
        note = [Text(f"... {more} more: a higher terminal shows them"[: console.width], "dim")] if more else []
        lines = [*above, titles, *_list_lines(kept), *note, *below]
    return Text("\n", no_wrap=True).join(lines)


def _draw_blocks(console: Console, rows: Sequence[ServiceRow]) -> tuple[Text, list[_Block]]:
    """Return the line of titles, and the lines of each service."""
    cells = [_build_cells(row) for row in rows]
    widths = _choose_widths(cells, console.width)
    blocks = []
    for row, row_cells in zip(rows, cells, strict=True):
        # A name is folded after one of its hyphens, if that is possible.
        name, *rest = textwrap.wrap(row.service, widths["SERVICE"])
        is_resting = row.phase in _RESTING and not row.message
        styles = {"SERVICE": "dim" if is_resting else "bold", "PHASE": _STYLES.get(row.phase, "yellow")}
        facts = [_draw_line({**row_cells, "SERVICE": name}, widths, styles)]
        facts += [Text(part, styles["SERVICE"]) for part in rest]
        detail = _wrap(console, describe_detail(row), "" if row.message or row.note else "dim", _GAP)
        blocks.append(_Block(row, facts, detail))
    return _draw_line(_TITLES, widths, dict.fromkeys(_TITLES, "bold")), blocks


def _build_cells(row: ServiceRow) -> dict[str, str]:
    """Return the texts of a row by the title of their column."""
    rate = row.tokens_per_second
    return {
        "SERVICE": row.service,
        "PHASE": row.phase,
        "MEMORY": size_text(row.memory_bytes) if row.memory_bytes else "",
        "TOKENS/S": "" if rate is None else f"{rate:,.0f}",
        "REQUESTS": describe_requests(row),
    }


def _choose_widths(cells: Sequence[Mapping[str, str]], width: int) -> dict[str, int]:
    """Return the width of each column that is shown, by its title; names get what the others leave, and are folded."""
    widths = {title: max(len(row[title]) for row in (_TITLES, *cells)) for title in _TITLES}
    count_width = max((len(row["REQUESTS"].partition(" ")[0]) for row in cells), default=0)
    widths["REQUESTS"] = max(widths["REQUESTS"], count_width + _PRESENT_WIDTH)
    longest_name = widths.pop("SERVICE")
    least = min(longest_name, _LEAST_NAME_WIDTH)
    for title in _LEFT_OUT:
        if width - sum(widths.values()) - len(_GAP) * len(widths) >= least:
            break
        del widths[title]
    left = width - sum(widths.values()) - len(_GAP) * len(widths)
    return {"SERVICE": max(1, min(longest_name, left)), **widths}


def _draw_line(cells: Mapping[str, str], widths: Mapping[str, int], styles: Mapping[str, str]) -> Text:
    """Return the cells in one line, without blanks at its end."""
    line = Text()
    for title, width in widths.items():
        cell = cells[title].rjust(width) if title in _NUMBERS else cells[title].ljust(width)
        line.append(cell, styles.get(title)).append(_GAP)
    line.rstrip()
    return line


def _wrap(console: Console, text: str, style: str = "", indent: str = "") -> list[Text]:
    """Return a text in lines that fit the console; none if it is empty."""
    if not text:
        return []
    lines = Text(text, style).wrap(console, max(1, console.width - len(indent)))
    for line in lines:
        line.rstrip()
    return [Text.assemble(indent, line) for line in lines]


def _list_lines(blocks: Sequence[_Block]) -> list[Text]:
    """Return the lines of services, one after the other."""
    return [line for block in blocks for line in (*block.facts, *block.detail)]


def _shorten(blocks: Sequence[_Block], most_lines: int) -> list[_Block]:
    """Return blocks with so many lines at most, and one line less if some are left out.

    First the details of services without a problem are left out that serve, then services, from the last on: first
    those that rest, then others.
    """
    kept = [
        block._replace(detail=[]) if block.row.phase == "Ready" and not block.row.message + block.row.note else block
        for block in blocks
    ]
    resting = [block for block in reversed(kept) if block.row.phase in _RESTING]
    others = [block for block in reversed(kept) if block.row.phase not in _RESTING]
    for block in (*resting, *others):
        room = most_lines if len(kept) == len(blocks) else most_lines - 1
        if len(_list_lines(kept)) <= room:
            break
        kept.remove(block)
    return kept
