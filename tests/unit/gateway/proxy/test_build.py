"""Two builds of one version are told apart by their code."""

import shutil
from pathlib import Path

from gateway.proxy import build


def test_another_line_of_code_is_another_build(tmp_path: Path) -> None:
    package = tmp_path / "gateway"
    shutil.copytree(Path(build.__file__).parents[1], package, ignore=shutil.ignore_patterns("__pycache__"))
    assert build.read_build(package) == build.BUILD, "the same code in another place"
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "handler.cpython-311.pyc").write_bytes(b"compiled")
    assert build.read_build(package) == build.BUILD

    module = package / "proxy" / "handler.py"
    module.write_text(module.read_text() + "\n")
    edited = build.read_build(package)
    module.rename(module.with_name("handlers.py"))
    assert len({build.BUILD, edited, build.read_build(package)}) == 3
