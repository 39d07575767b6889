"""The error table of each engine by its name: apart from the registry, most of whose memory a proxy would not use."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from runtimes import llama_cpp_python, llama_server, mlx_lm, sglang, tgi, vllm
from runtimes.daemon_errors import OLLAMA_ERRORS, OMLX_ERRORS
from runtimes.engine_errors import ErrorTable

ERROR_TABLES: Final[Mapping[str, ErrorTable]] = MappingProxyType(
    {
        "llama.cpp": llama_server.ERRORS,
        "llama-cpp-python": llama_cpp_python.ERRORS,
        "mlx-lm": mlx_lm.ERRORS,
        "vllm": vllm.ERRORS,
        "sglang": sglang.ERRORS,
        "tgi": tgi.ERRORS,
        "ollama": OLLAMA_ERRORS,
        "omlx": OMLX_ERRORS,
    }
)
"""Only statuses tell of the errors of an engine that is not here."""


def find_errors(engine: str | None) -> ErrorTable:
    """Return the table of an engine; empty if it has none, or is not known."""
    return ERROR_TABLES.get(engine or "", ())
