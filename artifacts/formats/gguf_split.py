"""Names of GGUF files, and models in several files: `NAME-00001-of-00003.gguf`, as llama.cpp writes and loads them.

The first part has the metadata, and each part lists the tensors that it has; engines get the path of the first part.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Sequence
from typing import Final

from artifacts.errors import ArtifactError
from artifacts.formats.gguf import GGUFHeader

_PART: Final = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.ASCII)
_MOST_PARTS: Final = 500
MOST_TENSORS: Final = 1 << 16
"""The limit of one file: a model has no more because it is split."""
_PART_KEYS: Final = ("split.no", "split.count")
"""Metadata of later parts that is compared."""


def is_gguf_name(name: str) -> bool:
    """Return whether a file or a pattern has the name of a GGUF file; some publishers write it in capitals."""
    return name.lower().endswith(".gguf")


def list_part_names(name: str) -> list[str]:
    """Return the names of all parts, in order, of the model that the file `name` is a part of; empty if it is whole.

    Raises:
        ValueError: the number of the part is not possible.
    """
    match = _PART.fullmatch(name)
    if match is None:
        return []
    number, count = int(match["number"]), int(match["count"])
    if not 0 < number <= count <= _MOST_PARTS:
        raise ValueError(f"names part {number} of {count}: a model has 1 to {_MOST_PARTS} parts")
    return [f"{match['stem']}-{index:05}-of-{count:05}.gguf" for index in range(1, count + 1)]


def append_part_header(headers: list[GGUFHeader], header: GGUFHeader, name: str) -> None:
    """Append the header of the next part to `headers`; of a later part, keep only the metadata that is compared.

    Of the metadata, `merge_headers` needs number and count of each part, and everything else of the first part only.

    Raises:
        ArtifactError: HeaderInvalid; the parts have too many tensors, which would fill the memory of the reader.
    """
    count = sum(gguf_header.tensor_count for gguf_header in headers) + header.tensor_count
    if count > MOST_TENSORS:
        problem = f"its parts have {count} tensors or more, and no model has more than {MOST_TENSORS}"
        raise ArtifactError("HeaderInvalid", f"{name}: {problem}")
    if headers:
        metadata = {key: value for key, value in header.metadata.items() if key in _PART_KEYS}
        header = dataclasses.replace(header, metadata=metadata)
    headers.append(header)


def merge_headers(headers: Sequence[GGUFHeader], names: Sequence[str]) -> GGUFHeader:
    """Return the header of the whole model, from the headers of its parts in order.

    Raises:
        ArtifactError: HeaderInvalid, or SplitUnsupported for one part under the name of a whole model.
    """
    # 1. A model in one file.
    first = headers[0]
    if len(headers) == 1:
        count = first.metadata.get("split.count", 0)
        if isinstance(count, int) and count > 1:
            raise ArtifactError(
                "SplitUnsupported",
                f"{names[0]}: is one of {count} parts of a split model, but not named as one: name them "
                f"NAME-00001-of-{count:05}.gguf and so on",
            )
        return first

    # 2. Each part must say that it is this one; parts are counted from 0.
    for number, (header, name) in enumerate(zip(headers, names, strict=True)):
        stated = header.metadata.get("split.no"), header.metadata.get("split.count")
        if stated != (number, len(headers)):
            position = " of ".join(str(field)[:32] for field in stated)
            problem = f"its header says that it is part {position} (counted from 0), not {number} of {len(headers)}"
            raise ArtifactError("HeaderInvalid", f"{name}: {problem}: provide the parts of one model")

    # 3. Together they must have each tensor once, and all of them.
    shapes = {name: shape for header in headers for name, shape in header.shapes.items()}
    count = sum(header.tensor_count for header in headers)
    if len(shapes) < sum(len(header.shapes) for header in headers):
        raise ArtifactError("HeaderInvalid", f"{names[0]}: another part has a tensor of the same name")
    if first.metadata.get("split.tensors.count", count) != count:
        wanted = str(first.metadata["split.tensors.count"])[:32]
        raise ArtifactError("HeaderInvalid", f"{names[0]}: states {wanted} tensors, but its parts have {count}")

    # 4. Sum them up.
    sizes: Counter[str] = Counter()
    for header in headers:
        sizes.update(header.bytes_by_type)
    return dataclasses.replace(
        first,
        tensor_count=count,
        tensor_bytes=sum(header.tensor_bytes for header in headers),
        bytes_by_type=dict(sizes),
        shapes=shapes,
        parameters=sum(header.parameters for header in headers),
        expert_parameters=sum(header.expert_parameters for header in headers),
    )
