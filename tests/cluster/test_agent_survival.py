"""What a host must survive that only a whole machine can show: a full disk, sleep, a rotated token, a double."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import aiohttp

from crds.meta import HOSTS_NAMESPACE
from kube.errors import NotFound
from kube.resources import ENDPOINT_SLICES, LEASES, METAL_HOSTS, SECRETS
from tests import tiny_gguf
from tests.cluster.bound import Serving, answers, back, engines, http, serving
from tests.controlplane import members
from tests.controlplane.network import ADDRESS, Network, ip
from tests.controlplane.plane import ControlPlane
from tests.controlplane.process import Process
from tests.eventually import eventually
from tests.web import FileServer

__all__ = ["http", "serving"]

GAP_SECONDS = 27.0
"""More than an agent may be out of touch without asking what is still assigned to it."""


async def renewals(serving: Serving, count: int) -> None:
    """Wait until the host has renewed its Lease so many times; 0 is for its first one ever."""
    seen: set[str] = set()

    async def renewed() -> bool:
        lease = await serving.client.get(LEASES, serving.host.name, HOSTS_NAMESPACE)
        seen.add(lease["spec"]["renewTime"])
        return len(seen) > count

    await eventually(renewed)


async def test_the_second_agent_of_one_name_refuses_and_says_why(
    plane: ControlPlane, network: Network, serving: Serving, http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    await serving.bind()
    url = await serving.ready()
    twin = await network.add_host("twin")
    kubeconfig = await plane.service_account_kubeconfig(HOSTS_NAMESPACE, serving.host.name)
    argv = [
        *(*twin.exec, sys.executable, "-m", "cli.main", "agent", f"--name={serving.host.name}"),
        *(f"--kubeconfig={kubeconfig}", f"--state-dir={tmp_path / 'twin'}", f"--address={twin.address}"),
        f"--file-root={serving.host.file_root}",
    ]
    second = Process("its double", argv, tmp_path / "twin.log")
    second.start()
    assert await second.wait(30) == 1
    assert "another agent is host studio-1" in second.tail(1)
    assert "give it another --name" in second.tail(1)
    host = await serving.client.get(METAL_HOSTS, serving.host.name)
    assert host["status"]["address"] == serving.host.address
    assert len(engines(serving)) == 1, "nothing was started by the second"
    assert await serving.url() == url
    assert await answers(http, url)
    await twin.close()


async def test_a_record_that_cannot_be_read_stops_the_agent_with_a_sentence_and_nothing_else(
    serving: Serving, http: aiohttp.ClientSession
) -> None:
    await serving.bind()
    url = await serving.ready()
    pid = await serving.pid()
    agent = serving.host.agent
    await agent.kill()
    (record,) = (serving.host.state_folder / "processes").glob("*.json")
    kept = record.read_bytes()
    record.unlink()
    record.mkdir()
    agent.start()
    assert await agent.wait(30) == 1
    assert record.name in agent.tail(1)
    assert "Traceback" not in agent.tail(20)
    assert await answers(http, url), "what runs goes on"
    record.rmdir()
    record.write_bytes(kept)
    agent.start()
    await eventually(lambda: '"event": "adopted"' in agent.tail(20))
    assert await serving.pid() == pid


async def test_of_a_token_that_is_rotated_on_disk_the_new_one_is_used(
    plane: ControlPlane, serving: Serving, http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    kubeconfig = await plane.service_account_kubeconfig(HOSTS_NAMESPACE, serving.host.name)
    config = json.loads(kubeconfig.read_text())
    config["users"][0]["user"] = {"tokenFile": str(token)}
    await serving.host.agent.kill()
    kubeconfig.write_text(json.dumps(config))
    token.write_text(await bound_token(plane, serving.host.name, "first"))
    serving.host.agent.start()
    await renewals(serving, 1)

    token.write_text(await bound_token(plane, serving.host.name, "second"))
    # With its Secret the first one is refused, by watches too once they are opened anew.
    await serving.client.delete(SECRETS, "first", HOSTS_NAMESPACE)
    await renewals(serving, 2)
    await serving.bind()
    assert await answers(http, await serving.ready())
    await serving.client.delete(SECRETS, "second", HOSTS_NAMESPACE)


async def bound_token(plane: ControlPlane, account: str, secret: str) -> str:
    """A token of the host that is good for as long as this Secret, which is made, is there."""
    secrets = f"/api/v1/namespaces/{HOSTS_NAMESPACE}/secrets"
    kept = await plane.request("POST", secrets, {"metadata": {"name": secret}})
    bound = {"apiVersion": "v1", "kind": "Secret", "name": secret, "uid": kept["metadata"]["uid"]}
    path = f"/api/v1/namespaces/{HOSTS_NAMESPACE}/serviceaccounts/{account}/token"
    review = await plane.request("POST", path, {"spec": {"expirationSeconds": 3600, "boundObjectRef": bound}})
    return str(review["status"]["token"])


async def test_a_full_disk_is_told_and_nothing_that_runs_ends(
    plane: ControlPlane, network: Network, serving: Serving, http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    host = await members.metal_host(plane, network, "full-1", tmp_path)
    await mount("-t", "tmpfs", "-o", "size=4m,mode=700", "tmpfs", str(host.state_folder))
    # Whatever the agent says ends nowhere either.
    host.agent.log = Path("/dev/full")
    ballast = host.state_folder / "ballast"
    served = tmp_path / "served"
    served.mkdir()
    tiny_gguf.write(served / "tiny.gguf")
    host.agent.start()
    try:
        full = Serving(serving.client, serving.namespace, host)
        async with FileServer(served, address=ADDRESS) as files:
            await renewals(full, 0)
            fill(ballast)
            await full.bind(artifact={"source": f"{files.url}/tiny.gguf"})
            assert "free some space" in (await full.phase("Failed", "NoSpace")).message
            ballast.unlink()
            url = await full.ready()
        fill(ballast)
        os.kill(await full.pid(), signal.SIGKILL)

        async def again() -> bool:
            return (await full.status()).restarts == 1 and await back(http, url)

        await eventually(again)
        assert host.agent.running
    finally:
        await host.host.close()
        await host.agent.kill()
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


async def test_after_sleep_an_endpoint_is_ready_again_once_its_engine_has_answered(
    serving: Serving, http: aiohttp.ClientSession
) -> None:
    await serving.bind()
    url, engine = await serving.ready(), await serving.pid()
    asleep = [int(pid) for pid in (await ip(f"netns pids {serving.host.host.netns}")).split()]
    await serving.host.host.cut()
    for pid in asleep:
        os.kill(pid, signal.SIGSTOP)
    # As the controller does with a host that it holds for lost.
    await serving.client.delete(ENDPOINT_SLICES, f"chat.{serving.host.name}", serving.namespace)
    loop = asyncio.get_running_loop()
    morning = loop.time() + GAP_SECONDS
    await eventually(lambda: loop.time() > morning, GAP_SECONDS + 5)
    await serving.host.host.restore()
    for pid in asleep:
        if pid != engine:
            os.kill(pid, signal.SIGCONT)

    async def ready() -> list[bool]:
        try:
            return [endpoint["conditions"]["ready"] for endpoint in (await serving.slice())["endpoints"]]
        except NotFound:
            return []

    async def back_but_not_ready() -> bool:
        now = await ready()
        assert now != [True], "its engine has not woken up"
        return now == [False]

    await eventually(back_but_not_ready)
    os.kill(engine, signal.SIGCONT)
    assert await serving.url() == url
    assert await answers(http, url)
    assert await serving.pid() == engine, "it was not started again"
