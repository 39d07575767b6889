"""The catalog: models that `pomona deploy` knows by name, with their sources and figures (`catalog.yaml`)."""

import functools
from pathlib import Path
from typing import Any, Final

import msgspec
import yaml
from msgspec import structs

from artifacts.formats.quantization_name import find_quantization
from crds.serving import Mode
from crds.weights_header import Layout
from fitness.memory import Workload

_FILE: Final = Path(__file__).with_name("catalog.yaml")
_DEFAULT_ACCELERATOR: Final = "cpu"
_BITS_PER_BYTE: Final = 8
_BITS: Final = 4
_GIGA: Final = 10**9
_LLAMA_CPP_ON: Final = frozenset({"cpu", "nvidia", "amd", "intel"})
"""Vendors on which llama.cpp takes a GGUF file, also where the catalog prefers another source."""
_UNQUANTIZED: Final = "bfloat16"


class CatalogError(Exception):
    """The catalog has no such model, or none that runs on the accelerator; the message has the way out."""


class CatalogSource(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """One source of the weights, in the form of a Model's spec.source."""

    source: str
    accelerators: list[str]
    """Those whose engines take its format."""
    memory_bytes: int | None = None
    tensor_bytes: int | None = None
    """Size of the weights of a further source; None: that of the layout for the first source, else unknown."""
    quantization: str = ""
    """Quantization of a folder, as a Model's status states it; empty: none."""

    @property
    def weights_quantization(self) -> str:
        """Quantization of the weights, as a Model's status states it; empty: unknown.

        A GGUF file has it in its name, another source in the catalog. Without either, a folder of weights is not
        quantized, and the quantization of an Ollama model is unknown.
        """
        named = find_quantization(self.source)
        if named:
            return named.removeprefix("UD-")
        is_unquantized = not self.quantization and self.runtime != "ollama"
        return _UNQUANTIZED if is_unquantized else self.quantization

    @property
    def runtime(self) -> str:
        """Engine that serves it in pods if the service names none."""
        if self.source.startswith("ollama://"):
            return "ollama"
        return "llama.cpp" if self.source.endswith(".gguf") else "vllm"


class CatalogEntry(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """One model. Its figures are those of third parties, except `layout`."""

    title: str
    kind: str
    parameters: str
    active: str = ""
    quantized_gb: float | None = msgspec.field(default=None, name="quantizedGB")
    """Weights at 4 bit or, of some models, less."""
    bf16_gb: float | None = msgspec.field(default=None, name="bf16GB")
    thinking: bool = False
    mode: Mode = "chat"
    """Use of the service."""
    capabilities: list[str] = []
    """Abilities beside text, in the words of a Model's spec."""
    domains: list[str] = []
    """Subjects of its training, in the words of a Model's spec."""
    sources: list[CatalogSource]
    """The best first; at least one."""
    accelerator: str = _DEFAULT_ACCELERATOR
    """Where it runs unless the user says otherwise."""
    hardware: dict[str, Any] = {}
    """Further fields of the service's spec.hardware on `accelerator`."""
    layout: Layout | None = None
    """Dimensions in the header of each source, with the size of the first one."""

    @property
    def parameter_count(self) -> int:
        """All parameters."""
        return _read_parameters(self.parameters)

    @property
    def active_share(self) -> float | None:
        """Share of the parameters that a token uses, of a model with experts; None: all, or unknown."""
        return _read_parameters(self.active) / self.parameter_count if self.active else None

    @property
    def is_below_four_bits(self) -> bool:
        """True if the figure of third parties is less than the parameters take at 4 bits."""
        if self.quantized_gb is None:
            return False
        return self.quantized_gb * _GIGA < self.parameter_count * _BITS / _BITS_PER_BYTE

    def find_layout(self, source: CatalogSource) -> Layout | None:
        """Return the layout, the sizes of the layers, of a source; None: it or the size of the weights is unknown.

        The layers are the same in all sources of a model; the size of the weights depends on their quantization. That
        of the first source is in the entry's layout, that of a further one in the source itself.
        """
        if self.layout is None:
            return None
        size = source.tensor_bytes
        if not size and source is self.sources[0]:
            size = self.layout.tensor_bytes
        return structs.replace(self.layout, tensor_bytes=size) if size else None

    def find_source(self, accelerator: str) -> CatalogSource | None:
        """Return the first source of known layout that an engine on an accelerator can load; None: there is none.

        llama.cpp loads GGUF files on more accelerators than the catalog proposes them for.
        """
        for source in self.sources:
            llama_cpp_loads_it = source.runtime == "llama.cpp" and accelerator in _LLAMA_CPP_ON
            is_loadable = accelerator in source.accelerators or llama_cpp_loads_it
            if is_loadable and self.find_layout(source) is not None:
                return source
        return None

    def find_workload(self, accelerator: str) -> Workload | None:
        """Return what an engine on an accelerator loads; None: nothing whose layout is known."""
        source = self.find_source(accelerator)
        if source is None:
            return None
        return Workload(
            layout=self.find_layout(source),
            runtime=source.runtime,
            stated_bytes=source.memory_bytes,
            quantization=source.weights_quantization,
        )


def _read_parameters(text: str) -> int:
    """Return the number of parameters of a text such as 8.0B."""
    return round(float(text.partition("B")[0]) * _GIGA)


@functools.cache
def load_catalog() -> dict[str, CatalogEntry]:
    """Return the entries by name, the smallest first."""
    return msgspec.convert(yaml.safe_load(_FILE.read_bytes()), dict[str, CatalogEntry])


def choose_source(name: str, entry: CatalogEntry, accelerator: str | None) -> tuple[str, CatalogSource]:
    """Return the accelerator and a source of an entry that runs on it; None is the default of the entry.

    Raises:
        CatalogError: there is none.
    """
    wanted = accelerator or entry.accelerator
    for source in entry.sources:
        if wanted in source.accelerators:
            return wanted, source
    others = " or ".join(sorted({choice for source in entry.sources for choice in source.accelerators}))
    way_out = f"use --accelerator {others}, or add --model SOURCE"
    raise CatalogError(f"the catalog has no source of {name} for {wanted}: {way_out}")
