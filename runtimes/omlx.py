"""oMLX: the daemon of a host's owner, which `runtimes/omlx_client.py` calls."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from artifacts.repositories.address_policy import Networks
from devices.tools import find_program
from runtimes.daemon import Daemon
from runtimes.engine_errors import EngineError, ErrorTable
from runtimes.mlx_estimate import MLX_SPEED, MlxMemory
from runtimes.runtime import TEXT_ROUTES, Runtime

_APP: Final = Path("/Applications/oMLX.app")
_ERRORS: Final[ErrorTable] = (
    EngineError(503, "", 503, "nothing", "oMLX 0.7: the queue of its scheduler is full, or pinned models load"),
    EngineError(409, "", 503, "nothing", "oMLX 0.7: the model is loaded or unloaded at the moment"),
    EngineError(507, "", 503, "failure", "oMLX 0.7: not enough memory to load the model"),
    EngineError(404, "Model ", 503, "failure", "oMLX 0.7: the model is gone, and clients do not name it"),
)


def is_installed(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether oMLX is installed here, or OMLX_PORT is set."""
    return "OMLX_PORT" in environment or find_program("omlx", environment) is not None or _APP.exists()


def connect(_allowed_networks: Networks) -> Daemon:
    """Return the oMLX of this machine; it fetches no model."""
    from runtimes.omlx_client import Omlx  # noqa: PLC0415 - aiohttp, which a proxy does without

    return Omlx()


RUNTIME: Final = Runtime(
    name="omlx",
    formats=frozenset({"mlx", "safetensors"}),
    modes=frozenset({"chat"}),
    settings=frozenset({"parallel"}),
    installed=is_installed,
    install_hint="install oMLX (`brew install jundot/omlx/omlx`, or its app) and start it",
    daemon=connect,
    errors=_ERRORS,
    # It transcribes, embeds and ranks with models of other kinds, which no mode is for.
    routes={"chat": TEXT_ROUTES | {"responses", "messages", "count_tokens"}},
    speed_priors=MLX_SPEED,
    cache_sharing="context",
    memory=MlxMemory(),
)
