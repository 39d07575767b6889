"""The page of the API names the paths that the proxy serves."""

import re

from gateway.proxy.paths import INFERENCE
from tests.controlplane.process import CHECKOUT

PAGE = (CHECKOUT / "docs" / "api.md").read_text()


def test_page_has_each_path_once() -> None:
    table = PAGE.split("| path | what |")[1].split("\n\n")[0]
    paths = [path for row in table.splitlines() for path in re.findall(r"`(/[\w/]+)`", row.split("|")[1])]
    assert sorted(paths) == sorted(INFERENCE)
