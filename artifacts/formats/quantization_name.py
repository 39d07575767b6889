"""The quantization that the name of a GGUF file states, by the habits of those who publish them."""

import re
from typing import Final

_NAMES: Final = r"(?:UD-)?(?:I?Q[1-8]_[A-Z0-9_]+|TQ[12]_\d|MXFP4(?:_MOE)?|BF16|F16|F32)"
_IN_NAME: Final = re.compile(
    rf"(?<![A-Za-z0-9])({_NAMES})(?=(?:-\d{{5}}-of-\d{{5}})?\.gguf$)", re.IGNORECASE | re.ASCII
)
_FOLDER: Final = re.compile(rf"(?:^|/)({_NAMES})/[^/]*$", re.IGNORECASE | re.ASCII)


def find_quantization(path: str) -> str:
    """Return the quantization that the name of a GGUF file states, or else its folder; "" if neither does."""
    match = _IN_NAME.search(path) or _FOLDER.search(path)
    return match[1].upper() if match else ""
