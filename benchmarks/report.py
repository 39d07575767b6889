"""Print figures as a table: each beside its floor and its goal."""

import sys
from collections.abc import Iterable
from typing import Final, NamedTuple

from rich.console import Console
from rich.table import Table

WIDTH: Final = 132


class Figure(NamedTuple):
    """One measured figure, in `unit`."""

    name: str
    value: float
    floor: float | None
    """The least that is possible on this machine; None: not known."""
    goal: float | None
    """The limit; None: no promise."""
    unit: str
    at_least: bool = False
    """True when `goal` is a lower limit."""

    @property
    def verdict(self) -> str:
        """The goal, and a mark if it is missed."""
        if self.goal is None:
            return ""
        held = self.value >= self.goal if self.at_least else self.value <= self.goal
        return f"{'>=' if self.at_least else '<='} {self.goal:.4g} {self.unit}{'' if held else '  MISSED'}"


def print_figures(title: str, figures: Iterable[Figure]) -> None:
    """Print the figures as a table."""
    table = Table(title=title, title_justify="left")
    for column in ("figure", "value", "floor", "ratio", "goal"):
        table.add_column(column, justify="left" if column == "figure" else "right")
    for figure in figures:
        floor, ratio = "", ""
        if figure.floor is not None:
            floor = f"{figure.floor:.2f} {figure.unit}"
            ratio = f"{figure.value / figure.floor:.2f}" if figure.floor else ""
        table.add_row(figure.name, f"{figure.value:.2f} {figure.unit}", floor, ratio, figure.verdict)
    # A log has no width of its own, and a name is best read on one line.
    Console(width=None if sys.stdout.isatty() else WIDTH).print(table)
