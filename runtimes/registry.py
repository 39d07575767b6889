"""The table of runtimes: adding an engine is a module and one entry here."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from runtimes import llama_server, mlx_lm, ollama, omlx
from runtimes.serving import Runtime

RUNTIMES: Final[Mapping[str, Runtime]] = MappingProxyType(
    {each.name: each for each in (llama_server.RUNTIME, mlx_lm.RUNTIME, omlx.RUNTIME, ollama.RUNTIME)}
)
"""By name, in the order in which a host names what it has."""
