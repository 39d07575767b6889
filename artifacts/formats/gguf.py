"""Reader of GGUF headers from untrusted bytes: every count and length is checked before it is used.

A pure function of a prefix of the file. Memory for a size that the header claims is allocated only when that many
bytes are present, and little is kept of them: long keys, arrays (a tokenizer's vocabulary) and names of tensors are
skipped, texts are cut, and all arrays together are limited, since a number takes many times its bytes once it is an
object. Format: ggml-org/ggml `docs/gguf.md`,
versions 2 and 3, little endian. Every header that llama.cpp's own reader refuses (`ggml/src/gguf.cpp`: repeated keys,
more than 4 dimensions, tensors outside the file) is refused here too, so an engine can load a file whose header passes.
"""

import dataclasses
import hashlib
import math
import struct
from collections import Counter

from artifacts.errors import ArtifactError

MAX_HEADER_BYTES = 64 << 20
"""A header that is longer is refused; the largest vocabularies make about 16 MiB."""

Number = int | float | bool
Value = Number | str | tuple[Number, ...] | None
"""None is an array that was skipped: of strings, of arrays, or a long one."""

_EXPERTS = "_exps."
"""Part of the names of tensors that hold all experts of a layer."""
MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_ENTRIES = 1 << 16
_MAX_NAME_BYTES = (1 << 16) - 1
_MAX_STRING_BYTES = 16 << 20
_MAX_NESTING = 2
_MAX_DIMENSIONS = 4
_KEPT_ELEMENTS = 4096
_KEPT_ELEMENTS_IN_ALL = 1 << 16
_KEPT_STRING_BYTES = 4096
_KEPT_NAME_BYTES = 256
"""Names of keys and tensors that the facts are read from are shorter."""
_DEFAULT_ALIGNMENT = 32
_MAX_ALIGNMENT = 1 << 20
_MOST_PADDING = 1 << 20
"""Limit of what follows the last tensor: what is fetched and stored is weights."""
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_U32, _U64 = _SCALARS[4], _SCALARS[10]
_LEAST_ENTRY_BYTES = 8 + 4 + 1
_LEAST_TENSOR_BYTES = 8 + 4 + 4 + 8

# ggml type number -> name, elements in a block, bytes of a block. From ggml/src/ggml.c (`type_traits`) and
# ggml/src/ggml-common.h (`block_*` structs); a test compares it with the gguf package.
TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}


class HeaderTruncated(Exception):  # noqa: N818  no fault of the file: the caller reads more bytes
    """The given prefix ends before the header does."""


@dataclasses.dataclass(frozen=True)
class GGUFHeader:
    """The content of a header.

    Attributes:
        version: version of the format.
        metadata: key to value, in the order of the file; without long keys, and with the beginning of long texts.
        tensor_count: number of tensors.
        tensor_bytes: exact sum of the sizes of the tensors, without padding.
        bytes_by_type: the same sum for each tensor type, by the name of the type.
        shapes: dimensions of each tensor by name, the innermost first; without tensors of long names.
        data_offset: offset of the first tensor, in bytes from the start of the file.
        parameters: number of elements of all tensors.
        expert_parameters: number of elements of the tensors that hold the experts, each all experts of a layer.

    """

    version: int
    metadata: dict[str, Value]
    tensor_count: int
    tensor_bytes: int
    bytes_by_type: dict[str, int]
    shapes: dict[str, tuple[int, ...]]
    data_offset: int
    parameters: int = 0
    expert_parameters: int = 0


def parse(data: bytes | bytearray, file_bytes: int) -> GGUFHeader:
    """Read the header of a file of `file_bytes` bytes from its first bytes.

    Raises:
        HeaderTruncated: `data` is valid, but ends before the header does: more of the file has to be read.
        ArtifactError: HeaderInvalid.

    """
    reader = _Reader(data, file_bytes)
    # Fewer bytes than the magic has may be its beginning.
    if not data.startswith(MAGIC[: len(data)]):
        raise _invalid("is no GGUF file: it does not begin with GGUF")
    reader.skip(len(MAGIC), "the magic")
    version = reader.read_unsigned(_U32, "the version")
    if version not in _VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
        what = "is big endian" if swapped else f"has GGUF version {version}"
        raise _invalid(f"{what}: convert it to version 3, little endian")

    # Order in the file: both counts, the metadata entries, the descriptions of the tensors.
    tensor_count = reader.read_count("tensors", _LEAST_TENSOR_BYTES)
    entry_count = reader.read_count("metadata entries", _LEAST_ENTRY_BYTES)

    metadata: dict[str, Value] = {}
    # By these, `read_name` refuses a key that is there twice.
    key_digests: set[bytes] = set()
    for _ in range(entry_count):
        key, is_whole = reader.read_name("metadata key", key_digests)
        value = reader.read_value(key[:64])
        if is_whole:  # else the key was cut, and no fact has such a long one
            metadata[key] = value
    return _read_tensors(reader, version, metadata, tensor_count)


def _read_tensors(reader: "_Reader", version: int, metadata: dict[str, Value], count: int) -> GGUFHeader:
    """Read the descriptions of all tensors, and return the header that they complete.

    Raises ArtifactError if a tensor is not aligned, the tensors do not fit into the file, or much follows the last one.
    """
    # 1. Read the descriptions.
    alignment = _read_alignment(metadata)
    shapes: dict[str, tuple[int, ...]] = {}
    sizes: Counter[str] = Counter()
    name_digests: set[bytes] = set()
    data_end = parameters = expert_parameters = 0
    for _ in range(count):
        name, is_whole = reader.read_name("tensor", name_digests)
        shape, type_name, size_bytes, offset = reader.read_tensor(name[:64])
        elements = math.prod(shape)
        parameters += elements

        if is_whole:  # no tensor with a cut name is looked up
            shapes[name] = shape
            expert_parameters += elements if _EXPERTS in name else 0

        if offset % alignment:
            raise _invalid(f"has tensor {name[:64]!r} at {offset}, which is no multiple of its alignment {alignment}")
        sizes[type_name] += size_bytes
        data_end = max(data_end, offset + size_bytes)

    # 2. Compare the end of the tensors with that of the file.
    data_offset = math.ceil(reader.position / alignment) * alignment
    total = sum(sizes.values())  # more than `data_end` if tensors overlap
    needed = data_offset + max(data_end, total)
    if count and needed > reader.file_bytes:
        raise _invalid(f"has tensors up to byte {needed}, but {reader.file_bytes} bytes in all: it is cut or corrupted")
    if reader.file_bytes > needed + _MOST_PADDING:
        problem = f"has {reader.file_bytes - needed} bytes behind its last tensor, which no engine reads"
        raise _invalid(f"{problem}: it is corrupted, or has another file behind it")
    return GGUFHeader(
        version=version,
        metadata=metadata,
        tensor_count=count,
        tensor_bytes=total,
        bytes_by_type=dict(sizes),
        shapes=shapes,
        data_offset=data_offset,
        parameters=parameters,
        expert_parameters=expert_parameters,
    )


def _read_alignment(metadata: dict[str, Value]) -> int:
    """Return the alignment of the tensors in bytes. Raises ArtifactError if it is no power of two."""
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    # A power of two has a single bit.
    if not isinstance(alignment, int) or not 0 < alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
        raise _invalid(f"has general.alignment {str(alignment)[:32]}, which is no power of two up to {_MAX_ALIGNMENT}")
    return alignment


def _invalid(problem: str) -> ArtifactError:
    return ArtifactError("HeaderInvalid", f"the file {problem}")


class _Reader:
    """A position in the prefix. Refuses impossible sizes; raises HeaderTruncated at the end of the prefix."""

    def __init__(self, data: bytes | bytearray, file_bytes: int) -> None:
        self._data = data
        # Elements of all arrays that were kept so far, which have a common limit.
        self._kept_elements = 0
        self.file_bytes = file_bytes
        # No header reaches beyond the file, nor beyond the longest that is accepted.
        self._header_limit = min(file_bytes, MAX_HEADER_BYTES)
        self.position = 0

    def skip(self, size: int, what: str) -> int:
        """Skip `size` bytes and return their offset.

        Raises ArtifactError if they are beyond the end of the file or of the longest header, and HeaderTruncated if
        they are only beyond the bytes that were read so far.
        """
        start, end = self.position, self.position + size
        if end > self._header_limit:
            raise _invalid(f"ends, or its header is longer than {MAX_HEADER_BYTES >> 20} MiB, within {what}")
        if end > len(self._data):
            raise HeaderTruncated
        self.position = end
        return start

    def read_scalar(self, form: struct.Struct, what: str) -> Number:
        """Read a number or a flag."""
        start = self.skip(form.size, what)
        number: Number = form.unpack_from(self._data, start)[0]
        return number

    def read_unsigned(self, form: struct.Struct, what: str) -> int:
        """Read a number of an unsigned form."""
        return int(self.read_scalar(form, what))

    def read_count(self, what: str, least_bytes: int) -> int:
        """Read the number of entries that follow, of at least `least_bytes` each."""
        count = self.read_unsigned(_U64, f"the number of {what}")
        if count > _MAX_ENTRIES or count * least_bytes > self._header_limit:
            raise _invalid(f"claims {count} {what}, more than it can hold")
        return count

    def read_name(self, what: str, digests: set[bytes]) -> tuple[str, bool]:
        """Return the next name, or its first bytes if it is long, and whether it is whole.

        `digests` are those of the names before it: a name that is there twice is refused, else its digest is added.
        """
        start, size = self._skip_string(f"the name of a {what}", _MAX_NAME_BYTES)
        digest = hashlib.blake2b(self._data[start : start + size], digest_size=16).digest()
        name = self._decode_text(start, min(size, _KEPT_NAME_BYTES))
        if digest in digests:
            raise _invalid(f"has the {what} {name[:64]!r} twice")
        digests.add(digest)
        return name, size <= _KEPT_NAME_BYTES

    def _skip_string(self, what: str, most_bytes: int) -> tuple[int, int]:
        """Skip a string, and return where its text begins and how many bytes it has."""
        size = self.read_unsigned(_U64, what)
        if size > most_bytes:
            raise _invalid(f"claims {size} bytes for {what}, more than {most_bytes}")
        return self.skip(size, what), size

    def _decode_text(self, start: int, size: int) -> str:
        return self._data[start : start + size].decode(errors="replace")

    def read_value(self, key: str) -> Value:
        """Read the value of a key: the beginning of a text, a short array, or a number; None: an array was skipped."""
        kind = self.read_unsigned(_U32, f"the type of {key!r}")
        if kind == _STRING:
            start, size = self._skip_string(f"the value of {key!r}", _MAX_STRING_BYTES)
            return self._decode_text(start, min(size, _KEPT_STRING_BYTES))
        if kind == _ARRAY:
            return self._read_array(key, 1)
        return self.read_scalar(self._scalar_form(kind, key), f"the value of {key!r}")

    def _scalar_form(self, kind: int, key: str) -> struct.Struct:
        """Return the form of a type of numbers. Raises ArtifactError if there is no such type."""
        if kind not in _SCALARS:
            raise _invalid(f"has the unknown type {kind} for {key!r}")
        return _SCALARS[kind]

    def _read_array(self, key: str, depth: int) -> Value:
        """Read an array; return it if it is short and of numbers, else skip it and return None.

        `depth` is 1 for the value of a key, and 2 for an array in it. An array has the type of its elements, their
        number, and the elements.
        """
        what = f"the array {key!r}"
        kind, count = self.read_unsigned(_U32, what), self.read_unsigned(_U64, what)
        # Skip an array of arrays.
        if kind == _ARRAY:
            if depth == _MAX_NESTING:
                raise _invalid(f"nests arrays deeper than {_MAX_NESTING} for {key!r}")
            self._check_elements(count, _U32.size + _U64.size, what)
            for _ in range(count):
                self._read_array(key, depth + 1)
            return None

        # Skip an array of strings.
        if kind == _STRING:
            self._check_elements(count, _U64.size, what)
            for _ in range(count):
                self._skip_string(f"a string of {what}", _MAX_STRING_BYTES)
            return None

        # Read the numbers of an array of numbers, or skip them.
        form = self._scalar_form(kind, key)
        self._check_elements(count, form.size, what)
        # `skip` returns where the numbers begin.
        start = self.skip(count * form.size, what)
        # Keep nothing that is nested or long, or beyond the common limit of all kept arrays.
        if depth > 1 or count > _KEPT_ELEMENTS or self._kept_elements + count > _KEPT_ELEMENTS_IN_ALL:
            return None
        self._kept_elements += count
        # form.format is the byte order and the type of one number.
        return struct.unpack_from(f"<{count}{form.format[1:]}", self._data, start)

    def _check_elements(self, count: int, least_bytes: int, what: str) -> None:
        """Refuse a number of elements for which the rest of the header has no room."""
        if count * least_bytes > self._header_limit - self.position:
            raise _invalid(f"claims {count} elements for {what}, more than it can hold")

    def read_tensor(self, name: str) -> tuple[tuple[int, ...], str, int, int]:
        """Return shape, type name, size in bytes and offset in the data of the tensor whose name was just read."""
        what = f"the tensor {name!r}"

        # 1. Read the dimensions, the type and the offset.
        dimensions = self.read_unsigned(_U32, what)
        if dimensions > _MAX_DIMENSIONS:
            raise _invalid(f"claims {dimensions} dimensions for {what}, more than {_MAX_DIMENSIONS}")
        shape = [self.read_unsigned(_U64, what) for _ in range(dimensions)]
        kind, offset = self.read_unsigned(_U32, what), self.read_unsigned(_U64, what)
        if kind not in TENSOR_TYPES:
            raise _invalid(f"has the unknown tensor type {kind} for {what}: a newer Pomona may know it")

        # 2. Compute the size. A tensor is stored in blocks, each with so many elements in so many bytes.
        type_name, block_elements, block_bytes = TENSOR_TYPES[kind]
        # The innermost dimension comes first: the length of a row.
        if shape and shape[0] % block_elements:
            raise _invalid(f"has rows of {shape[0]} in {what}, which are no whole blocks of {type_name}")
        size_bytes = math.prod(shape) // block_elements * block_bytes
        if size_bytes + offset > self.file_bytes:
            end = size_bytes + offset
            raise _invalid(f"has {what} end at {end}, but {self.file_bytes} bytes in all: it is cut or corrupted")
        return tuple(shape), type_name, size_bytes, offset
