"""The agent, with a real API server, serves a bound MetalProcess through failures until it is deleted."""

import os
import signal
from pathlib import Path

import aiohttp
import msgspec
import psutil
import pytest

from crds.metalhost import MetalHostStatus
from devices import host, processes
from devices.host import HostState
from devices.pressure import PressureReading
from kube.client import Client
from kube.errors import NotFound
from kube.resources import ENDPOINT_SLICES, METAL_HOSTS, METAL_PROCESSES
from metal_agent.cluster import host_status
from metal_agent.memory.ledger import Ledger
from tests.cluster.metal_agent.bound_process import (
    GIB,
    LONG,
    QUESTION,
    TOKEN,
    BoundProcess,
    answers,
    answers_if_reachable,
    bound_process,
    engines,
    http,
)
from tests.controlplane.network import ADDRESS
from tests.support.eventually import eventually
from tests.support.file_server import FileServer
from tests.support.live_processes import find_processes
from tests.support.tiny_models import tiny_gguf

__all__ = ["bound_process", "http"]


async def test_bound_process_answers_at_the_address_of_its_slice_with_the_token(
    bound_process: BoundProcess, http: aiohttp.ClientSession
) -> None:
    await bound_process.bind()
    url = await bound_process.ready()
    assert url.startswith(f"http://{bound_process.host.address}:18")
    assert await answers(http, url)
    async with aiohttp.ClientSession() as nobody, nobody.post(f"{url}/v1/chat/completions", json=QUESTION) as refused:
        assert refused.status == 401
    endpoint_slice = await bound_process.slice()
    owner = endpoint_slice["metadata"]["ownerReferences"][0]
    assert (owner["kind"], owner["uid"]) == ("MetalProcess", (await bound_process.object())["metadata"]["uid"])
    arguments = " ".join(psutil.Process(await bound_process.pid()).cmdline())
    assert TOKEN not in arguments + str(psutil.Process(await bound_process.pid()).environ())


async def test_host_status_has_hardware_and_free_memory(bound_process: BoundProcess) -> None:
    async def told() -> MetalHostStatus:
        host = await bound_process.client.get(METAL_HOSTS, bound_process.host.name)
        return msgspec.convert(host["status"], MetalHostStatus)

    before = await eventually(told)
    assert before.address == bound_process.host.address
    assert before.memory_bytes == psutil.virtual_memory().total
    assert before.budget_bytes == before.available_bytes
    assert "llama.cpp" in before.runtimes
    assert before.boot_id == processes.boot_id()
    assert before.booted_at
    assert before.memory_pressure in {"normal", "warn", "critical"}
    assert before.swap_used_bytes is not None
    await bound_process.bind()
    uid = (await bound_process.object())["metadata"]["uid"]

    async def reserved() -> bool:
        now = await told()
        assert before.available_bytes is not None
        return [p.uid for p in now.processes] == [uid] and now.available_bytes == before.available_bytes - GIB

    await eventually(reserved)


async def test_unchanged_host_status_is_not_written_again(client: Client, namespace: str) -> None:
    facts = host.read()
    reading = PressureReading("normal", 3 * GIB, 20 * GIB)

    async def report(pressure: PressureReading) -> str:
        status = host_status.build_status(facts, HostState(pressure=pressure), "10.0.0.7", Ledger(8 * GIB), [])
        await host_status.report_host(client, namespace, status)
        version: str = (await client.get(METAL_HOSTS, namespace))["metadata"]["resourceVersion"]
        return version

    try:
        first = await report(reading)
        assert await report(reading) == first
        assert await report(PressureReading("normal", 3 * GIB + 900, 19 * GIB)) == first
        second = await report(PressureReading("warn", 3 * GIB, 20 * GIB))
        assert second != first
        assert await report(PressureReading("warn", 5 * GIB, 20 * GIB)) != second
    finally:
        await client.delete(METAL_HOSTS, namespace)


async def test_deleted_process_drains_and_is_removed(bound_process: BoundProcess, http: aiohttp.ClientSession) -> None:
    await bound_process.bind(contextLength=4096)
    url = await bound_process.ready()
    pid = await bound_process.pid()
    async with http.post(f"{url}/v1/chat/completions", json=LONG | {"max_tokens": 3000}) as stream:
        await stream.content.readline()
        os.kill(pid, signal.SIGSTOP)  # the request lasts until the slice is read, however long that takes
        await bound_process.client.delete(METAL_PROCESSES, "chat-1", bound_process.namespace)
        await eventually(bound_process.draining)
        os.kill(pid, signal.SIGCONT)
        assert (await stream.content.read()).rstrip().endswith(b"data: [DONE]"), "it was let to its end"
    await bound_process.phase("Stopped")
    await eventually(bound_process.gone)
    assert not psutil.pid_exists(pid)


async def test_a_killed_agent_breaks_no_stream_and_its_successor_adopts(
    bound_process: BoundProcess, http: aiohttp.ClientSession
) -> None:
    await bound_process.bind(contextLength=30000, parallel=2)
    url = await bound_process.ready()
    pid = await bound_process.pid()
    async with http.post(f"{url}/v1/chat/completions", json=LONG) as stream:
        await stream.content.readline()
        await bound_process.host.agent.kill()
        assert await answers(http, url), "new requests are answered without an agent"
        bound_process.host.agent.start()
        await eventually(lambda: '"event":"engine_adopted"' in bound_process.host.agent.tail(50))
        await eventually(lambda: _renewed_again(bound_process))
        assert await stream.content.readline()
        assert stream.content.exception() is None
        assert (await bound_process.slice())["endpoints"][0]["conditions"]["ready"]
    assert await bound_process.pid() == pid
    assert await answers(http, url)


async def _renewed_again(bound_process: BoundProcess) -> bool:
    """Return True if the successor has listed the assignments; it writes nothing to the API if none has changed."""
    log = bound_process.host.agent.log.read_text()
    return "regained" in log[log.rindex('"agent_started"') :]


async def test_a_slow_download_shows_its_progress(
    bound_process: BoundProcess, tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    model = tmp_path / "served" / "tiny.gguf"
    model.parent.mkdir()
    tiny_gguf.write(model)
    async with FileServer(model.parent, address=ADDRESS) as files:
        files.sending.clear()
        await bound_process.bind(artifact={"source": f"{files.url}/tiny.gguf"})

        async def underway() -> bool:
            status = await bound_process.status()
            assert status.phase == "Fetching"
            assert status.progress
            return status.progress.total_bytes == model.stat().st_size and status.progress.bytes > 0

        await eventually(underway)
        files.sending.set()
        assert await answers(http, await bound_process.ready())


async def test_a_killed_proxy_is_back_with_its_port(bound_process: BoundProcess, http: aiohttp.ClientSession) -> None:
    await bound_process.bind()
    url = await bound_process.ready()
    pid = await bound_process.pid()
    (proxy,) = find_processes(str(bound_process.host.state_folder / "proxy" / "control.sock"))
    proxy.kill()
    await eventually(lambda: answers_if_reachable(http, url))
    assert await bound_process.url() == url
    assert await bound_process.pid() == pid, "the engine was not touched"


async def test_host_declared_lost_serves_only_processes_still_assigned_to_it(
    bound_process: BoundProcess,
) -> None:
    await bound_process.bind()
    await bound_process.ready()
    uid = (await bound_process.object())["metadata"]["uid"]
    await bound_process.host.agent.kill()
    # As the controller does when the Lease has expired: the slice first, then the process.
    await bound_process.client.delete(ENDPOINT_SLICES, f"chat.{bound_process.host.name}", bound_process.namespace)
    patch = [{"op": "remove", "path": "/metadata/finalizers"}]
    await bound_process.client.patch_json(METAL_PROCESSES, "chat-1", bound_process.namespace, patch)
    await bound_process.client.delete(METAL_PROCESSES, "chat-1", bound_process.namespace, uid=uid)
    bound_process.host.agent.start()

    async def stopped_and_never_ready() -> bool:
        try:
            if (await bound_process.slice())["endpoints"][0]["conditions"]["ready"]:
                pytest.fail("it was made ready, and its service runs elsewhere by now")
        except NotFound:
            return not engines(bound_process)
        return False

    await eventually(stopped_and_never_ready)


async def test_agent_takes_less_than_64_mib(bound_process: BoundProcess) -> None:
    await bound_process.bind()
    await bound_process.ready()
    resident_mib = psutil.Process(bound_process.host.agent.pid).memory_info().rss / 2**20
    assert resident_mib < 64
