"""The REST API of a node, in the shapes of `llmfit serve`: health for everybody, the hardware behind a key.

Metrics and health are a server of their own, so that a scraper and the kubelet need no key. Without a key the API is
served on loopback only.
"""

import asyncio
import contextlib
import hmac
from collections.abc import AsyncIterator, Callable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import structlog
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from prometheus_client import CONTENT_TYPE_LATEST

from crds.nodefitness import NodeDevice
from devices.node_hardware import NodeHardware

LOOPBACK: Final = "127.0.0.1"
EVERYWHERE: Final = "0.0.0.0"
_GIB: Final = 2**30
_BACKENDS: Final = {"nvidia": "CUDA", "amd": "ROCm", "intel": "SYCL", "intel-gaudi": "Gaudi"}
_X86: Final = frozenset({"x86_64", "amd64", "i686"})
_LONGEST_KEY: Final = 4096
_TOP_LIMIT: Final = 5
_NAME_LIMIT: Final = 20
"""Rows that llmfit answers with if the client states no limit."""

log = structlog.get_logger()

ReadKnownHardware = Callable[[], NodeHardware | None]


class ApiKeyFile:
    """The key of the REST API in a file, which is read at each request: a mounted Secret may change."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> bytes:
        """Return the key. Raises OSError: it cannot be read, or is empty or too long."""
        with self._path.open("rb") as file:
            key = file.read(_LONGEST_KEY + 1).strip()
        if not key or len(key) > _LONGEST_KEY:
            raise OSError(f"the key in {self._path} has {len(key)} bytes: write one of 1 to {_LONGEST_KEY}")
        return key

    def admits(self, header: str) -> bool:
        """Decide whether an Authorization header has the key. Raises OSError."""
        scheme, _, token = header.partition(" ")
        given = token.strip().encode("utf-8", "surrogateescape")
        return hmac.compare_digest(given, self.read()) and scheme.lower() == "bearer"


def build_rest_application(
    node: str, read: ReadKnownHardware, memory_bandwidth: int | None, key: ApiKeyFile | None
) -> web.Application:
    """Return the REST API.

    Args:
        node: the name of the Node.
        read: returns the hardware as it was read last; None: not yet.
        memory_bandwidth: that of its processor, in bytes a second; None: unknown.
        key: the key that all but /health ask for; None: no key.
    """
    identity = {"name": node, "os": "linux"}

    async def answer_models(request: web.Request) -> web.Response:
        # The estimates and the catalog take some MiB, which an agent that nobody asks does without.
        from node_agent import model_fits  # noqa: PLC0415 - as said

        hardware, name = read(), request.match_info.get("name")
        if hardware is None:
            return _refuse_early()
        try:
            query = model_fits.parse_fit_query(
                request.query, limit=_TOP_LIMIT if name is None else _NAME_LIMIT, search=name or ""
            )
        except ValueError as error:
            return web.json_response({"error": str(error)}, status=400)
        if name is None and query.min_fit == "too_tight":
            query = query._replace(min_fit="marginal")
        rows = await asyncio.to_thread(model_fits.list_fits, hardware, memory_bandwidth, query)
        answer = {
            "node": identity,
            "system": describe_system(hardware),
            "total_models": len(rows),
            "returned_models": min(len(rows), query.limit),
            "filters": model_fits.describe_filters(query, top_only=name is None),
            "models": rows[: query.limit],
        }
        return web.json_response(answer)

    async def answer_health(_: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "node": identity})

    async def answer_system(_: web.Request) -> web.Response:
        hardware = read()
        if hardware is None:
            return _refuse_early()
        return web.json_response({"node": identity, "system": describe_system(hardware)})

    middlewares: list[Middleware] = [_answer_errors]
    if key:
        middlewares.append(_require(key))
    application = web.Application(middlewares=middlewares)
    application.router.add_get("/health", answer_health)
    application.router.add_get("/api/v1/system", answer_system)
    application.router.add_get("/api/v1/models/top", answer_models)
    application.router.add_get("/api/v1/models/{name:.+}", answer_models)
    return application


def _refuse_early() -> web.Response:
    return web.json_response({"error": "the hardware was not read yet: ask again"}, status=503)


def build_metrics_application(render: Callable[[], bytes]) -> web.Application:
    """Return the server of metrics and health, which needs no key."""

    async def answer_metrics(_: web.Request) -> web.Response:
        return web.Response(body=render(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def answer_health(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    application = web.Application(middlewares=[_answer_errors])
    application.router.add_get("/metrics", answer_metrics)
    application.router.add_get("/healthz", answer_health)
    return application


@contextlib.asynccontextmanager
async def serve_application(application: web.Application, option: str, host: str, port: int) -> AsyncIterator[None]:
    """Serve while the block runs; a port that is taken is logged with `option`, and ends nothing."""
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port).start()
            log.info("port_served", option=option, address=host, port=port)
        except OSError as error:
            log.warning("port_not_served", option=option, error=str(error), remedy=f"give {option} another port, or 0")
        yield
    finally:
        await runner.cleanup()


@web.middleware
async def _answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer errors as JSON, without words of the request."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        headers = {name: value for name, value in error.headers.items() if name in {"Allow", "WWW-Authenticate"}}
        return web.json_response({"error": error.reason}, status=error.status, headers=headers)


def _require(key: ApiKeyFile) -> Middleware:
    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path != "/health":
            try:
                is_admitted = key.admits(request.headers.get("Authorization", ""))
            except OSError as error:
                log.warning("api_key_not_read", error=str(error))
                return web.json_response({"error": "the key of this server cannot be read"}, status=503)
            if not is_admitted:
                challenge = {"WWW-Authenticate": "Bearer"}
                return web.json_response({"error": "a key is missing or wrong"}, status=401, headers=challenge)
        return await handler(request)

    return check


def describe_system(hardware: NodeHardware) -> dict[str, Any]:
    """Return the hardware in the shape of llmfit's /api/v1/system: GiB, and one entry for devices that are alike."""
    gpus = [
        _describe_group(hardware, list(alike)) for _, alike in groupby(sorted(hardware.devices, key=_alike), key=_alike)
    ]
    # llmfit names the devices with the most memory first.
    gpus.sort(key=lambda each: -(each["vram_gb"] or 0))
    first: Mapping[str, Any] = gpus[0] if gpus else {}
    processor = "CPU (x86)" if hardware.architecture in _X86 else "CPU (ARM)"
    return {
        "total_ram_gb": _gib(hardware.memory_bytes),
        "available_ram_gb": _gib(hardware.available_bytes),
        "cpu_cores": hardware.cpu_cores,
        "cpu_name": hardware.processor,
        "has_gpu": bool(gpus),
        "gpu_vram_gb": first.get("vram_gb"),
        "gpu_available_gb": None,
        "gpu_name": first.get("name"),
        "gpu_count": len(hardware.devices),
        "unified_memory": False,
        "backend": first.get("backend", processor),
        "gpus": gpus,
    }


def _alike(device: NodeDevice) -> tuple[str, str, int]:
    return device.product, device.partition, device.memory_bytes or 0


def _describe_group(hardware: NodeHardware, devices: list[NodeDevice]) -> dict[str, Any]:
    first = devices[0]
    free = [each.free_bytes for each in devices if each.free_bytes is not None]
    bandwidth = first.memory_bandwidth_bytes_per_second
    return {
        "name": f"{first.product} {first.partition}".strip(),
        "vram_gb": _gib(first.memory_bytes),
        "free_vram_gb": _gib(sum(free)) if len(free) == len(devices) else None,
        "backend": _BACKENDS.get(hardware.vendor, hardware.vendor),
        "count": len(devices),
        "unified_memory": False,
        "memory_bandwidth_gbps": None if bandwidth is None else round(bandwidth / 1e9, 1),
    }


def _gib(size_bytes: int | None) -> float | None:
    return None if size_bytes is None else round(size_bytes / _GIB, 2)
