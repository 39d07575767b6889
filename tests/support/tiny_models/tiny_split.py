"""A tiny GGUF model in several files, as `llama-gguf-split` writes them."""

from pathlib import Path
from typing import Any

import gguf

from tests.support.tiny_models import tiny_gguf


def write(folder: Path, name: str = "tiny", *, tensors_per_part: int = 8, **dimensions: Any) -> list[Path]:
    """Write the model of `tiny_gguf.write` to `folder` in parts of at most `tensors_per_part`; return them in order."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = folder / "whole"
    tiny_gguf.write(whole, **dimensions)
    reader = gguf.GGUFReader(whole)
    writer = gguf.GGUFWriter(folder / f"{name}.gguf", "llama", split_max_tensors=tensors_per_part)
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            kind, *inner = field.types
            writer.add_key_value(field.name, field.contents(), kind, inner[-1] if inner else None)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    whole.unlink()
    return sorted(folder.glob(f"{name}-*-of-*.gguf"))
