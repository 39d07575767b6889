"""The table of runtimes, one module each."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from runtimes import llama_cpp_python, llama_server, mlx_lm, ollama, omlx
from runtimes.runtime import Runtime

RUNTIMES: Final[Mapping[str, Runtime]] = MappingProxyType(
    {each.RUNTIME.name: each.RUNTIME for each in (llama_server, mlx_lm, llama_cpp_python, omlx, ollama)}
)
"""By name, in the order in which a host lists them."""
