"""Conventions of CONTRIBUTING.md that a machine can check, over all of the product's code and its tests."""

import ast
import functools
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.controlplane.process import CHECKOUT

PACKAGES: list[str] = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["tool"]["importlinter"]["root_packages"]
PRODUCT = [path for package in PACKAGES for path in sorted((CHECKOUT / package).rglob("*.py"))]
TESTS = [path for folder in ("tests", "benchmarks") for path in sorted((CHECKOUT / folder).rglob("*.py"))]
MOST_LINES_OF_A_FILE = 500
MOST_LINES_OF_A_FUNCTION = 60
SAYS_NOTHING = {"utils", "util", "helpers", "helper", "common", "manager", "misc"}
RIDDLES = re.compile(r"(What|Whether|Have|Let|How|Who|Whom|Whose|Of) ")
LOG_LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def where(path: Path, node: ast.stmt | ast.expr) -> str:
    return f"{path.relative_to(CHECKOUT)}:{node.lineno}"


def docstrings(tree: ast.Module) -> Iterator[str]:
    """Return the docstrings of modules, classes and functions, and the strings that describe attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value


def test_public_class_is_unique() -> None:
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path in PRODUCT:
        for node in parse(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(where(path, node))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_docstring_is_a_noun_or_begins_with_a_verb() -> None:
    riddles = [
        f"{path.relative_to(CHECKOUT)}: {text.splitlines()[0]}"
        for path in (*PRODUCT, *TESTS)
        for text in docstrings(parse(path))
        if RIDDLES.match(text)
    ]
    assert riddles == []


@pytest.mark.parametrize("paths", [PRODUCT, TESTS], ids=["product", "tests"])
def test_file_has_a_docstring_and_is_not_too_long(paths: list[Path]) -> None:
    silent = [path for path in paths if path.stat().st_size and not ast.get_docstring(parse(path))]
    assert [str(path.relative_to(CHECKOUT)) for path in silent] == []
    lines = {str(path.relative_to(CHECKOUT)): len(path.read_text().splitlines()) for path in paths}
    assert {name: count for name, count in lines.items() if count > MOST_LINES_OF_A_FILE} == {}


def test_function_fits_on_a_screen() -> None:
    long = [
        f"{where(path, node)} {node.name}: {node.end_lineno - node.lineno + 1} lines"
        for path in PRODUCT
        for node in ast.walk(parse(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno
        and node.end_lineno - node.lineno >= MOST_LINES_OF_A_FUNCTION
    ]
    assert long == []


def test_module_name_is_specific() -> None:
    assert [str(path) for path in PRODUCT + TESTS if SAYS_NOTHING & {path.stem, path.parent.name}] == []


def log_calls() -> Iterator[tuple[str, ast.Call]]:
    """Yield every call like `log.info(...)` of the product, with its place."""
    for path in PRODUCT:
        for node in ast.walk(parse(path)):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in LOG_LEVELS
                and re.search(r"\blog$", ast.unparse(node.func.value))
            ):
                yield where(path, node), node


def test_log_event_is_snake_case() -> None:
    """An event is a constant that can be searched for; variable values are separate fields."""
    prose = [
        f"{place} {ast.unparse(call.args[0])}"
        for place, call in log_calls()
        if not re.fullmatch(r"'[a-z][a-z0-9]*(_[a-z0-9]+)*'", ast.unparse(call.args[0]))
    ]
    assert prose == []


def test_log_field_is_not_overwritten() -> None:
    """The processors of cli/log.py set these keys, so a field of the same name would be lost silently."""
    lost = [
        f"{place} {keyword.arg}="
        for place, call in log_calls()
        for keyword in call.keywords
        if keyword.arg in {"level", "event", "timestamp", "exception"}
    ]
    assert lost == []


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_path_in_a_document_exists(document: str) -> None:
    """A text in backticks with a slash and without a space is a path: `controller/placement/`."""
    named = re.findall(r"`((?:[a-z_]+/)+(?:[a-z_]+\.(?:py|json|md|yaml))?)`", (CHECKOUT / document).read_text())
    assert named, "the pattern finds nothing"
    assert [path for path in named if not (CHECKOUT / path).exists()] == []
