"""Conventions of CONTRIBUTING.md that a machine can check, over all of the product's code and its tests."""

import ast
import functools
import itertools
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TypeGuard

import pytest

from tests.controlplane.process import CHECKOUT

PACKAGES: list[str] = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["tool"]["importlinter"]["root_packages"]
PRODUCT = [path for package in PACKAGES for path in sorted((CHECKOUT / package).rglob("*.py"))]
TESTS = [path for folder in ("tests", "benchmarks") for path in sorted((CHECKOUT / folder).rglob("*.py"))]
MOST_LINES_OF_A_FILE = 500
MOST_LINES_OF_A_FUNCTION = 60
SAYS_NOTHING = {"utils", "util", "helpers", "helper", "common", "manager", "misc"}
RIDDLE = re.compile(r'^ *r?"""(?:What|Whether|Have|Let|How|Who|Whom|Whose|Of) .*', re.MULTILINE)
MODULE_DOCSTRING = re.compile(r'(?:#.*\n)*r?"""\S')
LOG_LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}


class LogCall(NamedTuple):
    """A call like `log.info("host_lost", host=name)`."""

    place: str
    event: str
    fields: list[str | None]


class FileFacts(NamedTuple):
    """Facts about a file of the product; its syntax tree would fill the memory of later tests."""

    classes: dict[str, str]
    function_lines: dict[str, int]
    log_calls: list[LogCall]
    unsafe_python_starts: list[str]


@functools.cache
def read_facts(path: Path) -> FileFacts:
    text, name = path.read_text(), path.relative_to(CHECKOUT)
    tree = ast.parse(text)
    nodes = list(statements(tree))
    return FileFacts(
        classes={node.name: f"{name}:{node.lineno}" for node in tree.body if isinstance(node, ast.ClassDef)},
        function_lines={
            f"{name}:{node.lineno} {node.name}": node.end_lineno - node.lineno + 1
            for node in nodes
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno
        },
        log_calls=[
            LogCall(f"{name}:{node.lineno}", ast.unparse(node.args[0]), [keyword.arg for keyword in node.keywords])
            for node in (ast.walk(tree) if "log." in text else ())
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in LOG_LEVELS
            and re.search(r"\blog$", ast.unparse(node.func.value))
        ],
        unsafe_python_starts=[
            f"{name}:{line}" for line in (unsafe_python_starts(tree) if "executable" in text else ())
        ],
    )


def statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yield all statements at any depth, but no expressions, of which there are many more."""
    waiting: list[ast.AST] = [tree]
    for node in waiting:
        if isinstance(node, ast.stmt):
            yield node
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            block = getattr(node, name, ())
            waiting.extend(block if isinstance(block, list) else ())  # the body of a lambda is no list


def unsafe_python_starts(tree: ast.Module) -> list[int]:
    """Return the lines where Python is named for a command, but not as `[sys.executable, "-P", ...]` or with "-I"."""
    named, safe = dict[int, int](), set[int]()
    for node in ast.walk(tree):
        if isinstance(node, ast.FormattedValue):
            safe.add(id(node.value))  # a message
        elif _is_python(node):
            named[id(node)] = node.lineno
        command = (
            node.args if isinstance(node, ast.Call) else node.elts if isinstance(node, ast.Tuple | ast.List) else ()
        )
        for program, option in itertools.pairwise(command):
            if isinstance(option, ast.Constant) and option.value in {"-P", "-I"}:
                safe.add(id(program))
    return [line for node, line in named.items() if node not in safe]


def _is_python(node: ast.AST) -> TypeGuard[ast.Attribute]:
    return isinstance(node, ast.Attribute) and node.attr == "executable" and ast.unparse(node) == "sys.executable"


def test_python_is_started_without_the_working_directory() -> None:
    """Else a file of the working directory, such as a downloaded cli.py, would be imported in place of our module."""
    assert [place for path in PRODUCT for place in read_facts(path).unsafe_python_starts] == []


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ('run([sys.executable, "-P", "-m", "cli.main"])', []),
        ('run(sys.executable, "-I", script)', []),
        ('raise Unusable(f"{sys.executable} is too old")', []),
        ('run(["/bin/sh", "-c", wrapper, sys.executable, script])', [1]),
        ('run([sys.executable, "-m", "cli.main"])', [1]),
        ("run([sys.executable])", [1]),
        ("python = sys.executable", [1]),
    ],
)
def test_start_of_python_with_the_working_directory_is_found(text: str, lines: list[int]) -> None:
    assert unsafe_python_starts(ast.parse(text)) == lines


def test_public_class_is_unique() -> None:
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path in PRODUCT:
        for name, place in read_facts(path).classes.items():
            if not name.startswith("_"):
                places[name].append(place)
    assert {name: locations for name, locations in places.items() if len(locations) > 1} == {}


def test_docstring_is_a_noun_or_begins_with_a_verb() -> None:
    riddles = {str(path.relative_to(CHECKOUT)): RIDDLE.findall(path.read_text()) for path in (*PRODUCT, *TESTS)}
    assert {name: lines for name, lines in riddles.items() if lines} == {}


@pytest.mark.parametrize("paths", [PRODUCT, TESTS], ids=["product", "tests"])
def test_file_has_a_docstring_and_is_not_too_long(paths: list[Path]) -> None:
    texts = {str(path.relative_to(CHECKOUT)): path.read_text() for path in paths}
    assert [name for name, text in texts.items() if text and not MODULE_DOCSTRING.match(text)] == []
    assert [name for name, text in texts.items() if text.count("\n") > MOST_LINES_OF_A_FILE] == []


def test_function_fits_on_a_screen() -> None:
    lines = {name: count for path in PRODUCT for name, count in read_facts(path).function_lines.items()}
    assert {name: count for name, count in lines.items() if count > MOST_LINES_OF_A_FUNCTION} == {}


def test_module_name_is_specific() -> None:
    assert [str(path) for path in PRODUCT + TESTS if SAYS_NOTHING & {path.stem, path.parent.name}] == []


def log_calls() -> list[LogCall]:
    return [call for path in PRODUCT for call in read_facts(path).log_calls]


def test_log_event_is_snake_case() -> None:
    """An event is a constant that can be searched for; variable values are separate fields."""
    events = {call.place: call.event for call in log_calls()}
    assert events
    assert {p: event for p, event in events.items() if not re.fullmatch(r"'[a-z][a-z0-9]*(_[a-z0-9]+)*'", event)} == {}


def test_log_field_is_not_overwritten() -> None:
    """The processors of cli/log.py set these keys, so a field of the same name would be lost silently."""
    set_by_processors = {"level", "event", "timestamp", "exception"}
    assert [call for call in log_calls() if set_by_processors & set(call.fields)] == []


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_path_in_a_document_exists(document: str) -> None:
    """A text in backticks with a slash and without a space is a path: `controller/placement/`."""
    named = re.findall(r"`((?:[a-z_]+/)+(?:[a-z_]+\.(?:py|json|md|yaml))?)`", (CHECKOUT / document).read_text())
    assert named, "the pattern finds nothing"
    assert [path for path in named if not (CHECKOUT / path).exists()] == []
