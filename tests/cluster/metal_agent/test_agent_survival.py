"""A host survives failures that need a whole machine: a full disk, sleep, a rotated token, an agent of its name."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import aiohttp

from crds.meta import HOSTS_NAMESPACE
from kube.errors import NotFound
from kube.resources import ENDPOINT_SLICES, LEASES, METAL_HOSTS
from metal_agent.exit_codes import TEMPORARY
from tests.cluster.conftest import StartMetalHost
from tests.cluster.metal_agent.bound_process import (
    BoundProcess,
    answers,
    answers_if_reachable,
    bound_process,
    engines,
    http,
)
from tests.controlplane.network import ADDRESS, Network, ip
from tests.controlplane.plane import ControlPlane
from tests.controlplane.process import Process
from tests.support.eventually import eventually
from tests.support.file_server import FileServer
from tests.support.tiny_models import tiny_gguf

__all__ = ["bound_process", "http"]

GAP_SECONDS = 27.0
"""More than an agent may be without contact before it lists its assignments again."""


async def renewals(bound_process: BoundProcess, count: int) -> None:
    """Wait until the host has renewed its Lease `count` times; with 0, until the Lease exists."""
    seen: set[str] = set()

    async def renewed() -> bool:
        lease = await bound_process.client.get(LEASES, bound_process.host.name, HOSTS_NAMESPACE)
        seen.add(lease["spec"]["renewTime"])
        return len(seen) > count

    await eventually(renewed)


async def test_second_agent_with_the_same_name_refuses_to_start(
    plane: ControlPlane, network: Network, bound_process: BoundProcess, http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    await bound_process.bind()
    url = await bound_process.ready()
    twin = await network.add_host("twin")
    kubeconfig = await plane.service_account_kubeconfig(HOSTS_NAMESPACE, bound_process.host.name)
    argv = [
        *(*twin.exec, sys.executable, "-m", "cli.main", "agent", f"--name={bound_process.host.name}"),
        *(f"--kubeconfig={kubeconfig}", f"--state-dir={tmp_path / 'twin'}", f"--address={twin.address}"),
        f"--file-root={bound_process.host.file_root}",
    ]
    second = Process("its double", argv, tmp_path / "twin.log")
    second.start()
    assert await second.wait() == TEMPORARY
    assert "another agent serves as host studio-1" in second.tail(1)
    assert "have it join as another host" in second.tail(1)
    host = await bound_process.client.get(METAL_HOSTS, bound_process.host.name)
    assert host["status"]["address"] == bound_process.host.address
    assert len(engines(bound_process)) == 1, "nothing was started by the second"
    assert await bound_process.url() == url
    assert await answers(http, url)
    await twin.close()


async def test_unreadable_record_stops_only_the_agent_with_a_message(
    bound_process: BoundProcess, http: aiohttp.ClientSession
) -> None:
    await bound_process.bind()
    url = await bound_process.ready()
    pid = await bound_process.pid()
    agent = bound_process.host.agent
    await agent.kill()
    (record,) = (bound_process.host.state_folder / "processes").glob("*.json")
    kept = record.read_bytes()
    record.unlink()
    record.mkdir()
    agent.start()
    assert await agent.wait() == TEMPORARY
    assert record.name in agent.tail(1)
    assert "Traceback" not in agent.tail(20)
    assert await answers(http, url), "what runs goes on"
    record.rmdir()
    record.write_bytes(kept)
    agent.start()
    await eventually(lambda: '"event":"engine_adopted"' in agent.tail(20))
    assert await bound_process.pid() == pid


async def test_full_disk_is_reported_and_ends_no_process(
    idle_host: StartMetalHost, bound_process: BoundProcess, http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    host = await idle_host("full-1")
    await mount("-t", "tmpfs", "-o", "size=4m,mode=700", "tmpfs", str(host.state_folder))
    # The agent cannot write its log either.
    host.agent.log = Path("/dev/full")
    ballast = host.state_folder / "ballast"
    served = tmp_path / "served"
    served.mkdir()
    tiny_gguf.write(served / "tiny.gguf")
    host.agent.start()
    try:
        full = BoundProcess(bound_process.client, bound_process.namespace, host)
        async with FileServer(served, address=ADDRESS) as files:
            await renewals(full, 0)
            fill(ballast)
            await full.bind(artifact={"source": f"{files.url}/tiny.gguf"})
            message = (await full.phase("Failed", "NoSpace")).message
            assert "needs 437.8 KiB more; 0 B are free" in message
            assert ": free " in message, "so much must be freed"
            ballast.unlink()
            url = await full.ready()
        fill(ballast)
        os.kill(await full.pid(), signal.SIGKILL)

        async def again() -> bool:
            return (await full.status()).restarts == 1 and await answers_if_reachable(http, url)

        await eventually(again)
        assert host.agent.running
    finally:
        await host.host.kill_all()
        await mount("--lazy", str(host.state_folder), program="umount")


def fill(ballast: Path) -> None:
    """Leave no room on the disk of `ballast`."""
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return


async def mount(*arguments: str, program: str = "mount") -> None:
    process = await asyncio.create_subprocess_exec(program, *arguments)
    assert await process.wait() == 0


async def test_endpoint_is_ready_after_sleep_once_its_engine_has_answered(
    bound_process: BoundProcess, http: aiohttp.ClientSession
) -> None:
    await bound_process.bind()
    url, engine = await bound_process.ready(), await bound_process.pid()
    asleep = [int(pid) for pid in (await ip(f"netns pids {bound_process.host.host.netns}")).split()]
    await bound_process.host.host.cut()
    for pid in asleep:
        os.kill(pid, signal.SIGSTOP)
    # As the controller does with a host that it has declared lost.
    await bound_process.client.delete(ENDPOINT_SLICES, f"chat.{bound_process.host.name}", bound_process.namespace)
    loop = asyncio.get_running_loop()
    morning = loop.time() + GAP_SECONDS
    await eventually(lambda: loop.time() > morning, GAP_SECONDS + 5)
    await bound_process.host.host.restore()
    for pid in asleep:
        if pid != engine:
            os.kill(pid, signal.SIGCONT)

    async def ready() -> list[bool]:
        try:
            return [endpoint["conditions"]["ready"] for endpoint in (await bound_process.slice())["endpoints"]]
        except NotFound:
            return []

    async def back_but_not_ready() -> bool:
        now = await ready()
        assert now != [True], "its engine has not woken up"
        return now == [False]

    await eventually(back_but_not_ready)
    os.kill(engine, signal.SIGCONT)
    assert await bound_process.url() == url
    assert await answers(http, url)
    assert await bound_process.pid() == engine, "it was not started again"
