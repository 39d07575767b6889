"""The demo inside its sandbox: start all parts, apply two files, stream two answers, and fill a queue."""

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import structlog

from kube import credentials
from kube.client import Client, Obj, connect
from kube.resources import ENDPOINT_SLICES, INFERENCE_SERVICES, METAL_PROCESSES, MODELS, Resource
from kube.store import Store
from kube.watch import Selection, reflect
from standalone.ask import AskError
from tests.controlplane import cluster_dns, members, service_proxy
from tests.controlplane.binaries import Binaries, ensure_binaries
from tests.controlplane.helm import CHART, ensure_helm, run_helm
from tests.controlplane.network import ADDRESS, Network
from tests.controlplane.plane import ControlPlane, PlaneError
from tests.controlplane.process import CHECKOUT, Process
from tests.demo.gateway_steps import chat_by_gateway, print_endpoint, read_key, show_lost_host
from tests.demo.placement_steps import show_placement
from tests.demo.queue_steps import show_queue
from tests.demo.shell import write_note
from tests.support.file_server import ALLOWED_NETWORKS

NODE = "gpu-1"
DEVICES = {"nvidia.com/gpu": "1"}
"""The node says that it has a GPU; engines run on its processor nevertheless."""
DEVICE_LABELS = {"nvidia.com/gpu.product": "Tesla-T4", "nvidia.com/gpu.memory": "15360"}
FASTER_NODE = "gpu-2"
FASTER_DEVICES = {"amd.com/gpu": "1"}
FASTER_LABELS = {"amd.com/gpu.product-name": "AMD_Instinct_MI300X_OAM", "amd.com/gpu.vram": "192G"}
MIN_RUN = "1s"
"""A replica may be evicted after this time, in place of minutes, so that nobody waits for the demo."""
METAL_HOST = "studio-1"
SERVICES = {"tiny-pod": "a pod", "tiny-host": f"a native process on host {METAL_HOST}"}
QUESTION = "Who are you?"
READY_SECONDS = 600
"""Real weights may be loaded from a slow disk; the tiny ones need a second."""


class DemoCluster:
    """All parts of a cluster with one node and one off-cluster host.

    Args:
        binaries: the control plane's programs.
        folder: for data, credentials and logs.
        weights: the GGUF file that the cluster fetches.
        larger: one of which a token reads so much that memory bandwidth decides about its speed.
        endless: one whose answers go on until their limit.

    """

    def __init__(self, binaries: Binaries, folder: Path, weights: Path, larger: Path, endless: Path) -> None:
        self.plane = ControlPlane(binaries, folder / "plane")
        self.changed = asyncio.Event()
        """Set when the store has changed, or when a process has ended, which is a failure."""
        self.milestones = Milestones()
        self._processes: list[Process] = []
        self._kubectl = binaries.kubectl
        self._folder = folder
        self._weights = {"model.gguf": weights, "larger.gguf": larger, "endless.gguf": endless}
        self.host: members.MetalHost | None = None
        """The machine outside of the cluster, once it is started."""

    async def start(self) -> None:
        """Start all parts; each waits for the parts that it needs."""
        network = Network()
        await network.start()
        await self._publish_weights()
        print_event("starting etcd, kube-apiserver, kube-controller-manager and kube-scheduler")
        await self.plane.start()
        write_note(self.plane.environment, (self._kubectl, ensure_helm(), Path(sys.executable)))
        machine = await service_proxy.add_machine(network)
        self._start(members.service_proxy(self.plane, machine, self._folder))
        print_event("control plane is ready")
        self.milestones.reach("control plane")
        self._start(self._kubelet(NODE, DEVICES, DEVICE_LABELS))
        print_event("helm install pomona deploy/chart --namespace pomona-system --create-namespace")
        # A private network is where the demo serves its weights.
        sources = f"models.allowPrivateSources={{{','.join(map(str, ALLOWED_NETWORKS))}}}"
        settings = ("--set", sources, "--set", f"services.minRun={MIN_RUN}")
        await run_helm("install", "pomona", str(CHART), "--create-namespace", *settings, plane=self.plane)
        print_event("chart is installed, and its pods start")
        self.milestones.reach("helm install")
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(members.wait_for_kinds(self.plane))
            tasks.create_task(self._start_host(network))
        print_event("off-cluster host is started")
        self.milestones.reach("host")

    async def add_faster_node(self) -> None:
        """Start a node whose device has more memory bandwidth, and wait until it is ready."""
        self._start(self._kubelet(FASTER_NODE, FASTER_DEVICES, FASTER_LABELS))
        await self.plane.kubectl("wait", "--for=create", f"node/{FASTER_NODE}", "--timeout=60s")
        await self.plane.kubectl("wait", "--for=condition=Ready", f"node/{FASTER_NODE}", "--timeout=60s")

    async def stop(self) -> None:
        """End all processes; their children end with the sandbox."""
        await asyncio.gather(*(process.kill() for process in self._processes if process.running))
        await self.plane.stop()

    async def log_tails(self) -> str:
        """Return the ends of all logs, for the report of a failure."""
        try:
            controller = await self.plane.kubectl(
                *("logs", "--namespace=pomona-system", "--selector=app.kubernetes.io/component=controller"),
                *("--tail=15", "--prefix"),
            )
        except PlaneError as error:
            controller = f"{error}\n"
        tails = (f"--- {process.name}\n{process.tail(15)}" for process in self._processes)
        return "\n".join([f"--- controller\n{controller}", *tails])

    def _kubelet(self, name: str, resources: Mapping[str, str], labels: Mapping[str, str]) -> Process:
        dns = (f"--cluster-dns={cluster_dns.ADDRESS}",)
        return members.kubelet(self.plane, name, self._folder, resources=resources, labels=labels, arguments=dns)

    async def _start_host(self, network: Network) -> None:
        self.host = await members.metal_host(self.plane, network, METAL_HOST, self._folder)
        self._start(self.host.agent)

    def check(self) -> None:
        """Raise PlaneError when one of the processes has ended."""
        for process in self._processes:
            if not process.running:
                raise PlaneError(f"{process.name} ended with {process.exit_code}")

    def _start(self, process: Process) -> None:
        process.start()
        self._processes.append(process)
        loop, exited = asyncio.get_running_loop(), os.pidfd_open(process.pid)

        def ended() -> None:
            loop.remove_reader(exited)
            self.changed.set()

        loop.add_reader(exited, ended)

    async def _publish_weights(self) -> None:
        """Serve the weights at the address that the examples name."""
        served = self._folder / "served"
        served.mkdir()
        for name, weights in self._weights.items():
            (served / name).touch()
            # A bind mount, visible in this sandbox only: a file server refuses a link that leads out of its folder.
            mounting = await asyncio.create_subprocess_exec("mount", "--bind", weights, served / name)
            if await mounting.wait() != 0:
                raise PlaneError(f"{weights} cannot be mounted")
        argv = [
            sys.executable,
            "-m",
            "tests.support.file_server",
            f"--root={served}",
            f"--address={ADDRESS}",
            "--port=80",
        ]
        self._start(Process("models", argv, self._folder / "models.log"))


def print_event(text: str) -> None:
    """Print an event with the seconds since the start."""
    print(f"[{time.monotonic() - STARTED:5.1f} s] {text}", flush=True)


STARTED = time.monotonic()


class Milestones:
    """The steps to the first answer, and the seconds that each took."""

    def __init__(self) -> None:
        self._reached: list[tuple[str, float]] = []

    def reach(self, step: str, at: float | None = None) -> None:
        """Record the end of a step, the first time that it ends: now, or at a time of the monotonic clock."""
        if step not in dict(self._reached):
            self._reached.append((step, at or time.monotonic()))

    def __str__(self) -> str:
        """Return the time of the first answer, and what it consists of."""
        begins = [STARTED, *(at for _, at in self._reached)]
        steps = [f"{step} {at - begin:.1f}" for (step, at), begin in zip(self._reached, begins, strict=False)]
        return f"first answer {begins[-1] - STARTED:.1f} s after the start: {', '.join(steps)}"


async def follow(client: Client, store: Store, milestones: Milestones) -> None:
    """Keep the store up to date, print each change of phase of the applied objects, and record the steps that end."""

    def changed(resource: Resource, old: Obj | None, new: Obj | None) -> None:
        before, after = _phase(old), _phase(new)
        if new is not None and after != before and after[0]:
            print_event(f"{resource.kind} {new['metadata']['name']}: {' - '.join(filter(None, after))}")
            milestones.reach("controller")
            if resource is MODELS and after[0] == "Ready":
                milestones.reach("weights")

    store.subscribe(changed)
    async with asyncio.TaskGroup() as tasks:
        for resource in (MODELS, INFERENCE_SERVICES, METAL_PROCESSES, ENDPOINT_SLICES):
            tasks.create_task(reflect(client, store, Selection(resource, "default")))


def _phase(obj: Obj | None) -> tuple[str, str]:
    status = (obj or {}).get("status", {})
    ready: Obj = next((c for c in status.get("conditions", []) if c["type"] == "Ready"), {})
    return status.get("phase", ""), ready.get("reason", "") or status.get("reason", "")


async def wait_until_ready(cluster: DemoCluster, store: Store) -> None:
    """Wait until both services are Ready and have an address, which another watch brings.

    Raises:
        TimeoutError: one of them was not Ready in time.
        PlaneError: a process has ended.
    """
    await wait_until(cluster, store, lambda: all(_is_ready(store, name) for name in SERVICES))


async def wait_until(cluster: DemoCluster, store: Store, condition: Callable[[], bool]) -> None:
    """Wait until a condition is true, and look after every change of the store and after the end of a process.

    Raises:
        TimeoutError: it was not true in time.
        PlaneError: a process has ended.
    """
    store.subscribe(lambda *_: cluster.changed.set())
    async with asyncio.timeout(READY_SECONDS):
        while not condition():
            await cluster.changed.wait()
            cluster.changed.clear()
            cluster.check()


def _is_ready(store: Store, name: str) -> bool:
    return _phase(store.get(INFERENCE_SERVICES, name, "default"))[0] == "Ready" and bool(_list_urls(store, name))


def _list_urls(store: Store, name: str) -> list[str]:
    slices = [
        endpoint_slice
        for endpoint_slice in store.list(ENDPOINT_SLICES, "default")
        if endpoint_slice["metadata"]["labels"].get("kubernetes.io/service-name") == name
    ]
    return [
        f"http://{endpoint['addresses'][0]}:{slice_['ports'][0]['port']}"
        for slice_ in slices
        for endpoint in slice_["endpoints"] or []
        if endpoint["conditions"].get("ready")
    ]


async def run_demo(cluster: DemoCluster, *, keep: bool) -> bool:
    """Run the main job; return True if both services answered."""
    await cluster.start()
    async with connect(credentials.load(cluster.plane.kubeconfig())) as client:
        store = Store()
        following = asyncio.create_task(follow(client, store, cluster.milestones))
        print_event("kubectl apply -f examples/")
        await cluster.plane.apply(CHECKOUT / "examples")
        await wait_until_ready(cluster, store)
        cluster.milestones.reach("engines")
        asked = time.monotonic()
        key = await read_key(cluster.plane, client)
        answers = [await chat_by_gateway(key, name, place) for name, place in SERVICES.items()]
        cluster.milestones.reach("first token", asked + answers[0].first_seconds)
        print(f"\n{cluster.milestones}")
        await print_endpoint({**os.environ, **cluster.plane.environment})
        print("$ kubectl get mdl,isvc,mh,mp")
        print(await cluster.plane.kubectl("get", "mdl,isvc,mh,mp"))
        print_event("the gateway: a host dies in the middle of answers")
        assert cluster.host
        waiting = partial(wait_until, cluster, store)
        await show_lost_host(cluster.plane, store, key, cluster.host, wait_until=waiting, print_event=print_event)
        print_event("placement by speed: a node with another accelerator joins")
        await cluster.add_faster_node()
        await show_placement(cluster.plane, store, partial(wait_until, cluster, store))
        print_event("the queue: services that want the only GPU of the node")
        await show_queue(cluster.plane, store, partial(wait_until, cluster, store))
        if keep:
            await wait_for_ctrl_c()
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await following
    return all(answer.text for answer in answers)


async def wait_for_ctrl_c() -> None:
    """Print how to enter the sandbox, and wait for Ctrl-C."""
    print("The cluster runs until Ctrl-C. Enter it from another terminal with\n\n  make demo-shell\n")
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    await stopped.wait()


async def main() -> int:
    """Run the demo in this sandbox, and return the exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--larger", type=Path, required=True)
    parser.add_argument("--endless", type=Path, required=True)
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_args()
    # Hide warnings: the watches retry until the kinds are installed.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    # /tmp belongs to the sandbox and is deleted with it.
    folder = Path(tempfile.mkdtemp(prefix="pomona-"))
    cluster = DemoCluster(ensure_binaries(), folder, options.weights, options.larger, options.endless)
    try:
        return 0 if await run_demo(cluster, keep=options.keep) else 1
    except (AskError, PlaneError, TimeoutError) as error:
        reason = str(error) or f"not Ready within {READY_SECONDS} s"
        print(f"make demo: {reason}\n{await cluster.log_tails()}", file=sys.stderr)
        return 1
    finally:
        await cluster.stop()


if __name__ == "__main__":
    try:
        sys.exit(asyncio.run(main()))
    except KeyboardInterrupt:
        sys.exit(130)
