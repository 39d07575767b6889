"""`python -m crds.generate`: write the CRD YAML, its copy in the chart and the reference.

With `--check` it only reports stale files.
"""

import sys
from pathlib import Path
from typing import Any

import yaml

from crds.definitions import DEFINITIONS
from crds.meta import GROUP
from crds.reference import render_reference

FOLDER = Path(__file__).parent
CHART = FOLDER.parent / "deploy" / "chart" / "files" / "crds"
KEPT = {"helm.sh/resource-policy": "keep"}
"""Annotation of the chart's copy: with a CRD, all of its objects would be deleted."""
REFERENCE = FOLDER.parent / "docs" / "reference.md"
HEADER = "# Generated from the structs in crds/ by `make crds`. Do not edit.\n"


def render_files() -> dict[Path, str]:
    """Return each file's path and text: each kind's definition and its copy in the chart, then the reference."""
    files: dict[Path, str] = {}
    for kind in DEFINITIONS:
        definition, name = kind.render(), f"{GROUP}_{kind.plural}.yaml"
        files[FOLDER / name] = _dump(definition)
        # Helm keeps the definitions of the chart when it is uninstalled (`KEPT`): their objects would be deleted with
        # them.
        files[CHART / name] = _dump(definition | {"metadata": definition["metadata"] | {"annotations": KEPT}})
    return files | {REFERENCE: render_reference()}


def _dump(definition: dict[str, Any]) -> str:
    return HEADER + yaml.safe_dump(definition, sort_keys=False, width=120)


def main() -> int:
    """Write the generated files, and delete those of kinds that exist no more; return 0.

    With `--check` nothing is written: the files that would change are named, and the exit code is 1 if there are some.
    """
    files = render_files()
    existing = {path for folder in (FOLDER, CHART) for path in folder.glob(f"{GROUP}_*.yaml")}
    # stale: files that are missing or differ, and files of kinds that exist no more
    stale = [path for path, text in files.items() if not path.exists() or path.read_text() != text]
    stale += sorted(existing - files.keys())

    if "--check" in sys.argv:
        for path in stale:
            sys.stderr.write(f"{path.relative_to(FOLDER.parent)} is stale: run `make crds`\n")
        return 1 if stale else 0

    # Without --check, delete and write the files.
    for path in existing - files.keys():
        path.unlink()
    for path, text in files.items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
