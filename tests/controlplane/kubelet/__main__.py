"""`python -m tests.controlplane.kubelet`: one node, until SIGTERM. The containers outlive the kubelet."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
from pathlib import Path

import structlog

from kube import credentials
from kube.client import Obj
from kube.resources import PODS, Resource
from kube.store import Store
from kube.transport import AiohttpTransport
from kube.watch import Selection, reflect
from tests.controlplane.kubelet import logs, probes
from tests.controlplane.kubelet.api import NodeAPI
from tests.controlplane.kubelet.node import KUBELET_PORT, NodeSpec, heartbeat
from tests.controlplane.kubelet.podnet import PodNetwork, ensure_address
from tests.controlplane.kubelet.pods import Backoff
from tests.controlplane.kubelet.worker import Host, Worker, kill_leftovers

log = structlog.get_logger()


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.controlplane.kubelet", description=__doc__)
    parser.add_argument("--kubeconfig", type=Path, required=True, help="identity system:node:NAME")
    parser.add_argument("--node", required=True, help="name of the Node")
    parser.add_argument("--address", required=True, help="the node's own address on the bridge")
    parser.add_argument("--pod-subnet", required=True, help="first three numbers of the pods' addresses, e.g. 10.77.1")
    parser.add_argument("--root", type=Path, required=True, help="folder for pods and logs")
    parser.add_argument("--label", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--resource", action="append", default=[], metavar="NAME=QUANTITY", help="nvidia.com/gpu=2")
    parser.add_argument("--cpu", default="8")
    parser.add_argument("--memory", default="32Gi")
    parser.add_argument("--max-pods", default="110")
    parser.add_argument("--backoff-base", type=float, default=10.0, help="seconds before the second restart")
    parser.add_argument("--cluster-dns", default="", metavar="ADDRESS", help="server of the pods' names")
    parser.add_argument("--tls", type=Path, help="folder with a .crt and a .key: serve `kubectl logs` on port 10250")
    parser.add_argument("--report-only", action="store_true", help="say that pods run, start nothing")
    return parser.parse_args()


def _pairs(options: list[str]) -> dict[str, str]:
    return {key: value for key, _, value in (option.partition("=") for option in options)}


async def serve_pods(host: Host, node: str) -> None:
    """Keep one worker per pod that is bound to the node, for ever."""
    store, workers = Store(), dict[str, Worker]()

    async def work(worker: Worker) -> None:
        try:
            await worker.run()
        except Exception:  # the failure of one pod must not stop the node's other pods
            log.exception("worker failed", pod=worker.pod["metadata"]["name"])

    async with asyncio.TaskGroup() as group:

        def on_change(resource: Resource, old: Obj | None, new: Obj | None) -> None:
            del resource
            old_uid, new_uid = (obj["metadata"]["uid"] if obj else None for obj in (old, new))
            if old_uid and old_uid != new_uid and (worker := workers.pop(old_uid, None)):
                worker.forget()
            if new is None or new_uid is None:
                return
            if worker := workers.get(new_uid):
                worker.observe(new)
            else:
                workers[new_uid] = Worker(new, host)
                group.create_task(work(workers[new_uid]))

        store.subscribe(on_change)
        await reflect(host.api.client, store, Selection(PODS, field_selector=f"spec.nodeName={node}"))


async def run(options: argparse.Namespace) -> None:
    """Run the node until cancelled."""
    if not options.report_only:
        await ensure_address(options.address)
    capacity = {"cpu": options.cpu, "memory": options.memory, "pods": options.max_pods, "ephemeral-storage": "50Gi"}
    capacity |= _pairs(options.resource)
    transport = AiohttpTransport(credentials.load(options.kubeconfig))
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(transport.close)
        host = Host(
            api=NodeAPI(transport),
            address=options.address,
            network=PodNetwork(options.pod_subnet),
            root=options.root.resolve(),
            logs=logs.LogFolder(options.root.resolve() / "logs"),
            session=await stack.enter_async_context(probes.session()),
            backoff=Backoff(base_seconds=options.backoff_base),
            cluster_dns=options.cluster_dns,
            report_only=options.report_only,
        )
        await kill_leftovers(host.root)
        if options.tls and not options.report_only:
            (certificate,), (key,) = options.tls.glob("*.crt"), options.tls.glob("*.key")
            server = await logs.serve(
                host.logs, host.api.find_address, options.address, KUBELET_PORT, certificate=certificate, key=key
            )
            stack.push_async_callback(server.cleanup)
        node = NodeSpec(options.node, options.address, capacity, _pairs(options.label))
        async with asyncio.TaskGroup() as group:
            group.create_task(heartbeat(host.api, node))
            group.create_task(serve_pods(host, options.node))


async def main(options: argparse.Namespace) -> None:
    """Run the node until SIGTERM or SIGINT."""
    task = asyncio.ensure_future(run(options))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task


if __name__ == "__main__":
    asyncio.run(main(parse()))
