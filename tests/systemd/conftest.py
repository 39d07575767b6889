"""The real systemd that the tests of this folder install the agent into."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.systemd.nested_systemd import NestedSystemd, find_obstacle


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[NestedSystemd]:
    assert find_obstacle() == ""
    nested = NestedSystemd(tmp_path)
    try:
        nested.start()
        yield nested
    finally:
        nested.stop()
