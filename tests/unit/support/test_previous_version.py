"""The version that tests of updates start from, which a clone may lack."""

import pytest

from tests.controlplane.go_build import BuildError
from tests.support import previous_version


def test_clone_without_the_history_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(previous_version, "PREVIOUS_COMMIT", "0" * 40)
    with pytest.raises(BuildError, match=r"commit 000000000000 is not in this clone.*git fetch --unshallow"):
        previous_version.read_file("pyproject.toml")
