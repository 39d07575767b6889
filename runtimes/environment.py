"""The environment variables that engines and the proxy inherit: a list, because everything else may be a secret.

The agent's own environment has credentials that no engine needs, such as KUBECONFIG, tokens and cloud keys, and
variables that would change an engine's settings without a trace in its service.
"""

import sys
from collections.abc import Mapping
from typing import Final

PYTHON: Final = (sys.executable, "-P", "-m")
"""The command that runs a module of ours; without -P a file of the working directory could take its place."""

_NAMES: Final = frozenset(
    {
        *("HOME", "LANG", "LANGUAGE", "LD_LIBRARY_PATH", "LOGNAME", "PATH", "PYTHONPATH"),
        *("SHELL", "SSL_CERT_DIR", "SSL_CERT_FILE", "TMPDIR", "TZ", "USER"),
    }
)
_PREFIXES: Final = ("LC_", "DYLD_", "METAL_", "MTL_", "GGML_", "MLX_", "OMP_")
"""Locale, libraries, and what owners tune: Metal, llama.cpp's backends, MLX and its threads. None holds a secret."""

PYTORCH_IN_POD: Final[Mapping[str, str]] = {"HOME": "/tmp", "USER": "engine", "HF_HUB_OFFLINE": "1"}  # noqa: S108 - its own
"""Variables of an engine made of PyTorch, in a pod: its caches are on a volume of the pod, it downloads nothing, and
its user has a name, which PyTorch wants and no passwd file has."""


def select_environment(base: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of `base` that every process of the agent may have."""
    return {name: value for name, value in base.items() if name in _NAMES or name.startswith(_PREFIXES)}
