"""The page of the API names the paths that the proxy serves, and the engines that have each."""

import re

from gateway.proxy.paths import INFERENCE
from runtimes.registry import RUNTIMES
from tests.controlplane.process import CHECKOUT

PAGE = (CHECKOUT / "docs" / "api.md").read_text()


ROWS = [row.split("|")[1:-1] for row in PAGE.split("| path | what |")[1].split("\n\n")[0].splitlines()[2:]]


def test_page_has_each_path_once() -> None:
    assert sorted(path for row in ROWS for path in find_paths(row)) == sorted(INFERENCE)


def test_page_names_the_engines_that_have_a_path() -> None:
    for row in ROWS:
        for path in find_paths(row):
            served = [
                name for name, runtime in RUNTIMES.items() if any(INFERENCE[path] in r for r in runtime.routes.values())
            ]
            assert [name.strip() for name in row[2].split(",")] == served


def find_paths(row: list[str]) -> list[str]:
    return re.findall(r"`(/[\w/]+)`", row[0])
