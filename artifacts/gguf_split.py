"""Split GGUF files: a model in several files, named `NAME-00001-of-00003.gguf` as llama.cpp writes and loads them.

The first part has the metadata, and each part lists the tensors that it has; engines get the path of the first part.
"""

import re
from typing import Final

from artifacts.errors import ArtifactError

_PART: Final = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.ASCII)
_MOST_PARTS: Final = 500


def name_parts(name: str) -> list[str]:
    """Return the names of all parts, in order, if `name` is that of the first part; empty if it is not of a split file.

    Raises:
        ArtifactError: SourceInvalid for another part than the first, or a number that no model has.
    """
    match = _PART.fullmatch(name)
    if match is None:
        return []
    count = int(match["count"])
    parts = [f"{match['stem']}-{number:05}-of-{count:05}.gguf" for number in range(1, min(count, _MOST_PARTS) + 1)]
    if not 0 < count <= _MOST_PARTS:
        raise ArtifactError("SourceInvalid", f"{name}: is one of {count} parts: a model has 1 to {_MOST_PARTS}")
    if int(match["number"]) != 1:
        raise ArtifactError("SourceInvalid", f"{name}: is not the first part of its model: name {parts[0]}")
    return parts
