"""`make chaos`: faults hit hosts at random while clients send requests; afterwards everything must have recovered.

Control plane, controller, agents, proxies and engines are the real ones. The run fails if a service does not become
Ready again, if a process without a MetalProcess is left, if a reservation is lost or kept too long, or if a request
fails that no fault explains. The seed is printed; the same seed repeats the same faults.
"""

import argparse
import asyncio
import logging
import os
import secrets
import signal
import sys
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path

import aiohttp
import structlog

from controller.reconcile.conditions import find
from kube import credentials
from kube.client import connect
from kube.errors import NotFound
from tests.chaos import switched_engine
from tests.chaos.clients import ChaosClient
from tests.chaos.faults import Breakage, ScheduledFault, list_unexplained, measure_lateness, plan_faults, plan_outages
from tests.chaos.machine import ChaosHost
from tests.cluster.main_job.cluster import GIB, Cluster
from tests.controlplane import members
from tests.controlplane.binaries import ensure_binaries
from tests.controlplane.network import ADDRESS, Network
from tests.controlplane.plane import ControlPlane
from tests.controlplane.process import Process
from tests.support.eventually import eventually
from tests.support.file_server import FileServer
from tests.support.tiny_models import tiny_gguf

NAMESPACE = "default"
SERVICES = {"one": 1, "two": 2, "three": 1}
"""Replicas by service."""
HOSTS = ("studio-1", "studio-2")
BUDGET_BYTES = 8 * GIB
"""Enough for all replicas on one host, and so small that other programs on this machine do not reduce it."""
DISK_BYTES = 64 << 20
LONGEST_GAPS = 3
"""Number of gaps of a service that are printed."""
SETTLE_SECONDS = 120.0
"""Limit for recovery after the last fault: back-off, then a new engine, on a busy machine."""


class Run:
    """One chaos run. `processes` has every started process, for the logs."""

    def __init__(self, folder: Path) -> None:
        self.processes: list[Process] = []
        self.plane = ControlPlane(ensure_binaries(), folder / "plane")
        self.machines: list[ChaosHost] = []
        self.clients: list[ChaosClient] = []
        self._folder = folder
        self._start_time = 0.0

    async def start(self) -> None:
        """Start cluster, controller, node and hosts."""
        network = Network()
        await network.start()
        await self.plane.start()
        await members.install(self.plane)
        self._start_process(members.kubelet(self.plane, "cpu-1", self._folder))
        self._start_process(await members.controller(self.plane, self._folder))
        for name in HOSTS:
            host = await members.metal_host(self.plane, network, name, self._folder, f"--memory-budget={BUDGET_BYTES}")
            # A disk of its own, which a fault can fill.
            await mount_disk(host.state_folder)
            self._start_process(host.agent)
            self.machines.append(ChaosHost(host))

    async def stop(self) -> None:
        """Kill all processes and the control plane; any other process ends with the sandbox."""
        await asyncio.gather(*(process.kill() for process in self.processes if process.running))
        await self.plane.stop()

    async def break_for(self, cluster: Cluster, seed: int, seconds: float) -> None:
        """Apply the services, then inject faults for `seconds` while clients send requests."""
        # Otherwise the host that joined first would get all replicas.
        for name in HOSTS:
            await eventually(partial(is_host_ready, cluster, name))
        await cluster.apply(
            cluster.model(),
            *(
                cluster.service(name, "metal", replicas=replicas, parallel=2, contextLength=512)
                for name, replicas in SERVICES.items()
            ),
        )
        await cluster.ready(*SERVICES)
        say(f"{', '.join(SERVICES)} are Ready; faults begin")
        # A client for each replica: the requests of one alone, one after the other, may all go to the same replica.
        targets = [name for name, replicas in SERVICES.items() for _ in range(replicas)]
        self.clients = [ChaosClient(cluster, name, seed + number) for number, name in enumerate(targets)]
        self._start_time = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as group:
            watching = [group.create_task(client.run()) for client in self.clients]
            watching += [group.create_task(machine.observe_renewals(cluster.client)) for machine in self.machines]
            async with asyncio.TaskGroup() as breaking:
                for fault in plan_faults(seed, seconds, len(HOSTS)):
                    breaking.create_task(self._break_host(fault))
                for fault in plan_outages(seed, seconds):
                    breaking.create_task(self._break_apiserver(fault))
                breaking.create_task(asyncio.sleep(seconds))
            say("the last fault is over; waiting for everything to recover")
            await self.wait_until_settled(cluster)
            for task in watching:
                task.cancel()

    async def _break_host(self, fault: ScheduledFault) -> None:
        machine = self.machines[fault.host]
        await self._await_start(fault, machine.name)
        for host in (machine, *self.machines):
            if await host.inject(fault):
                break

    async def _break_apiserver(self, fault: ScheduledFault) -> None:
        await self._await_start(fault, "API server")
        start = asyncio.get_running_loop().time()
        if fault.kind == "apiserver":
            await self.plane.stop_apiserver()
            await asyncio.sleep(fault.seconds)
            await self.plane.start_apiserver()
        else:
            os.kill(self.plane.apiserver.pid, signal.SIGSTOP)
            await asyncio.sleep(fault.seconds)
            os.kill(self.plane.apiserver.pid, signal.SIGCONT)
        for machine in self.machines:
            machine.note(fault.kind, start)

    async def _await_start(self, fault: ScheduledFault, victim: str) -> None:
        await asyncio.sleep(self._start_time + fault.at - asyncio.get_running_loop().time())
        say(f"{fault.at:6.1f} s  {victim}: {fault.kind}" + (f" for {fault.seconds:.1f} s" if fault.seconds else ""))

    async def wait_until_settled(self, cluster: Cluster) -> None:
        """Wait until everything has recovered. Raises AssertionError with the first thing that has not."""
        loop = asyncio.get_running_loop()
        start, last = loop.time(), ""

        async def settled() -> bool:
            nonlocal last
            try:
                return await self._is_all_well(cluster)
            except (AssertionError, LookupError, NotFound, aiohttp.ClientError, TimeoutError) as error:
                if (problem := str(error).split(" has ")[0][:200]) != last:
                    last = problem
                    say(f"{loop.time() - self._start_time:6.1f} s  {problem}")
                raise AssertionError(str(error)) from error

        await eventually(settled, SETTLE_SECONDS)
        say(f"everything has recovered {loop.time() - start:.1f} s after the last fault")

    async def _is_all_well(self, cluster: Cluster) -> bool:
        for service, replicas in SERVICES.items():
            status = (await cluster.get(service)).status
            assert (status.phase, status.ready_replicas) == ("Ready", replicas), (service, status)
            assert await cluster.answers(service), f"{service} does not answer at each ready address"
        bound = await cluster.processes()
        counts = Counter(metal_process.spec.service_name for metal_process in bound)
        assert counts == SERVICES, bound
        for machine in self.machines:
            mine = [metal_process for metal_process in bound if metal_process.spec.host_name == machine.name]
            running = await machine.processes()
            engines = {process.pid for process in running["engine"]}
            assert engines == {metal_process.status.pid for metal_process in mine}, (
                f"{machine.name} runs {engines}, which is not {mine}"
            )
            others = {role: len(processes) for role, processes in running.items() if role != "engine"}
            assert others == {"agent": 1, "proxy": 1, "other": 0}, f"{machine.name} runs {running}"
            host_status = (await cluster.host(machine.name)).status
            assert {host_process.uid for host_process in host_status.processes} == {
                metal_process.metadata.uid for metal_process in mine
            }, host_status
            reserved = sum(host_process.memory_bytes or 0 for host_process in host_status.processes)
            assert reserved >= sum(metal_process.spec.memory_bytes for metal_process in mine), host_status
            # Other programs may use a little; a leaked reservation is as large as a process.
            lost = BUDGET_BYTES - reserved - (host_status.available_bytes or 0)
            assert 0 <= lost < min(metal_process.spec.memory_bytes for metal_process in bound), host_status
        return True

    @property
    def breakages(self) -> list[Breakage]:
        """Every fault that was injected, on all hosts."""
        return [breakage for machine in self.machines for breakage in machine.breakages]

    def verdict(self) -> list[str]:
        """Print a summary and return the problems."""
        broken = Counter(breakage.kind for breakage in self.breakages)
        say("faults: " + ", ".join(f"{kind} {count} times" for kind, count in sorted(broken.items())))
        failures = [failure for client in self.clients for failure in client.failures]
        latest = measure_lateness(failures, self.breakages)
        say("last failed request: " + ", ".join(f"{seconds:.2f} s after {kind}" for kind, seconds in latest.items()))
        problems = []
        for number, client in enumerate(self.clients, 1):
            wrong = list_unexplained(client.failures, self.breakages)
            say(
                f"client {number} of {client.service}: {client.answers} answers, {len(client.failures)} failures, "
                f"of which {len(wrong)} are not explained by a fault; {len(client.gaps)} times no ready address"
            )
            gaps = sorted(client.gaps, key=lambda gap: gap[0] - gap[1])
            for began, ended in gaps[:LONGEST_GAPS]:
                say(f"  none from {began - self._start_time:.1f} s to {ended - self._start_time:.1f} s")
            for text, count in Counter(request.text for request in client.failures).most_common(4):
                say(f"  {count} times {text}")
            problems += [f"at {request.start - self._start_time:.1f} s: {request.text}" for request in wrong]
            if not client.answers:
                problems.append(f"{client.service} never answered")
        return problems

    def tail_logs(self) -> str:
        """The ends of all logs."""
        return "\n".join(f"--- {process.name}\n{process.tail(30)}" for process in self.processes)

    def _start_process(self, process: Process) -> None:
        process.start()
        self.processes.append(process)


async def is_host_ready(cluster: Cluster, name: str) -> bool:
    """Return whether processes can be bound to the host."""
    ready = find((await cluster.host(name)).status.conditions, "Ready")
    return ready is not None and ready.status == "True"


async def mount_disk(folder: Path) -> None:
    """Mount a small file system in memory on `folder`."""
    arguments = ("-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder))
    process = await asyncio.create_subprocess_exec("mount", *arguments)
    assert await process.wait() == 0, f"mount {' '.join(arguments)}"


def say(text: str) -> None:
    """Print at once, so that a run can be followed."""
    print(text, flush=True)


def list_messages(error: BaseException) -> list[str]:
    """Return the messages of all errors in a group, which itself says none of them."""
    if isinstance(error, BaseExceptionGroup):
        return [message for exception in error.exceptions for message in list_messages(exception)]
    return [str(error)]


async def run(seed: int, seconds: float, folder: Path) -> int:
    """Return the exit status."""
    chaos, problems = Run(folder), list[str]()
    served = folder / "served"
    served.mkdir()
    tiny_gguf.write(served / "tiny.gguf")
    os.environ["LLAMA_SERVER_BIN"] = str(switched_engine.write_program(folder))
    try:
        await chaos.start()
        async with (
            connect(credentials.load(chaos.plane.kubeconfig())) as client,
            FileServer(served, address=ADDRESS) as files,
        ):
            cluster = Cluster(chaos.plane, client, NAMESPACE, files, folder)
            try:
                await chaos.break_for(cluster, seed, seconds)
            except* AssertionError as group:
                problems += list_messages(group)
            problems += chaos.verdict()
        if problems:
            say("\n".join([chaos.tail_logs(), "problems:", *problems]))
            say(f"repeat it with: make chaos SEED={seed} SECONDS={seconds:g}")
        return 1 if problems else 0
    finally:
        await chaos.stop()


def main() -> int:
    """Read the options and run."""
    parser = argparse.ArgumentParser(prog="make chaos")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--seconds", type=float, default=90)
    options = parser.parse_args()
    seed = secrets.randbelow(1_000_000) if options.seed is None else options.seed
    say(f"seed {seed}, {options.seconds:g} s")
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    # /tmp belongs to the sandbox and is deleted with it.
    return asyncio.run(run(seed, options.seconds, Path(tempfile.mkdtemp(prefix="chaos-"))))


if __name__ == "__main__":
    sys.exit(main())
