"""The table of runtimes, one module each."""

from collections.abc import Mapping
from typing import Final

from runtimes import generic, llama_cpp_python, llama_server, mlx_lm, ollama, omlx, sglang, tgi, vllm
from runtimes.runtime import Runtime

_MODULES: Final = (llama_server, mlx_lm, llama_cpp_python, omlx, ollama, vllm, sglang, tgi, generic)
_UNKNOWN: Final = Runtime(name="unknown", formats=frozenset(), modes=frozenset())

RUNTIMES: Final[Mapping[str, Runtime]] = {module.RUNTIME.name: module.RUNTIME for module in _MODULES}
"""By name, in the order in which a host lists them; the first one for a format is its default."""


def find_runtime(name: str | None) -> Runtime:
    """Return a runtime; one that is not in the table has no abilities and no figures."""
    return RUNTIMES.get(name or "", _UNKNOWN)


def list_pod_engines() -> tuple[str, ...]:
    """Return the names of the runtimes that run in pods."""
    return tuple(name for name, runtime in RUNTIMES.items() if runtime.pod is not None)
