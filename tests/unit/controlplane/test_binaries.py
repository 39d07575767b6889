"""The search for the control plane's programs: compatible ones of the machine, the cache, the build."""

import re
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.controlplane import binaries
from tests.controlplane.binaries import (
    MODULE,
    STAGED,
    Pins,
    derive_go_mod,
    ensure_binaries,
    is_compatible,
    parse_minor_version,
    read_pins,
)
from tests.controlplane.go_build import BuildError, is_new_enough

VERSIONS = st.tuples(st.integers(0, 9), st.integers(0, 99), st.integers(0, 99))


def test_versions_come_from_go_mod() -> None:
    pins = read_pins((MODULE / "go.mod").read_text())

    assert pins.kubernetes.startswith("1.35.")
    assert pins.etcd.startswith("3.6.")
    assert pins.version_of("etcd") == pins.etcd
    assert pins.version_of("kubectl") == pins.kubernetes
    assert pins.kubernetes in pins.key
    assert pins.etcd in pins.key


def test_all_staging_modules_are_of_the_same_release() -> None:
    text = (MODULE / "go.mod").read_text()
    replaced = [line.split("=>")[1].split() for line in text.splitlines() if "=>" in line]

    assert len(replaced) > 20
    assert {version for _, version in replaced} == {f"v0.{read_pins(text).kubernetes.removeprefix('1.')}"}


@pytest.mark.parametrize(
    ("says", "version"),
    [
        ("Kubernetes v1.35.4\n", (1, 35)),
        ("etcd Version: 3.6.5\nGit SHA: 1234\n", (3, 6)),
        ("Client Version: v1.34.0\nKustomize Version: v5.7.1\n", (1, 34)),
        ("Kubernetes v0.0.0-master+$Format:%H$\n", (0, 0)),
        ("command not found", None),
    ],
)
def test_version_is_parsed_from_a_programs_output(says: str, version: tuple[int, int] | None) -> None:
    assert parse_minor_version(says) == version


@given(VERSIONS, VERSIONS)
def test_same_minor_version_is_compatible_and_for_kubectl_one_apart(
    found: tuple[int, int, int], wanted: tuple[int, int, int]
) -> None:
    says, text = f"v{found[0]}.{found[1]}.{found[2]}", f"{wanted[0]}.{wanted[1]}.{wanted[2]}"

    assert is_compatible("kube-apiserver", says, text) == (found[:2] == wanted[:2])
    assert is_compatible("kubectl", says, text) == (found[0] == wanted[0] and abs(found[1] - wanted[1]) <= 1)


@pytest.mark.parametrize(
    ("says", "enough"),
    [
        ("go version go1.25.0 linux/amd64", True),
        ("go version go1.25 linux/amd64", False),
        ("go version go1.30rc1 linux/amd64", True),
        ("go version go1.24.9 linux/amd64", False),
        ("", False),
    ],
)
def test_go_must_be_new_enough(says: str, enough: bool) -> None:
    assert is_new_enough(says, "1.25.0") is enough


def program(folder: Path, name: str, says: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def empty_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with nothing on PATH, and with a cache that already has all programs."""
    pins = read_pins((MODULE / "go.mod").read_text())
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("KUBEBUILDER_ASSETS", "KUBERNETES"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "bin").mkdir()
    cached = tmp_path / "cache" / "pomona" / "controlplane" / pins.key
    cached.mkdir(parents=True)
    for name in binaries.PACKAGES:
        program(cached, name, "cached")
    return cached


def test_cached_programs_are_used(empty_machine: Path) -> None:
    assert set(vars(ensure_binaries()).values()) == {empty_machine / name for name in binaries.PACKAGES}


def test_compatible_programs_of_the_machine_come_first(
    empty_machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assets = tmp_path / "assets"
    assets.mkdir()
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(assets))
    program(assets, "etcd", "etcd Version: 3.6.99")
    program(assets, "kube-apiserver", "Kubernetes v1.34.9")
    program(tmp_path / "bin", "etcd", "etcd Version: 3.6.0")
    program(tmp_path / "bin", "kubectl", "Client Version: v1.36.1")

    binaries = ensure_binaries()

    assert binaries.etcd == assets / "etcd"
    assert binaries.kube_apiserver == empty_machine / "kube-apiserver"  # of another minor version
    assert binaries.kubectl == tmp_path / "bin" / "kubectl"


def test_only_missing_programs_are_built_and_a_failed_build_leaves_none(empty_machine: Path, tmp_path: Path) -> None:
    (empty_machine / "kubectl").unlink()
    log = tmp_path / "log"
    program(tmp_path / "bin", "go", f'go version go1.99.0 x/y\' && echo "$@" >>{log} && [ "$1" = version ] && echo \'')

    with pytest.raises(BuildError, match=r"`.*/go list` in .*controlplane failed"):
        ensure_binaries()

    assert "list -deps k8s.io/kubernetes/cmd/kubectl" in log.read_text()
    assert not (empty_machine / "kubectl").exists()


KUBERNETES_GO_MOD = """go 1.24.0
require (
	go.etcd.io/etcd/client/v3 v3.6.4
)
replace (
	k8s.io/api => ./staging/src/k8s.io/api
	k8s.io/endpointslice => ./staging/src/k8s.io/endpointslice
)
"""


def test_go_mod_of_another_version_has_the_last_patch_level_of_each_module() -> None:
    assert STAGED.findall(KUBERNETES_GO_MOD) == ["k8s.io/api", "k8s.io/endpointslice"]
    available = {"k8s.io/api": ["v0.34.3", "v0.34.4", "v0.34.5"], "k8s.io/endpointslice": ["v0.34.2", "v0.35.0"]}
    derived = derive_go_mod("1.34.4", KUBERNETES_GO_MOD, available)
    assert read_pins(derived) == Pins(go="1.24.0", kubernetes="1.34.4", etcd="3.6.4")
    assert re.findall(r"=> (\S+ \S+)", derived) == ["k8s.io/api v0.34.4", "k8s.io/endpointslice v0.34.2"]
    with pytest.raises(BuildError, match=r"k8s.io/endpointslice has no version v0\.34\.1 or before"):
        derive_go_mod("1.34.1", KUBERNETES_GO_MOD, {"k8s.io/endpointslice": ["v0.34.2", "v0.33.9"]})


def test_programs_of_another_version_are_asked_for_by_a_variable(
    empty_machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pins = read_pins((MODULE / "go.mod").read_text())
    monkeypatch.setenv("KUBERNETES", pins.kubernetes)
    assert ensure_binaries().etcd == empty_machine / "etcd"
    module = empty_machine.parent / "module-1.34.4"
    module.mkdir()
    (module / "go.mod").write_text(derive_go_mod("1.34.4", KUBERNETES_GO_MOD, {}))
    (module / "go.sum").touch()
    other = empty_machine.parent / read_pins((module / "go.mod").read_text()).key
    other.mkdir()
    for name in binaries.PACKAGES:
        program(other, name, "cached")
    monkeypatch.setenv("KUBERNETES", "1.34.4")
    assert set(vars(ensure_binaries()).values()) == {other / name for name in binaries.PACKAGES}
    monkeypatch.setenv("KUBERNETES", "v1.34")
    with pytest.raises(BuildError, match=r"KUBERNETES=v1\.34 is no version of Kubernetes: give one such as 1\."):
        ensure_binaries()
