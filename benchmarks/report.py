"""Print figures as a table: each beside its floor and its goal."""

from collections.abc import Iterable
from typing import NamedTuple

from rich.console import Console
from rich.table import Table


class Figure(NamedTuple):
    """One measured figure, in `unit`."""

    name: str
    value: float
    floor: float | None
    """The least that is possible on this machine; None: not known."""
    goal: float
    unit: str


def print_figures(title: str, figures: Iterable[Figure]) -> None:
    """Print the figures as a table."""
    table = Table(title=title, title_justify="left")
    for column in ("figure", "value", "floor", "ratio", "goal"):
        table.add_column(column, justify="left" if column == "figure" else "right")
    for each in figures:
        floor, ratio = "", ""
        if each.floor is not None:
            floor = f"{each.floor:.2f} {each.unit}"
            ratio = f"{each.value / each.floor:.2f}" if each.floor else ""
        table.add_row(each.name, f"{each.value:.2f} {each.unit}", floor, ratio, f"<= {each.goal:g} {each.unit}")
    Console().print(table)
