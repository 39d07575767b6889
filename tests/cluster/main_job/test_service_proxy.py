"""A service answers at its ClusterIP and its name, as in the shell of the demo."""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio

from crds.meta import LABEL_SERVICE
from kube.resources import PODS, SERVICES
from tests.cluster.main_job.cluster import PATHS, Cluster
from tests.controlplane import members, service_proxy
from tests.controlplane.kubelet.podnet import netns
from tests.controlplane.network import SERVICE_RANGE, Network, ip
from tests.controlplane.plane import ControlPlane
from tests.controlplane.process import Process
from tests.support.eventually import eventually

NOT_FOUND, REFUSED = 6, 7
"""Exit statuses of curl: a name does not exist, a connection is refused."""


class ProxyShell:
    """Commands where the proxy runs: its mount namespace has the names, and the rest of the sandbox has not."""

    def __init__(self, proxy: Process) -> None:
        self._proxy = proxy

    async def curl(self, url: str, token: str = "", *, pod: str = "") -> tuple[int, str]:
        """Return the exit status and the output of curl, in the network of a pod if its uid is given."""
        place = ["nsenter", f"--target={self._proxy.pid}", "--mount"]
        if pod:
            place.append(f"--net=/run/netns/{netns(pod)}")
        curl = ["curl", "--silent", "--max-time", "10", "--noproxy", "*", "--header", f"Authorization: Bearer {token}"]
        process = await asyncio.create_subprocess_exec(*place, *curl, url, stdout=asyncio.subprocess.PIPE)
        output, _ = await process.communicate()
        return await process.wait(), output.decode()


@pytest_asyncio.fixture
async def shell(
    plane: ControlPlane, network: Network, tmp_path: Path, watched: list[Process]
) -> AsyncIterator[ProxyShell]:
    """The network of the demo, until the test ends."""
    machine = await service_proxy.add_machine(network)
    proxy = members.service_proxy(plane, machine, tmp_path)
    proxy.argv[:0] = ["unshare", "--mount"]
    watched.append(proxy)
    proxy.start()
    yield ProxyShell(proxy)
    watched.remove(proxy)
    await machine.close()  # kills the proxy
    await proxy.wait()
    await ip(f"route delete {SERVICE_RANGE}")


@pytest.mark.usefixtures("host")
async def test_services_answer_at_their_names_and_cluster_ips(cluster: Cluster, shell: ProxyShell) -> None:
    await cluster.apply(cluster.model(), *(cluster.service(f"by-{path}", PATHS[path]) for path in PATHS))
    await cluster.ready("by-pod", "by-host")
    (pod,) = (await cluster.client.list(PODS, cluster.namespace, label_selector=f"{LABEL_SERVICE}=by-pod")).items
    for service in ("by-pod", "by-host"):
        spec = (await cluster.client.get(SERVICES, service, cluster.namespace))["spec"]
        token = await cluster.token(service)
        names = (f"{service}.{cluster.namespace}{end}" for end in (".svc.cluster.local", ".svc", ""))
        for host, place in itertools.product((spec["clusterIP"], *names), ("", pod["metadata"]["uid"])):
            url = f"http://{host}:{spec['ports'][0]['port']}/v1/models"

            async def answer(url: str, token: str, place: str) -> str:
                status, output = await shell.curl(url, token, pod=place)
                assert status == 0, status
                return output

            listed = json.loads(await eventually(partial(answer, url, token, place)))
            assert listed["data"][0]["id"] == service
            assert "data" not in await answer(url, "wrong", place)

    url = f"http://by-pod.{cluster.namespace}.svc:8080/v1/models"
    await cluster.edit("by-pod", suspend=True)

    async def is_refused() -> bool:
        return (await shell.curl(url))[0] == REFUSED

    await eventually(is_refused)
    await cluster.kubectl("delete", "isvc/by-pod")

    async def has_no_name() -> bool:
        return (await shell.curl(url))[0] == NOT_FOUND

    await eventually(has_no_name)
