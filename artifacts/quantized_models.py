"""The GGUF models of a repository, each with the quantization that its name states. Pure functions.

Repositories of GGUF files have one model in many quantizations: `NAME-Q4_K_M.gguf`, or the parts of it in a folder.
"""

import re
from collections.abc import Iterable
from typing import Final, NamedTuple

from artifacts.formats.gguf_split import is_gguf_name, list_part_names
from artifacts.formats.quantization_name import find_quantization
from artifacts.repositories.repository import RepositoryFile

_NO_MODEL: Final = re.compile(r"(?:^|[-_.])(?:mmproj|imatrix)(?![a-z])", re.IGNORECASE)
"""In the names of files that belong to a model: projectors, and data of the quantization."""
_FULL: Final = frozenset({"BF16", "F16", "F32"})


class QuantizedModel(NamedTuple):
    """One GGUF model of a repository."""

    quantization: str
    """In capitals, such as Q4_K_M; empty: its name states none."""
    path: str
    """Path of its file, or of its first part."""
    size_bytes: int
    """The size of all parts."""

    @property
    def is_quantized(self) -> bool:
        """True unless the weights have 16 or 32 bits: these take twice the memory of Q8_0, and answer no better."""
        return self.quantization not in _FULL


def list_quantized_models(files: Iterable[RepositoryFile]) -> list[QuantizedModel]:
    """Return the GGUF models among the files that are whole, the largest first."""
    sizes = {file.path: file.size_bytes for file in files if is_gguf_name(file.path)}
    models = []
    for path in sizes:
        folder, slash, name = path.rpartition("/")
        try:
            names = list_part_names(name) or [name]
        except ValueError:  # the name has the form of a part with an impossible number
            continue
        parts = [sizes.get(f"{folder}{slash}{part}") for part in names]
        if name == names[0] and None not in parts and not _NO_MODEL.search(name):
            models.append(QuantizedModel(find_quantization(path), path, sum(size or 0 for size in parts)))
    return sorted(models, key=lambda model: (-model.size_bytes, model.path))


def match_quantization(models: Iterable[QuantizedModel], wanted: str) -> list[QuantizedModel]:
    """Return the models of a quantization, in any case of letters; `Q4_K_XL` also means `UD-Q4_K_XL` if that is all."""
    models, wanted = list(models), wanted.upper()
    exact = [model for model in models if model.quantization == wanted]
    return exact or [model for model in models if model.quantization == f"UD-{wanted}"]
