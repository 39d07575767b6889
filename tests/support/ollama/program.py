"""The program `ollama`, built once from the Go module beside this file.

Its C++ code includes three libraries of headers from a folder `vendor`, which a Go module cannot carry. They are taken
from the sources of llama-cpp-python, which PyPI has, so that no package of the system is needed but a compiler.
"""

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Final

from tests.controlplane.binaries import ensure_module_programs, find_module_folder
from tests.controlplane.go_build import BuildError, report_build

MODULE: Final = Path(__file__).parent
_PACKAGES: Final = {"ollama": "github.com/ollama/ollama"}
_HEADERS: Final = ("nlohmann/json.hpp", "nlohmann/json_fwd.hpp", "stb/stb_image.h", "miniaudio/miniaudio.h")
_FOLDER: Final = "vendor/llama.cpp/vendor"


PROGRAM: Final = find_module_folder(MODULE, "ollama") / "ollama"
"""Path of the program, once it is built."""


def ensure_ollama() -> Path:
    """Return the path of the program; build it if it is not in the cache.

    Raises:
        BuildError: it is absent and cannot be built here.
    """
    return ensure_module_programs(MODULE, _PACKAGES, "ollama", fetch_headers=fetch_headers)["ollama"]


def fetch_headers(folder: Path) -> Path:
    """Put the headers into `folder`, and return it. Raises BuildError."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise BuildError(f"Ollama has code in C++, and there is no {compiler}: install g++, or name a compiler in CXX")
    if all((folder / header).exists() for header in _HEADERS):
        return folder
    print("downloading C headers for Ollama (77 MB)", file=sys.stderr, flush=True)
    aside = folder.with_name(f"{folder.name}.fetching")
    shutil.rmtree(aside, ignore_errors=True)
    argv = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    argv += ["--no-binary=llama-cpp-python", "--require-hashes", f"--dest={aside}"]
    try:
        subprocess.run([*argv, f"--requirement={MODULE / 'headers.txt'}"], check=True)
    except subprocess.CalledProcessError as error:
        raise BuildError("the C headers that Ollama needs cannot be downloaded from PyPI: see above") from error
    (archive,) = aside.glob("*.tar.gz")
    with tarfile.open(archive) as sources:
        root = sources.next()
        assert root
        top = root.name.partition("/")[0]
        for header in _HEADERS:
            content = sources.extractfile(f"{top}/{_FOLDER}/{header}")
            assert content, header
            (folder / header).parent.mkdir(parents=True, exist_ok=True)
            with (folder / header).open("wb") as file:
                shutil.copyfileobj(content, file)
    shutil.rmtree(aside)
    return folder


if __name__ == "__main__":
    report_build(lambda: {"ollama": ensure_ollama()})
