"""The control plane's programs: found on this machine, or built once from the Go module beside this file.

Only `go.mod` names versions; with the variable KUBERNETES, a go.mod for that version is made in the cache. Compatible
programs are taken from `KUBEBUILDER_ASSETS`, then from PATH. Other programs come from the user's cache folder, under a
key made of the versions. Absent ones are built there under a file lock, in a separate folder, and are then renamed, so
that a killed build or a second run is harmless.
"""

import contextlib
import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.controlplane.go_build import BuildError, GoModule, build, report_build

MODULE = Path(__file__).parent
PACKAGES = {
    "etcd": "go.etcd.io/etcd/server/v3",
    "kube-apiserver": "k8s.io/kubernetes/cmd/kube-apiserver",
    "kube-controller-manager": "k8s.io/kubernetes/cmd/kube-controller-manager",
    "kube-scheduler": "k8s.io/kubernetes/cmd/kube-scheduler",
    "kubectl": "k8s.io/kubernetes/cmd/kubectl",
}


ETCD_CLIENT = "go.etcd.io/etcd/client/v3"
STAGED = re.compile(r"=> \./staging/src/(\S+)")
"""Modules that k8s.io/kubernetes replaces by folders of its own tree."""


@dataclass(frozen=True)
class Binaries:
    """Paths of the programs, each able to run on this machine."""

    etcd: Path
    kube_apiserver: Path
    kube_controller_manager: Path
    kube_scheduler: Path
    kubectl: Path


@dataclass(frozen=True)
class Pins:
    """The versions that `go.mod` asks for: full versions as text, without a leading v."""

    go: str
    kubernetes: str
    etcd: str

    @property
    def key(self) -> str:
        """Name of the cache folder for exactly these versions."""
        return f"kubernetes-{self.kubernetes}-etcd-{self.etcd}-{sys.platform}-{platform.machine()}"

    def version_of(self, program: str) -> str:
        """Return the version that a program must have."""
        return self.etcd if program == "etcd" else self.kubernetes


def read_pins(go_mod: str) -> Pins:
    """Read the versions out of the text of a go.mod."""

    def find(pattern: str) -> str:
        match = re.search(pattern, go_mod, re.MULTILINE)
        if match is None:
            raise BuildError(f"{MODULE / 'go.mod'}: no line matches {pattern}")
        return match[1]

    return Pins(
        go=find(r"^go (\S+)"),
        kubernetes=find(r"^\s*k8s\.io/kubernetes v(\S+)"),
        etcd=find(r"^\s*go\.etcd\.io/etcd/server/v3 v(\S+)"),
    )


def parse_minor_version(text: str) -> tuple[int, int] | None:
    """Return the first MAJOR.MINOR in a program's output, None if there is none."""
    match = re.search(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else None


def is_compatible(program: str, output: str, required: str) -> bool:
    """Decide whether a found program can be used: same minor version, for kubectl at most one apart (version skew)."""
    version, needed = parse_minor_version(output), parse_minor_version(required)
    if version is None or needed is None or version[0] != needed[0]:
        return False
    return abs(version[1] - needed[1]) <= (1 if program == "kubectl" else 0)


def ensure_binaries() -> Binaries:
    """Return the programs; build those that are neither on this machine nor in the cache.

    Raises:
        BuildError: a program is absent and cannot be built here.
    """
    module = _find_module(os.environ.get("KUBERNETES", ""))
    pins = read_pins((module / "go.mod").read_text())
    paths = {program: path for program in PACKAGES if (path := _find_installed(program, pins.version_of(program)))}
    folder = cache_folder() / "controlplane" / pins.key
    missing = [program for program in PACKAGES if program not in paths]
    build_missing(
        module,
        {program: PACKAGES[program] for program in missing},
        folder,
        go_version=pins.go,
        variables=version_variables(pins),
    )
    paths |= {program: folder / program for program in missing}
    return Binaries(**{program.replace("-", "_"): path for program, path in paths.items()})


def _find_module(version: str) -> Path:
    """Return the folder of the go.mod for a version of Kubernetes; empty: the one beside this file.

    Raises:
        BuildError: it is no version, or Go cannot find its modules.
    """
    pins = read_pins((MODULE / "go.mod").read_text())
    if version in {"", pins.kubernetes}:
        return MODULE
    if not re.fullmatch(r"1\.\d+\.\d+", version):
        raise BuildError(f"KUBERNETES={version} is no version of Kubernetes: give one such as {pins.kubernetes}")
    folder = cache_folder() / "controlplane" / f"module-{version}"
    with lock_folder(folder):
        if not (folder / "go.sum").exists():
            caches = cache_folder() / "go"
            go = GoModule(folder, oldest_go(MODULE), caches)
            (folder / "go.mod").write_text(f"module pomona/tests/controlplane\n\ngo {pins.go}\n")
            required = go.read_go_mod(f"k8s.io/kubernetes@v{version}")
            available = go.list_versions(STAGED.findall(required))
            (folder / "go.mod").write_text(derive_go_mod(version, required, available))
            # The version may need a later Go than ours.
            GoModule(folder, oldest_go(folder), caches).write_sums(list(PACKAGES.values()))
    return folder


def derive_go_mod(version: str, required: str, available: Mapping[str, Sequence[str]]) -> str:
    """Return the go.mod that builds the programs of a version of Kubernetes.

    Args:
        version: the version, without a leading v.
        required: the go.mod of its module k8s.io/kubernetes, which names Go and the client of etcd.
        available: the versions of each staging module. Not each has been published at each patch level, and then the
            last one before serves.

    Raises:
        BuildError: a staging module has no version for it.
    """
    minor, patch = (int(number) for number in version.split(".")[1:])
    replaced = []
    for module, versions in sorted(available.items()):
        patches = [int(listed.rpartition(".")[2]) for listed in versions if re.fullmatch(rf"v0\.{minor}\.\d+", listed)]
        if not any(number <= patch for number in patches):
            raise BuildError(f"{module} has no version v0.{minor}.{patch} or before: give another KUBERNETES")
        replaced.append(f"\t{module} => {module} v0.{minor}.{max(number for number in patches if number <= patch)}")
    go, etcd = (re.search(rf"^\s*{name} v?(\S+)", required, re.MULTILINE) for name in ("go", ETCD_CLIENT))
    if go is None or etcd is None:
        raise BuildError(f"go.mod of k8s.io/kubernetes v{version} names no version of Go or of {ETCD_CLIENT}")
    requires = [f"\t{PACKAGES['etcd']} v{etcd[1]}", f"\tk8s.io/kubernetes v{version}"]
    lines = ["module pomona/tests/controlplane", "", f"go {go[1]}", "", "require (", *requires, ")"]
    return "\n".join([*lines, "", "replace (", *replaced, ")", ""])


def version_variables(pins: Pins) -> dict[str, str]:
    """Return the variables to set at link time: without them programs report v0.0.0-master, which clients refuse."""
    version = dict(zip(("gitMajor", "gitMinor"), pins.kubernetes.split("."), strict=False))
    version["gitVersion"] = f"v{pins.kubernetes}"
    return {f"k8s.io/component-base/version.{name}": value for name, value in version.items()}


def build_missing(
    module: Path,
    packages: Mapping[str, str],
    folder: Path,
    *,
    go_version: str,
    variables: Mapping[str, str] | None = None,
    tags: Sequence[str] = (),
    fetch_headers: Callable[[Path], Path] | None = None,
) -> None:
    """Build the programs that `folder` lacks; a killed build or a second one at the same time is harmless.

    Args:
        module: folder of the go.mod.
        packages: import path by name of the program.
        folder: folder for the programs, under a name that changes with the versions.
        go_version: the oldest version of Go that can be used.
        variables: string variables to set at link time, by their full names.
        tags: build tags, which choose parts of the programs.
        fetch_headers: function that fetches C headers below a folder, and returns the folder to search.

    Raises:
        BuildError: Go is absent and cannot be installed, or the build failed.
    """
    if all((folder / program).exists() for program in packages):
        return
    with lock_folder(folder):
        # Look again under the lock: another process may have built the programs in the meantime.
        absent = {program: package for program, package in packages.items() if not (folder / program).exists()}
        if not absent:
            return
        print(f"building {', '.join(absent)} into {folder}: once, it takes minutes", file=sys.stderr, flush=True)
        aside = folder / ".building"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        caches = cache_folder() / "go"
        build(
            *(module, list(absent.values()), aside),
            go_version=go_version,
            caches=caches,
            variables=variables or {},
            tags=tags,
            headers=fetch_headers(folder / ".headers") if fetch_headers else None,
        )
        for program, package in absent.items():
            # Go names a program after the last part of the import path that is not a version: `server` for etcd.
            (aside / re.sub(r"/v\d+$", "", package).rpartition("/")[2]).rename(folder / program)
        aside.rmdir()


def ensure_module_programs(
    module: Path,
    packages: Mapping[str, str],
    name: str,
    *,
    variables: Mapping[str, str] | None = None,
    tags: Sequence[str] = (),
    fetch_headers: Callable[[Path], Path] | None = None,
) -> dict[str, Path]:
    """Return the path of each program of a Go module, by its name; build those that are not in the cache.

    Args:
        module: folder of the go.mod, whose content is part of the key in the cache.
        packages: import path by name of the program.
        name: folder in the user's cache.
        variables: string variables to set at link time, by their full names.
        tags: build tags, which choose parts of the programs.
        fetch_headers: function that fetches C headers below a folder, and returns the folder to search.

    Raises:
        BuildError: a program is absent and cannot be built here.
    """
    folder = find_module_folder(module, name, variables, tags)
    build_missing(
        *(module, packages, folder),
        go_version=oldest_go(module),
        variables=variables,
        tags=tags,
        fetch_headers=fetch_headers,
    )
    return {program: folder / program for program in packages}


def find_module_folder(
    module: Path, name: str, variables: Mapping[str, str] | None = None, tags: Sequence[str] = ()
) -> Path:
    """Return the folder in the cache for the programs of a Go module, whether they are built or not."""
    go_mod = (module / "go.mod").read_text()
    key = go_mod + "".join(f"\n{variable}={value}" for variable, value in (variables or {}).items())
    key += "".join(f"\n{tag}" for tag in tags)
    digest = hashlib.sha256(key.encode()).hexdigest()[:12]
    return cache_folder() / name / f"{digest}-{sys.platform}-{platform.machine()}"


def oldest_go(module: Path) -> str:
    """Return the oldest version of Go that can build a module. Raises BuildError if its go.mod names none."""
    match = re.search(r"^go (\S+)", (module / "go.mod").read_text(), re.MULTILINE)
    if match is None:
        raise BuildError(f"{module / 'go.mod'}: no line names the version of Go")
    return match[1]


def cache_folder() -> Path:
    """Return the folder of Pomona in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pomona"


def _find_installed(program: str, required: str) -> Path | None:
    arguments = ["version", "--client"] if program == "kubectl" else ["--version"]
    for folders in (os.environ.get("KUBEBUILDER_ASSETS"), os.environ.get("PATH")):
        path = shutil.which(program, path=folders) if folders else None
        if path and is_compatible(program, _output(path, *arguments), required):
            return Path(path)
    return None


def _output(*argv: str) -> str:
    try:
        return subprocess.run(argv, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""  # a program that cannot run here is not compatible


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, which is made when absent, against other processes that build into it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"another process is building into {folder}: waiting for it", file=sys.stderr, flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    report_build(lambda: vars(ensure_binaries()))
