"""Data of llmfit, a peer that the dev environment has: its catalog, its measurements, and its estimates.

Its wheel is a program with both data sets embedded as JSON, under the MIT license (© 2026 Alex Jones). They are read
from the installed program whenever they are needed, and nothing of them is kept here. Its messages go to stderr, one of
which appears on each call with an older libc, so that only stdout is parsed.
"""

import functools
import json
import os
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any, Final

import msgspec

_SUBMISSIONS: Final = b'[{"hardware":{"cpu"'
_CATALOG_ENTRY: Final = b'"parameters_raw"'
_LONGEST_BYTES: Final = 32 * 2**20
"""Both arrays are shorter."""
_CALL_SECONDS: Final = 120


def find_program() -> Path:
    """Return the path of llmfit beside this interpreter."""
    return Path(sysconfig.get_path("scripts")) / "llmfit"


@functools.cache
def read_submissions() -> list[dict[str, Any]]:
    """Return the community's measurements: hardware with results of each."""
    program = find_program().read_bytes()
    return list(_decode_array(program, program.index(_SUBMISSIONS)))


@functools.cache
def read_catalog() -> list[dict[str, Any]]:
    """Return the entries of the catalog of models."""
    program = find_program().read_bytes()
    first = program.index(_CATALOG_ENTRY)
    start = max(program.rfind(b"[\n", 0, first), program.rfind(b"[{", 0, first))
    return list(_decode_array(program, start))


@functools.cache
def estimate_catalog(gpu: str, memory_mib: int) -> list[dict[str, Any]]:
    """Return llmfit's estimates of all models that run on a machine with this NVIDIA device."""
    with tempfile.TemporaryDirectory(prefix="pomona-llmfit-") as folder:
        tool = Path(folder) / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\necho 'None, {memory_mib}, {memory_mib}, {gpu}'\n")
        tool.chmod(0o755)
        environment = {"PATH": f"{folder}:{os.environ['PATH']}", "HOME": folder}
        call = [str(find_program()), "--ram", "256G", "--json", "fit", "-n", "100000"]
        done = subprocess.run(call, env=environment, capture_output=True, timeout=_CALL_SECONDS, check=True)
    return list(msgspec.json.decode(done.stdout)["models"])


def _decode_array(program: bytes, start: int) -> Any:
    """Return the JSON array that begins at `start`; the program goes on after it."""
    text = program[start : start + _LONGEST_BYTES].decode(errors="replace")
    return json.JSONDecoder().raw_decode(text)[0]
