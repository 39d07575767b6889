"""Refusals of `make test-node` on a machine that cannot run a real node, and the removal of cgroups."""

import os
from pathlib import Path

import pytest

from tests.node import preparation, real_node
from tests.node.preparation import PreparationError


def test_ordinary_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(PreparationError, match="needs root: run `sudo make test-node`"):
        preparation.check()


def test_machine_without_cgroups_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(preparation, "CGROUPS", tmp_path)
    with pytest.raises(PreparationError, match=f"{tmp_path} has none that can be written"):
        preparation.check()


def test_machine_without_packages_or_apt_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _name: None)
    with pytest.raises(PreparationError, match=r"install buildah, containerd, .*: this machine has no apt-get"):
        preparation.install_packages()


def test_cgroups_of_a_run_are_removed_with_those_below_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hierarchies = [tmp_path / "cpu", tmp_path / "memory"]
    for folder in hierarchies:
        (folder / real_node.CGROUP / "cpu-1" / "kubepods").mkdir(parents=True)
    monkeypatch.setattr(real_node, "cgroup_folders", lambda: hierarchies)
    real_node.remove_cgroups()
    assert [list(folder.iterdir()) for folder in hierarchies] == [[], []]
