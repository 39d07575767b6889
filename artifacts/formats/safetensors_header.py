"""Reader of safetensors headers from untrusted bytes: every length and offset is checked before it is used.

A file is the length of its header (8 bytes, little endian), the header as JSON, and the tensors one behind the other
without a gap. Whatever the safetensors library refuses is refused here too, so an engine can load a file whose header
passes. The limit of a header's length is below the library's, so that a Job reads any header within its memory.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from artifacts.errors import ArtifactError
from artifacts.formats.json_members import read_members
from crds.size import size_text

LENGTH_BYTES: Final = 8
MAX_HEADER_BYTES: Final = 32 << 20
"""The library takes 100 MB; a file of the largest models has less than 2 MB."""
_METADATA: Final = "__metadata__"
_EXPERTS: Final = ".experts."
"""Part of the names of tensors of experts; those of an expert that every token uses have another."""
_MOST_DIMENSIONS: Final = 16
_MOST_TENSORS: Final = 1 << 18
_MOST_METADATA_BYTES: Final = 8 << 20
_BITS: Final = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
"""Bits of an element, by type."""
_PLAIN: Final = frozenset({"F64", "F32", "F16", "BF16"})
"""Types of which one element is one parameter; others are packed, or scales of others."""

_Size = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class _Tensor(msgspec.Struct):
    dtype: str
    shape: Annotated[list[_Size], Meta(max_length=_MOST_DIMENSIONS)]
    data_offsets: tuple[_Size, _Size]


@dataclasses.dataclass(frozen=True)
class SafetensorsHeader:
    """The facts of one header, or of all headers of a folder together.

    Attributes:
        tensor_count: number of tensors.
        tensor_bytes: exact sum of the sizes of the tensors.
        written_for: the framework that the file was written for: pt, mlx, or empty.
        parameters: number of elements of all tensors; None if some are packed, so that it is not known.
        expert_parameters: number of elements of the tensors of experts.

    """

    tensor_count: int = 0
    tensor_bytes: int = 0
    written_for: str = ""
    parameters: int | None = 0
    expert_parameters: int = 0


def parse_length(name: str, prefix: bytes, file_bytes: int) -> int:
    """Return the length of the header in bytes, from the first bytes of the file `name`.

    Raises:
        ArtifactError: HeaderInvalid.
    """
    length = int.from_bytes(prefix[:LENGTH_BYTES], "little")
    if len(prefix) < LENGTH_BYTES or file_bytes < LENGTH_BYTES:
        raise _invalid(name, f"has {file_bytes} bytes, which is no safetensors file: it is cut or empty")
    if not 1 < length <= MAX_HEADER_BYTES:
        most = size_text(MAX_HEADER_BYTES)
        raise _invalid(name, f"claims a header of {length} bytes: it is no safetensors file, or longer than {most}")
    if LENGTH_BYTES + length > file_bytes:
        raise _invalid(name, f"claims a header of {length} bytes, but has {file_bytes} in all: it is cut or corrupted")
    return length


def parse(name: str, text: bytes, file_bytes: int) -> SafetensorsHeader:
    """Read the header `text`, which follows the length in the file `name` of `file_bytes` bytes.

    Raises:
        ArtifactError: HeaderInvalid.
    """
    if not text.startswith(b"{"):
        raise _invalid(name, "has a header that does not begin with {: it is no safetensors file")

    # What is collected over all tensors; `ranges` has the first byte of each, and the one after its last.
    ranges: list[tuple[int, int]] = []
    written_for = ""
    parameters: int | None = 0
    expert_parameters = 0
    try:
        for tensor_name, value in read_members(text):
            # `__metadata__` is no tensor: it may name the framework that the file was written for.
            if tensor_name == _METADATA:
                if len(value) > _MOST_METADATA_BYTES:
                    raise _invalid(name, f"has more than {size_text(_MOST_METADATA_BYTES)} of metadata")
                written_for = _read_framework(value)
                continue

            tensor = _decode_tensor(name, tensor_name, value)
            ranges.append(tensor.data_offsets)
            if len(ranges) > _MOST_TENSORS:
                raise _invalid(name, f"has more than {_MOST_TENSORS} tensors, and no file of a model has so many")

            # Count the parameters; None: not known.
            elements = math.prod(tensor.shape)
            if parameters is not None:
                # _PLAIN: types of one parameter in an element. One packed tensor makes the number of all unknown.
                parameters = parameters + elements if tensor.dtype in _PLAIN else None
            # Names of tensors of experts contain `.experts.`.
            if _EXPERTS in tensor_name:
                expert_parameters += elements
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _invalid(name, f"has a header that is not valid JSON: {error}") from error

    _check_ranges(name, ranges, file_bytes - LENGTH_BYTES - len(text))
    return SafetensorsHeader(
        tensor_count=len(ranges),
        tensor_bytes=sum(end - begin for begin, end in ranges),
        written_for=written_for,
        parameters=parameters,
        expert_parameters=expert_parameters,
    )


def merge(headers: Iterable[SafetensorsHeader]) -> SafetensorsHeader:
    """Return the sums over several files that make one model; `parameters` is None if that of one file is."""
    files = list(headers)
    counts = [file.parameters for file in files if file.parameters is not None]
    return SafetensorsHeader(
        tensor_count=sum(file.tensor_count for file in files),
        tensor_bytes=sum(file.tensor_bytes for file in files),
        written_for=next((file.written_for for file in files if file.written_for), ""),
        parameters=sum(counts) if len(counts) == len(files) else None,
        expert_parameters=sum(file.expert_parameters for file in files),
    )


def _read_framework(metadata: bytes) -> str:
    """Return the framework in the metadata, whose values all are strings. Raises msgspec.DecodeError."""
    framework = ""
    for key, value in read_members(metadata):
        text = msgspec.json.decode(value, type=str)
        framework = text if key == "format" else framework
    return framework


def _decode_tensor(name: str, tensor_name: str, raw: bytes) -> _Tensor:
    """Return the description of a tensor, whose bytes must have the size of its shape and type."""
    what = f"tensor {tensor_name[:64]!r}"
    try:
        tensor = msgspec.json.decode(raw, type=_Tensor)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _invalid(name, f"describes {what} in a way that is not valid: {error}") from error
    if tensor.dtype not in _BITS:
        raise _invalid(name, f"has {what} of the unknown type {tensor.dtype[:32]!r}: a newer Pomona may know it")
    begin, end = tensor.data_offsets
    bits = math.prod(tensor.shape) * _BITS[tensor.dtype]
    if bits % 8 or end - begin != bits // 8:
        raise _invalid(name, f"gives {what} the bytes {begin} to {end}, which is not the size of its shape and type")
    return tensor


def _check_ranges(name: str, ranges: list[tuple[int, int]], data_bytes: int) -> None:
    """Check that the tensors fill the rest of the file, without a gap and without an overlap."""
    position = 0
    for begin, end in sorted(ranges):
        if begin != position:
            problem = "overlap" if begin < position else "leave a gap"
            raise _invalid(name, f"has tensors that {problem} at byte {min(begin, position)} of its data")
        position = end
    if position != data_bytes:
        raise _invalid(name, f"has tensors up to byte {position} of {data_bytes}: it is cut or corrupted")


def _invalid(name: str, problem: str) -> ArtifactError:
    return ArtifactError("HeaderInvalid", f"{name}: {problem}")
