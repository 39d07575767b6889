"""The paths that the engines of a service answer, as `runtimes/` states them for each engine and its modes."""

from collections.abc import Sequence
from typing import Final, get_args

from crds.serving import Mode
from gateway.proxy import errors, paths
from gateway.proxy.config import Backend
from gateway.proxy.service import ServiceConfig
from runtimes.registry import find_runtime

_MODES: Final = frozenset[str](get_args(Mode))
"""Each is also the name of the path that it is for."""


def check_route(route: str, path: str, service: ServiceConfig) -> None:
    """Raise RequestError if the engines of a service are known to lack a path in every mode, so that none is asked.

    A path that an engine has in another mode is its own decision: llama.cpp chats in each.
    """
    backends = service.backends
    for backend in backends:
        routes = find_runtime(backend.engine).routes
        if not routes or any(route in served for served in routes.values()):
            return
    if backends:
        raise errors.unsupported_path(service.name, path, suggest_paths(route, backends))


def suggest_paths(route: str, backends: Sequence[Backend]) -> str:
    """Return what clients may ask instead of a path of this name, which the engines of a service lack.

    Paths for audio are not named: whether they work depends on the model.
    """
    served = frozenset[str]().union(*map(_list_routes, backends)) - {route} - paths.FORM_ROUTES
    named = [path for path, name in paths.INFERENCE.items() if name in served and path != paths.RERANK_ALIAS]
    if not named:
        return "the documentation of its engine says which paths it has"
    way = f"use {', '.join(named)}"
    return f"{way}, or a service with spec.mode {route}" if route in _MODES else way


def _list_routes(backend: Backend) -> frozenset[str]:
    """Return the names of the paths that an engine answers; of one that is not known, that of its mode."""
    by_mode = find_runtime(backend.engine).routes
    if not by_mode:
        return _MODES & {backend.mode}
    of_mode = [served for mode, served in by_mode.items() if mode == backend.mode]
    return frozenset().union(*(of_mode or by_mode.values()))
