"""The error table of each engine by its name: apart from the registry, most of whose memory a proxy would not use.

The tables of shared daemons are here, because their modules bring clients that a proxy would load in vain.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from runtimes import llama_cpp_python, llama_server, mlx_lm, sglang, tgi, vllm
from runtimes.engine_errors import EngineError, ErrorTable


class SchemaLimits(NamedTuple):
    """The limits of the schemas that an engine survives."""

    most_repetitions: int
    takes_patterns: bool


_OLLAMA: Final = "Ollama 0.17.4"
_OMLX: Final = "oMLX 0.7"
_OLLAMA_ERRORS: Final[ErrorTable] = (
    EngineError(503, "server busy, please try again", 503, "nothing", f"{_OLLAMA}: server/sched.go, ErrMaxQueue"),
    EngineError(500, "invalid format: ", 400, "nothing", f"{_OLLAMA}: llm/server.go, Completion"),
    EngineError(500, "invalid JSON schema in format", 400, "nothing", f"{_OLLAMA}: llm/server.go, no grammar of it"),
    # A schema without end, or the lack of memory; Ollama starts it again at the next request.
    EngineError(500, "model runner has unexpectedly stopped", 503, "failure", f"{_OLLAMA}: recorded, its engine ended"),
    # Clients do not name the model of the daemon: it is gone there.
    EngineError(404, "model '", 503, "failure", f"{_OLLAMA}: recorded answer to an unknown model on /v1"),
    EngineError(404, 'model "', 503, "failure", f"{_OLLAMA}: server/routes.go, handleScheduleError"),
)
_OMLX_ERRORS: Final[ErrorTable] = (
    EngineError(503, "", 503, "nothing", f"{_OMLX}: the queue of its scheduler is full, or pinned models load"),
    EngineError(409, "", 503, "nothing", f"{_OMLX}: the model is loaded or unloaded at the moment"),
    EngineError(507, "", 503, "failure", f"{_OMLX}: not enough memory to load the model"),
    EngineError(404, "Model ", 503, "failure", f"{_OMLX}: the model is gone, and clients do not name it"),
)

ERROR_TABLES: Final[Mapping[str, ErrorTable]] = MappingProxyType(
    {
        "llama.cpp": llama_server.ERRORS,
        "llama-cpp-python": llama_cpp_python.ERRORS,
        "mlx-lm": mlx_lm.ERRORS,
        "vllm": vllm.ERRORS,
        "sglang": sglang.ERRORS,
        "tgi": tgi.ERRORS,
        "ollama": _OLLAMA_ERRORS,
        "omlx": _OMLX_ERRORS,
    }
)
"""Only statuses tell of the errors of an engine that is not here."""
SCHEMA_LIMITS: Final[Mapping[str, SchemaLimits]] = MappingProxyType(
    {
        # More are refused by llama-grammar.cpp (MAX_REPETITION_THRESHOLD), which ends the process of the model. Groups
        # such as (?:a) and stray signs such as ^*$ end Ollama itself, others such as ^\\S$ the process of the model.
        "ollama": SchemaLimits(most_repetitions=2000, takes_patterns=False),
    }
)
"""Schemas that end an engine, where it does not refuse them; recorded of Ollama 0.17.4."""


def find_errors(engine: str | None) -> ErrorTable:
    """Return the table of an engine; empty if it has none, or is not known."""
    return ERROR_TABLES.get(engine or "", ())
