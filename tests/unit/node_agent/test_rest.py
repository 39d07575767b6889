"""The REST API has llmfit's shapes, asks for its key, and no request makes it fail."""

import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest
import yarl
from msgspec.structs import replace

from crds.nodefitness import NodeDevice, NodeFitnessStatus
from gateway.http.whole_answers import AnswerServer
from node_agent.metrics import NodeMetrics
from node_agent.rest import (
    _describe_system,
    build_metrics_server,
    build_rest_server,
    serve,
)

GIB = 2**30
KEY = "s3cret-key"
L4 = NodeDevice(
    id="GPU-1",
    product="NVIDIA L4",
    memory_bytes=round(22.49 * GIB),
    free_bytes=round(21.485 * GIB),
    memory_bandwidth_bytes_per_second=300 * 10**9,
)
TWO_L4 = NodeFitnessStatus(
    vendor="nvidia",
    devices=[L4, L4],
    processor="AMD EPYC",
    cpu_cores=2,
    architecture="x86_64",
    memory_bytes=64 * GIB,
    available_bytes=round(57.6 * GIB),
)
CPU = NodeFitnessStatus(
    vendor="cpu",
    processor="AMD EPYC",
    cpu_cores=2,
    architecture="x86_64",
    memory_bytes=round(23.54 * GIB),
    available_bytes=round(22.28 * GIB),
    memory_bandwidth_bytes_per_second=40 * 10**9,
)
RECORDED = Path(__file__).parent / "llmfit"
"""Answers of llmfit 1.1.17 on a machine with two processors; of `two-l4`, nvidia-smi was simulated."""

Get = Callable[..., Any]


def recorded(name: str) -> dict[str, Any]:
    system: dict[str, Any] = json.loads((RECORDED / f"system-{name}.json").read_text())["system"]
    return system


@pytest.mark.parametrize(("name", "hardware"), [("two-l4", TWO_L4), ("cpu", CPU)])
def test_system_is_what_llmfit_answers_on_the_same_hardware(name: str, hardware: NodeFitnessStatus) -> None:
    assert _describe_system(hardware) == recorded(name)


def test_unknown_size_is_null() -> None:
    unknown = replace(TWO_L4, devices=[NodeDevice(id="GPU-1"), L4], memory_bytes=None)
    system = _describe_system(unknown)
    assert system["total_ram_gb"] is None
    assert [gpu["vram_gb"] for gpu in system["gpus"]] == [22.49, None]
    assert [gpu["free_vram_gb"] for gpu in system["gpus"]] == [21.49, None]


@contextlib.asynccontextmanager
async def served(server: AnswerServer) -> AsyncIterator[Get]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    async with serve(server, "--port", "127.0.0.1", port), aiohttp.ClientSession() as session:

        async def get(path: str, header: str | None = f"Bearer {KEY}", method: str = "GET") -> tuple[int, Any, Any]:
            url = yarl.URL(f"http://127.0.0.1:{port}{path}", encoded=True)
            headers = {} if header is None else {"Authorization": header}
            async with session.request(method, url, headers=headers) as answer:
                text = await answer.text()
                return answer.status, json.loads(text) if answer.content_type == "application/json" else text, answer

        yield get


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_text(f"{KEY}\n")
    return path


async def test_health_is_open_and_all_else_asks_for_the_key(key: Path) -> None:
    async with served(build_rest_server("gpu-1", lambda: CPU, key)) as get:
        status, body, _ = await get("/health", None)
        assert (status, body) == (200, {"status": "ok", "node": {"name": "gpu-1", "os": "linux"}})
        wrong = (None, "", "Bearer", "Bearer ", "Bearer wrong", f"Basic {KEY}", KEY, f"Bearer {KEY}x", "Bearer \xfc")
        for header in wrong:
            for path in ("/api/v1/system", "/api/v1/unknown", "/health/../api/v1/system", "//health"):
                status, body, answer = await get(path, header)
                assert (status, answer.headers["WWW-Authenticate"]) == (401, "Bearer"), (path, header)
                assert KEY not in str(body)
        status, body, _ = await get("/api/v1/system")
        assert (status, body["system"]["cpu_name"]) == (200, "AMD EPYC")
        assert (await get("/api/v1/system", f"bearer {KEY}"))[0] == 200


async def test_key_is_replaced_without_a_restart(key: Path, tmp_path: Path) -> None:
    async with served(build_rest_server("gpu-1", lambda: CPU, key)) as get:
        (tmp_path / "key").write_text("other")
        assert (await get("/api/v1/system"))[0] == 401
        assert (await get("/api/v1/system", "Bearer other"))[0] == 200
        for broken in ("", "x" * 5000):
            (tmp_path / "key").write_text(broken)
            assert (await get("/api/v1/system", f"Bearer {broken}"))[0] == 503


async def test_hardware_that_was_not_read_yet_is_unavailable() -> None:
    async with served(build_rest_server("gpu-1", lambda: None, None)) as get:
        for path in ("system", "models", "models/top", "models/qwen"):
            assert (await get(f"/api/v1/{path}", None))[0] == 503


HOSTILE = ("%00", "%2F", "..%2F..%2Fetc", "%zz", "%FF%FE", "a" * 7000, "a" * 20000, quote("ü" * 100), "%0d%0aX:%20y")


async def test_hostile_paths_and_queries_are_answered_and_no_error(key: Path) -> None:
    async with served(build_rest_server("gpu-1", lambda: CPU, key)) as get:
        for text in HOSTILE:
            for path in (
                f"/{text}",
                f"/api/v1/{text}",
                f"/api/v1/system?search={text}",
                f"/api/v1/system?{text}={text}",
            ):
                assert (await get(path))[0] in {200, 400, 404, 414, 431}, path[:80]
        for method in ("POST", "DELETE", "TRACE"):
            assert (await get("/api/v1/system", method=method))[0] == 405


ROW_KEYS_OF_OURS = {"title", "source"}


async def test_models_are_rows_of_llmfit_that_fit_the_memory_that_is_free(key: Path) -> None:
    async with served(build_rest_server("gpu-1", lambda: CPU, key)) as get:
        status, body, _ = await get("/api/v1/models/top?limit=2")
        llmfit = json.loads((RECORDED / "models-top.json").read_text())
        assert status == 200
        assert body.keys() == llmfit.keys()
        assert body["filters"].keys() <= llmfit["filters"].keys()
        assert len(body["models"]) == body["returned_models"] == 2 <= body["total_models"]
        for row in body["models"]:
            assert row.keys() - ROW_KEYS_OF_OURS <= llmfit["models"][0].keys()
            assert 0 < row["memory_required_gb"] <= row["memory_available_gb"] == 22.28
            assert (row["run_mode"], row["fit_level"] != "too_tight") == ("cpu_only", True)
            assert row["estimated_tps"] > 0
        _, body, _ = await get("/api/v1/models/QWEN3-8b")
        assert [row["name"] for row in body["models"]] == ["qwen3-8b"]
        assert (await get("/api/v1/models/no-such-model"))[1]["models"] == []
        _, every, _ = await get("/api/v1/models?limit=1000")
        assert body["models"][0] in every["models"]
        assert (every["total_models"], every["filters"]["top_only"]) == (len(every["models"]), False)
        assert len((await get("/api/v1/models"))[1]["models"]) == min(20, every["total_models"])


async def test_model_that_is_too_large_is_there_only_if_asked_for(key: Path) -> None:
    small = replace(CPU, memory_bytes=GIB, available_bytes=GIB)
    async with served(build_rest_server("gpu-1", lambda: small, key)) as get:
        for path in ("top", "top?min_fit=too_tight", "qwen3-8b"):
            assert (await get(f"/api/v1/models/{path}"))[1]["models"] == []
        (row,) = (await get("/api/v1/models/qwen3-8b?min_fit=too_tight"))[1]["models"]
        assert (row["fit_level"], row["estimated_tps"]) == ("too_tight", None)
        assert row["notes"]


async def test_hostile_names_of_models_are_refused_or_found_nowhere(key: Path) -> None:
    async with served(build_rest_server("gpu-1", lambda: CPU, key)) as get:
        for text in HOSTILE:
            status, body, _ = await get(f"/api/v1/models/{text}")
            assert status in {200, 400, 404, 414, 431}
            assert status != 200 or body["models"] == [], text[:20]
        for query in ("limit=-1", "limit=x", "limit=%D9%A3", "limit=99999999999999999999", "min_fit=best", "limit=1.5"):
            assert (await get(f"/api/v1/models/top?{query}"))[0] == 400, query


async def test_metrics_and_health_need_no_key() -> None:
    metrics = NodeMetrics("gpu-1", "flexinfer")
    metrics.show_devices([NodeDevice(id="GPU-1", temperature_celsius=60, utilization_percent=25)])
    async with served(build_metrics_server(metrics.render)) as get:
        status, text, _ = await get("/metrics", None)
        assert status == 200
        assert 'flexinfer_gpu_temperature_celsius{gpu="GPU-1",node="gpu-1"} 60.0' in text
        assert 'flexinfer_gpu_utilization_ratio{gpu="GPU-1",node="gpu-1"} 0.25' in text
        assert "flexinfer_gpu_memory_bytes{" not in text
        metrics.show_devices([])
        assert "GPU-1" not in (await get("/metrics", None))[1]
        assert (await get("/healthz", None))[:2] == (200, "ok\n")
        assert (await get("/unknown", None))[0] == 404


async def test_taken_port_ends_nothing() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        server = build_metrics_server(lambda: b"")
        async with serve(server, "--metrics-port", "127.0.0.1", taken.getsockname()[1]):
            pass
