"""Checks of the engines: which there are, whether the service finds them, and whether macOS lets it run them."""

import asyncio
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import Final, NamedTuple

from devices import mac_settings, metal
from devices.tools import output
from launchd.service_definition import PROGRAM_FOLDERS
from metal_agent.doctor.finding import Finding, check_value
from metal_agent.native.process import read_last_log_lines, spawn_process
from runtimes import llama_server
from runtimes.registry import RUNTIMES

_VERSION_SECONDS: Final = 20.0
_MIB: Final = 2**20
_DEVICE: Final = re.compile(r"^\s+(?P<name>\S+: .+) \((?P<mib>[0-9]+) MiB, [0-9]+ MiB free\)$", re.MULTILINE)


class InstalledEngine(NamedTuple):
    """An engine of this host."""

    name: str
    program: str
    """Path of its program; empty for a daemon, which its owner starts."""
    version: str
    """Empty if it is not known."""
    quarantined: bool = False


def list_engines() -> list[InstalledEngine]:
    """Return the engines of this host. Blocks for seconds: each is asked for its version."""
    engines = []
    for name, runtime in RUNTIMES.items():
        if not (runtime.on_hosts and runtime.installed()):  # on_hosts: False if it runs in pods only
            continue
        launch = runtime.launch  # None for a daemon, which its owner starts
        command = launch.command() if launch else None
        program = command[0] if command else ""
        quarantined = sys.platform == "darwin" and bool(program) and mac_settings.is_quarantined(program)
        version = _read_version(launch.package if launch else "", program)
        engines.append(InstalledEngine(name, program, version, quarantined))
    return engines


def _is_ours(program: str) -> bool:
    """Return whether a program is in Pomona's own environment, where every service finds it."""
    return Path(program).is_relative_to(sys.prefix)


def _is_python(program: str) -> bool:
    """Return whether an engine is a module that this Python runs."""
    return Path(program).name.startswith("python")


def _read_version(package: str, program: str) -> str:
    """Return the version of an engine, empty if unknown: that of its package, or what its program prints.

    The package counts for an engine in Pomona's own environment. A daemon has neither.
    """
    if not program or _is_ours(program):  # without a program, it is a daemon
        try:
            return metadata.version(package) if package else ""
        except metadata.PackageNotFoundError:
            return ""

    if _is_python(program):
        return ""  # the Python would print its own version
    try:
        text = output(program, "--version", with_errors=True, timeout_seconds=_VERSION_SECONDS)
    except OSError:
        return ""
    return parse_version(text)


def parse_version(text: str) -> str:
    """Return the version in the output of `--version`: `version: 6123 (a1b2c3d)`, `ollama version is 0.12.3`."""
    match = re.search(r"\bversion:?\s+(?:is\s+)?v?(\d[\w.+-]*)", text) or re.search(r"\b(\d+(?:\.\d+)+)\b", text)
    return match[1] if match else ""


def check_engines(engines: Iterable[InstalledEngine], exists: Callable[[str], bool] = os.path.exists) -> list[Finding]:
    """Check each engine; without any, a problem that names how to install one."""
    findings = [_check_engine(engine, exists) for engine in engines]
    hints = "; or: ".join(runtime.install_hint for runtime in RUNTIMES.values() if runtime.on_hosts)
    return findings or [Finding("engines", "problem", "no engine is installed", hints)]


def _check_engine(engine: InstalledEngine, exists: Callable[[str], bool]) -> Finding:
    """Check that a service finds the program of an engine, and that macOS lets it run.

    A service does not have the PATH of its owner's shell, only `PROGRAM_FOLDERS`: a program in another folder needs a
    link in one of them, and an engine that is a module of another Python has to be installed anew. `exists` tells
    whether a path exists.
    """
    name, program = f"engine {engine.name}", engine.program
    version = f" {engine.version}" if engine.version else ", version unknown"
    if not program:
        return Finding(name, "ok", f"its owner's daemon{version}")
    if _is_ours(program):
        return Finding(name, "ok", f"in Pomona's environment{version}")
    detail = f"{program}{version}"

    # The program is outside of our environment.
    if engine.quarantined:
        fix = f"xattr -d com.apple.quarantine {shlex.quote(str(Path(program).resolve()))}"
        return Finding(name, "problem", f"{detail}, quarantined by macOS", fix)
    if not any(exists(f"{folder}/{Path(program).name}") for folder in PROGRAM_FOLDERS.split(":")):
        # A link to the Python of an environment does not find its packages. A new Mac has no /usr/local/bin.
        link = f"sudo mkdir -p /usr/local/bin && sudo ln -s {shlex.quote(program)} /usr/local/bin/"
        fix = RUNTIMES[engine.name].install_hint if _is_python(program) else link
        return Finding(name, "warning", f"{detail}, found by your PATH alone", f"a service has another PATH: {fix}")

    return Finding(name, "ok", detail)


async def check_llama(folder: Path) -> list[Finding]:
    """Start llama.cpp with --list-devices as engines are started, and check that it sees the GPU of a Mac."""
    command = llama_server.find_command()
    if command is None:
        return [Finding("llama.cpp", "unknown", "not installed", llama_server.RUNTIME.install_hint)]
    log_path = folder / "devices.log"
    environment = llama_server.build_environment(os.environ)
    ended = await spawn_process([*command, "--list-devices"], environment, log_path, folder).wait()
    text = read_last_log_lines(log_path)
    findings = [check_value("llama.cpp", " ".join(command), "exit code 0", holds=ended.code == 0)]
    if sys.platform == "darwin":
        findings.append(check_device(text, await asyncio.to_thread(metal.read)))
    return findings


def check_device(text: str, metal_facts: metal.Metal) -> Finding:
    """Check the device that llama.cpp sees; without one it would silently serve on the processor."""
    device = _DEVICE.search(text)  # the line with the name of a device and its memory in MiB
    mib = None if metal_facts.working_set_bytes is None else metal_facts.working_set_bytes // _MIB
    expected = f"the GPU, with Metal's working set of {mib} MiB"
    holds = device is not None and int(device["mib"]) == mib
    found = f"{device['name']}, {device['mib']} MiB" if device else None
    return check_value("llama.cpp's device", found, expected, holds=holds)
