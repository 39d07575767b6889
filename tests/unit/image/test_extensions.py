"""The modules that the image has compiled: what mypyc would get wrong without a word is in none of them."""

import ast
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.controlplane.process import CHECKOUT

TEXT = (CHECKOUT / "deploy/image/extensions.py").read_text()
PACKAGES: list[str] = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["tool"]["importlinter"]["root_packages"]
PRODUCT = [path for package in PACKAGES for path in sorted((CHECKOUT / package).rglob("*.py"))]
STRUCTS = {"Struct", "ApiStruct", "EventRecord"}
COMPILED = [CHECKOUT / name for name in re.findall(r'"(gateway/\w+/\w+\.py)"', TEXT)]


def list_classes(path: Path) -> Iterator[tuple[ast.ClassDef, set[str]]]:
    """Yield each class of a module with the names of its bases."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef):
            yield node, {ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases}


def test_compiled_modules_exist() -> None:
    assert len(COMPILED) > 20
    assert [path for path in COMPILED if not path.exists()] == []


def test_compiled_class_has_no_arguments_that_would_be_dropped() -> None:
    classes = [(path.name, node, bases) for path in COMPILED for node, bases in list_classes(path)]
    assert len(classes) > 20
    assert [(name, node.name) for name, node, bases in classes if node.keywords or bases & STRUCTS] == []


def test_no_interpreted_class_extends_a_compiled_one() -> None:
    places: defaultdict[str, set[Path]] = defaultdict(set)
    for path in PRODUCT:
        for node, _ in list_classes(path):
            places[node.name].add(path)
    compiled = set(COMPILED)
    found = [
        (path.name, node.name, base)
        for path in PRODUCT
        if path not in compiled
        for node, bases in list_classes(path)
        for base in bases
        if places[base] & compiled
    ]
    assert found == []


def test_nothing_is_decoded_to_a_compiled_class() -> None:
    """Their fields have no types any more, by which msgspec would choose between a list and a tuple."""
    decoded = [
        (path.name, ast.unparse(call))
        for path in COMPILED
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith(("Decoder", "convert"))
        for name in ast.walk(call)
        if isinstance(name, ast.Name) and name.id in {node.name for node, _ in list_classes(path)}
    ]
    assert decoded == []
