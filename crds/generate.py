"""`python -m crds.generate`: write the CRD YAML and the reference; with `--check` only report stale files."""

import sys
from pathlib import Path

import yaml

from crds.definitions import DEFINITIONS
from crds.meta import GROUP
from crds.reference import render_reference

FOLDER = Path(__file__).parent
REFERENCE = FOLDER.parent / "docs" / "reference.md"
HEADER = "# Generated from the structs in this folder by `make crds`. Do not edit.\n"


def render_files() -> dict[Path, str]:
    """Return each file's path and text."""
    definitions = {
        FOLDER / f"{GROUP}_{each.plural}.yaml": HEADER + yaml.safe_dump(each.render(), sort_keys=False, width=120)
        for each in DEFINITIONS
    }
    return definitions | {REFERENCE: render_reference()}


def main() -> int:
    """Write the files, or name the stale ones and return 1."""
    files = render_files()
    known = set(FOLDER.glob(f"{GROUP}_*.yaml"))
    stale = [path for path, text in files.items() if not path.exists() or path.read_text() != text]
    stale += sorted(known - files.keys())
    if "--check" in sys.argv:
        for path in stale:
            sys.stderr.write(f"{path.relative_to(FOLDER.parent)} is stale: run `make crds`\n")
        return 1 if stale else 0
    for path in known - files.keys():
        path.unlink()
    for path, text in files.items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
