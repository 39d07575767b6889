"""The agent against a real API server: a bound MetalProcess is served, survives what it must, and goes when told."""

import asyncio
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
from devices.pressure import Reading
from kube.client import Client, Obj
from kube.errors import NotFound
from kube.resources import ENDPOINT_SLICES, EVENTS, METAL_HOSTS, METAL_PROCESSES
from metal_agent import registration
from metal_agent.ledger import Ledger
from tests import tiny_gguf
from tests.cluster.bound import GIB, LONG, QUESTION, TOKEN, Serving, answers, back, engines, http, serving
from tests.controlplane.network import ADDRESS
from tests.controlplane.plane import ControlPlane
from tests.eventually import eventually
from tests.web import FileServer

__all__ = ["http", "serving"]


async def test_a_bound_process_is_served_at_the_address_of_its_slice_to_who_has_the_token(
    serving: Serving, http: aiohttp.ClientSession
) -> None:
    await serving.bind()
    url = await serving.ready()
    assert url.startswith(f"http://{serving.host.address}:18")
    assert await answers(http, url)
    async with aiohttp.ClientSession() as nobody, nobody.post(f"{url}/v1/chat/completions", json=QUESTION) as refused:
        assert refused.status == 401
    found = await serving.slice()
    owner = found["metadata"]["ownerReferences"][0]
    assert (owner["kind"], owner["uid"]) == ("MetalProcess", (await serving.object())["metadata"]["uid"])
    arguments = " ".join(psutil.Process(await serving.pid()).cmdline())
    assert TOKEN not in arguments + str(psutil.Process(await serving.pid()).environ())


async def test_the_host_tells_what_it_is_and_what_it_has_left(serving: Serving) -> None:
    async def told() -> MetalHostStatus:
        found = await serving.client.get(METAL_HOSTS, serving.host.name)
        return msgspec.convert(found["status"], MetalHostStatus)

    before = await eventually(told)
    assert before.address == serving.host.address
    assert before.memory_bytes == psutil.virtual_memory().total
    assert before.budget_bytes == before.available_bytes
    assert "llama.cpp" in before.runtimes
    assert before.boot_id == processes.boot_id()
    assert before.booted_at
    assert before.memory_pressure in {"normal", "warn", "critical"}
    assert before.swap_used_bytes is not None
    await serving.bind()
    uid = (await serving.object())["metadata"]["uid"]

    async def reserved() -> bool:
        now = await told()
        assert before.available_bytes is not None
        return [p.uid for p in now.processes] == [uid] and now.available_bytes == before.available_bytes - GIB

    await eventually(reserved)


async def test_a_host_that_fares_as_before_is_not_written_again(client: Client, namespace: str) -> None:
    facts = host.read()
    reading = Reading("normal", 3 * GIB, 20 * GIB)

    async def report(pressure: Reading) -> str:
        status = registration.status(facts, HostState(pressure=pressure), "10.0.0.7", Ledger(8 * GIB), [])
        await registration.report(client, namespace, status)
        version: str = (await client.get(METAL_HOSTS, namespace))["metadata"]["resourceVersion"]
        return version

    try:
        first = await report(reading)
        assert await report(reading) == first
        assert await report(Reading("normal", 3 * GIB + 900, 19 * GIB)) == first
        second = await report(Reading("warn", 3 * GIB, 20 * GIB))
        assert second != first
        assert await report(Reading("warn", 5 * GIB, 20 * GIB)) != second
    finally:
        await client.delete(METAL_HOSTS, namespace)


async def test_a_crashed_engine_is_withdrawn_and_comes_back(serving: Serving, http: aiohttp.ClientSession) -> None:
    await serving.bind()
    url = await serving.ready()
    pid = await serving.pid()
    os.kill(pid, signal.SIGKILL)

    async def withdrawn() -> bool:
        return not (await serving.slice())["endpoints"][0]["conditions"]["ready"]

    await eventually(withdrawn)
    assert await serving.ready() == url, "the port stays"
    assert await answers(http, url)
    status = await serving.status()
    assert status.pid != pid
    assert (status.restarts, status.last_exit and status.last_exit.signal) == (1, "SIGKILL")

    async def told() -> bool:
        events = (await serving.client.list(EVENTS, serving.namespace)).items
        return {"EngineExited", "Ready"} <= {event["reason"] for event in events}

    await eventually(told)


async def test_a_deleted_process_answers_what_it_has_begun_and_goes(
    serving: Serving, http: aiohttp.ClientSession
) -> None:
    await serving.bind(contextLength=4096)
    url = await serving.ready()
    pid = await serving.pid()
    async with http.post(f"{url}/v1/chat/completions", json=LONG | {"max_tokens": 3000}) as stream:
        await stream.content.readline()
        await serving.client.delete(METAL_PROCESSES, "chat-1", serving.namespace)

        async def draining() -> bool:
            conditions = (await serving.slice())["endpoints"][0]["conditions"]
            return bool(conditions == {"ready": False, "serving": True, "terminating": True})

        await eventually(draining)
        assert psutil.pid_exists(pid)
        assert (await stream.content.read()).rstrip().endswith(b"data: [DONE]"), "it was let to its end"
    await serving.phase("Stopped")
    await eventually(serving.gone)
    assert not psutil.pid_exists(pid)


async def test_a_killed_agent_breaks_no_stream_and_its_successor_adopts(
    serving: Serving, http: aiohttp.ClientSession
) -> None:
    await serving.bind(contextLength=30000, parallel=2)
    url = await serving.ready()
    pid = await serving.pid()
    async with http.post(f"{url}/v1/chat/completions", json=LONG) as stream:
        await stream.content.readline()
        await serving.host.agent.kill()
        assert await answers(http, url), "new requests are answered without an agent"
        serving.host.agent.start()
        await eventually(lambda: '"event": "adopted"' in serving.host.agent.tail(50))
        await eventually(lambda: _renewed_again(serving))
        assert await stream.content.readline()
        assert stream.content.exception() is None
        assert (await serving.slice())["endpoints"][0]["conditions"]["ready"]
    assert await serving.pid() == pid
    assert await answers(http, url)


async def _renewed_again(serving: Serving) -> bool:
    """Whether the successor knows what is assigned, which it writes nothing about when all is as it was."""
    log = serving.host.agent.log.read_text()
    return "regained" in log[log.rindex('"agent starts"') :]


async def test_without_the_api_server_all_goes_on_even_through_crashes(
    plane: ControlPlane, serving: Serving, http: aiohttp.ClientSession
) -> None:
    await serving.bind()
    url = await serving.ready()
    pid = await serving.pid()
    await plane.stop_apiserver()
    try:
        assert await answers(http, url)
        os.kill(pid, signal.SIGKILL)
        await eventually(lambda: back(http, url))
        await serving.host.agent.kill()
        serving.host.agent.start()
        await eventually(lambda: '"event": "adopted"' in serving.host.agent.tail(50))
        assert await answers(http, url)
        await serving.host.host.kill_all()
        await serving.host.agent.wait(10)
        serving.host.agent.start()
        await eventually(lambda: back(http, url), timeout=45)
    finally:
        await plane.start_apiserver()
    assert await serving.ready() == url


async def test_weights_over_http_are_verified_and_never_served_when_wrong(serving: Serving, tmp_path: Path) -> None:
    model = tmp_path / "served" / "tiny.gguf"
    model.parent.mkdir()
    tiny_gguf.write(model)
    async with FileServer(model.parent, address=ADDRESS) as files:
        await serving.bind(artifact={"source": f"{files.url}/tiny.gguf", "sha256": "0" * 64})
        status = await serving.phase("Failed", "ChecksumMismatch")
        assert "0" * 64 in status.message
        assert await serving.gone() or not (await serving.slice())["endpoints"][0]["conditions"]["ready"]


async def test_a_slow_download_shows_its_progress(
    serving: Serving, tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    model = tmp_path / "served" / "tiny.gguf"
    model.parent.mkdir()
    tiny_gguf.write(model)
    async with FileServer(model.parent, address=ADDRESS) as files:
        files.pause_seconds = 0.5
        await serving.bind(artifact={"source": f"{files.url}/tiny.gguf"})

        async def underway() -> bool:
            status = await serving.status()
            assert status.phase == "Fetching"
            assert status.progress
            return status.progress.total_bytes == model.stat().st_size and status.progress.bytes > 0

        await eventually(underway)
        assert await answers(http, await serving.ready())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"runtime": "quantum"}, "Unsupported"),
        ({"memoryBytes": 2**50}, "InsufficientMemory"),
        ({"artifact": {"source": "file:///etc/hostname"}}, "FileNotAllowed"),
    ],
)
async def test_what_the_host_cannot_run_is_rejected(serving: Serving, changes: Obj, reason: str) -> None:
    await serving.bind(**changes)
    assert (await serving.phase("Rejected", reason)).message


async def test_a_port_that_another_program_holds_is_left_to_it(serving: Serving, http: aiohttp.ClientSession) -> None:
    taken = await asyncio.create_subprocess_exec(
        *serving.host.host.exec,
        "python3",
        "-c",
        f"import socket; it = socket.create_server(('{serving.host.address}', 18000)); print(1, flush=True); input()",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert taken.stdout
    await taken.stdout.readline()
    await serving.bind()
    url = await serving.ready()
    assert url.endswith(":18001")
    assert await answers(http, url)
    taken.kill()
    await taken.wait()


async def test_a_killed_proxy_is_back_with_its_port(serving: Serving, http: aiohttp.ClientSession) -> None:
    await serving.bind()
    url = await serving.ready()
    pid = await serving.pid()
    proxies = [
        p
        for p in psutil.process_iter(["cmdline"])
        if "proxy" in p.info["cmdline"] and str(serving.host.state_folder) in " ".join(p.info["cmdline"])
    ]
    assert len(proxies) == 1
    proxies[0].kill()
    await eventually(lambda: back(http, url))
    assert await serving.url() == url
    assert await serving.pid() == pid, "the engine was not touched"


async def test_a_host_that_was_declared_lost_serves_again_only_what_is_still_its_own(serving: Serving) -> None:
    await serving.bind()
    await serving.ready()
    uid = (await serving.object())["metadata"]["uid"]
    await serving.host.agent.kill()
    # As the controller does when the Lease has expired: the slice first, then the process.
    await serving.client.delete(ENDPOINT_SLICES, f"chat.{serving.host.name}", serving.namespace)
    patch = [{"op": "remove", "path": "/metadata/finalizers"}]
    await serving.client.patch_json(METAL_PROCESSES, "chat-1", serving.namespace, patch)
    await serving.client.delete(METAL_PROCESSES, "chat-1", serving.namespace, uid=uid)
    serving.host.agent.start()

    async def stopped_and_never_ready() -> bool:
        try:
            if (await serving.slice())["endpoints"][0]["conditions"]["ready"]:
                pytest.fail("it was made ready, and its service runs elsewhere by now")
        except NotFound:
            return not engines(serving)
        return False

    await eventually(stopped_and_never_ready)


async def test_the_agent_is_small(serving: Serving) -> None:
    await serving.bind()
    await serving.ready()
    resident_mib = psutil.Process(serving.host.agent.pid).memory_info().rss / 2**20
    assert resident_mib < 80
