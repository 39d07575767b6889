"""The identity of a proxy's code, so that an agent replaces one of another build of the same version.

It is no defence: a checksum is enough, and the proxy starts sooner without a library for digests or metadata.
"""

import sys
import zlib
from pathlib import Path
from typing import Final


def read_build(package: Path) -> str:
    """Return the version with a checksum of all modules in the folder `package`.

    By it an agent recognizes a running proxy of another build of the same version, and replaces it.
    """
    checksum = 0
    for path in sorted(package.rglob("*.py")):
        content = path.read_bytes()
        checksum = zlib.crc32(f"{path.relative_to(package)}\0{len(content)}\0".encode() + content, checksum)
    return f"{_read_version()}+{checksum:08x}"


def _read_version() -> str:
    """Return the version of this program, as importlib.metadata does it, which takes long to import."""
    for folder in sys.path:
        for info in Path(folder).glob("pomona-*.dist-info"):
            for line in (info / "METADATA").read_text(encoding="utf-8").splitlines():
                if line.startswith("Version: "):
                    return line.removeprefix("Version: ")
    return ""


BUILD: Final = read_build(Path(__file__).parents[1])
"""The build that this process runs: read when it starts, since an update replaces the files under a running one."""
