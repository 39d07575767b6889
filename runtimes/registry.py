"""The table of runtimes, one module each."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from runtimes import generic, llama_cpp_python, llama_server, mlx_lm, ollama, omlx, sglang, tgi, vllm
from runtimes.runtime import Runtime

_MODULES: Final = (llama_server, mlx_lm, llama_cpp_python, omlx, ollama, vllm, sglang, tgi, generic)

RUNTIMES: Final[Mapping[str, Runtime]] = MappingProxyType({each.RUNTIME.name: each.RUNTIME for each in _MODULES})
"""By name, in the order in which a host lists them."""

POD_ENGINES: Final = tuple(name for name, runtime in RUNTIMES.items() if runtime.pod is not None)
"""Names of the runtimes that run in pods."""
