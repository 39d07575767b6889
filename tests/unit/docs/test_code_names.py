"""Files and functions that docs/how-it-works.md and the map in CONTRIBUTING.md name exist."""

import re
from pathlib import Path

import pytest

from tests.controlplane.process import CHECKOUT

PAGE = (CHECKOUT / "docs" / "how-it-works.md").read_text()
STEPS: list[tuple[str, str]] = re.findall(r"^\| (\d+)\. .* \| (.*) \|$", PAGE, re.MULTILINE)
"""The rows of the tables: the number of a step, and the files with their functions."""
MAP = (CHECKOUT / "CONTRIBUTING.md").read_text().partition("\n## Where to change what\n")[2].partition("\n## ")[0]


def list_places(cell: str) -> list[tuple[str, list[str]]]:
    """Return each file of a cell with the names that follow it."""
    places: list[tuple[str, list[str]]] = []
    for name in re.findall(r"`([^`]+)`", cell):
        if name.endswith(".py"):
            places.append((name, []))
        else:
            places[-1][1].append(name)
    return places


def test_steps_are_numbered() -> None:
    numbers = [int(number) for number, _ in STEPS]
    of_request = numbers.index(1, 1)
    assert numbers == [*range(1, of_request + 1), *range(1, len(numbers) - of_request + 1)]


@pytest.mark.parametrize("cell", [cell for _, cell in STEPS])
def test_files_of_a_step_define_the_functions(cell: str) -> None:
    for path, names in list_places(cell):
        code = (CHECKOUT / path).read_text()
        parts = [part for name in names for part in name.split(".")]
        assert [part for part in parts if not re.search(rf"\b(def|class) {part}\b", code)] == [], path


def test_files_in_the_text_exist() -> None:
    named = re.findall(r"`((?:[a-z_]+/)+(?:[a-z_]+\.py)?)`", PAGE)
    assert [path for path in named if not (CHECKOUT / path).exists()] == []


@pytest.mark.parametrize("row", re.findall(r"^\| (?!to |---).*$", MAP, re.MULTILINE))
def test_files_and_names_of_a_row_of_the_map_exist(row: str) -> None:
    folder = CHECKOUT
    for name in re.findall(r"`([\w/.-]+\.(?:py|yaml|json|md)|(?:[a-z_]+/)+)`", row):
        folder = (CHECKOUT / name if name.endswith("/") else (CHECKOUT / name).parent) if "/" in name else folder
        assert (folder / Path(name).name).exists() or (CHECKOUT / name).is_dir(), name
    for name, path in re.findall(r"`(\w+)` in `([\w/]+\.py)`", row):
        assert re.search(rf"\b{name}\b", (CHECKOUT / path).read_text()), f"{name} in {path}"
