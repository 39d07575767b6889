"""Compiled code of the real vLLM: the next pod compiles none of it, and damage costs a compilation and no start."""

import asyncio
import os
import time
from pathlib import Path

from artifacts.compiled_code import find_archive, keep, restore
from tests.support.eventually import eventually
from tests.vllm.real_pod import RealPod

COMPILED_AGAIN = "Compiling model again due to a load failure"


def list_libraries(home: Path) -> dict[str, float]:
    """Return the time of each library that PyTorch has compiled."""
    return {path.name: path.stat().st_mtime for path in home.rglob("*.so")}


def test_kept_code_is_loaded_and_damaged_code_is_compiled_again(tmp_path: Path) -> None:
    pod = RealPod(tmp_path)
    archive = find_archive(pod.kept)

    # 1. The first pod compiles.
    pod.empty()
    assert "No such file" in restore(archive, pod.home)
    pod.start()
    libraries = list_libraries(pod.home)
    assert len(libraries) > 5
    assert asyncio.run(eventually(lambda: keep(pod.home, archive), 90)) == "kept"

    # 2. The second one loads what the first has compiled: no library is made anew.
    pod.empty()
    assert restore(archive, pod.home) == "restored"
    before = time.time()
    pod.start()
    loaded = list_libraries(pod.home)
    assert libraries.keys() <= loaded.keys()
    assert [name for name, changed in loaded.items() if changed > before] == []

    # 3. An archive that is damaged is as none.
    whole = archive.read_bytes()
    archive.write_bytes(whole[: len(whole) // 2])
    pod.empty()
    assert restore(archive, pod.home).startswith("not restored")
    assert list(pod.home.iterdir()) == []

    # 4. Files that an engine would have left damaged itself.
    archive.write_bytes(whole)
    pod.empty()
    assert restore(archive, pod.home) == "restored"
    for number, path in enumerate(path for path in pod.home.rglob("*") if path.is_file() and path.stat().st_size):
        if number % 2:
            os.truncate(path, path.stat().st_size // 2)
        else:
            path.write_bytes(os.urandom(path.stat().st_size))
    pod.start()
    assert COMPILED_AGAIN in pod.log.read_text()
