"""The fixture of all tests of probes: a PATH without vendors' tools, and probes that remember nothing."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from devices.node import nvidia, processor, vendor_tool
from tests.unit.devices.node.stand_ins import ToolFolder


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ToolFolder]:
    nvidia._refused_fields.clear()
    nvidia._links.clear()
    processor.read_processor.cache_clear()
    yield ToolFolder(tmp_path, monkeypatch)
    for process in vendor_tool._hung.values():
        process.wait(10)
    vendor_tool._hung.clear()
