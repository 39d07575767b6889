"""One pod from binding to deletion: network, volumes, init containers, containers, status, graceful end."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from asyncio import TaskGroup
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import structlog

from kube.errors import ApiError, Conflict, NotFound, Unreachable
from kube.resources import PODS, SECRETS
from tests.controlplane.cluster_dns import resolv_conf
from tests.controlplane.kubelet import containers, pods
from tests.controlplane.kubelet.api import CONFIG_MAPS, NodeAPI
from tests.controlplane.kubelet.environment import ConfigError
from tests.controlplane.kubelet.logs import LogFolder
from tests.controlplane.kubelet.podnet import PodNetwork, remove_namespace
from tests.controlplane.kubelet.pods import Backoff, ContainerState, PodState, Running, Waiting
from tests.controlplane.kubelet.supervisor import Pod, StopRequest, Supervisor
from tests.controlplane.kubelet.volumes import PodVolumes, VolumeError
from tests.controlplane.network import NetworkError

Obj = dict[str, Any]

RETRY_SECONDS = 1.0
# The authorizer lets a node read a pod's claims and secrets a moment after the binding: the first retries are quick.
FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS = 0.05, 5.0
# Fewer failures are normal and cause no message in the pod's status.
QUIET_FAILURES = 5
VOLUME_REFRESH_SECONDS = 60.0
FINAL = frozenset({"Succeeded", "Failed"})

log = structlog.get_logger()


@dataclass(frozen=True)
class Host:
    """The node that the workers share. With `report_only` pods are reported as running, and nothing is started."""

    api: NodeAPI
    address: str
    network: PodNetwork
    root: Path
    logs: LogFolder
    session: aiohttp.ClientSession
    backoff: Backoff
    cluster_dns: str = ""
    report_only: bool = False

    def folder(self, uid: str) -> Path:
        """Return the folder of a pod's files, except its logs."""
        return self.root / "pods" / uid


class Worker:
    """The worker of one pod, from binding until the pod's object is gone; then `run` returns."""

    def __init__(self, pod: Obj, host: Host) -> None:
        self.pod = pod
        self._host = host
        self._uid: str = pod["metadata"]["uid"]
        self._log = log.bind(pod=f"{pod['metadata']['namespace']}/{pod['metadata']['name']}", uid=self._uid)
        self._stopping = StopRequest()
        self._deletion = asyncio.Event()
        self._gone = False
        self._lived = False
        self._changed = asyncio.Event()
        self._reported: Obj = {}
        self._overwritten = False
        started = pod.get("status", {}).get("startTime")
        began = datetime.fromisoformat(started) if started else datetime.now(UTC)
        self._state = PodState(started_at=began, init=(), containers=())
        folder = host.folder(self._uid)
        self._volumes = PodVolumes(pod, folder / "volumes", host.api, self._lookup)
        self._shared = Pod(
            spec=pod,
            folder=folder,
            volumes=self._volumes.paths,
            addresses={"status.hostIP": host.address},
            lookup=self._lookup,
            logs=host.logs,
            backoff=host.backoff,
            session=host.session,
            stopping=self._stopping,
            changed=self._changed.set,
        )
        spec = pod["spec"]
        waiting = Waiting("PodInitializing")
        self._init = [
            Supervisor(
                self._shared,
                item,
                ContainerState(item["name"], item["image"], waiting, sidecar=pods.is_sidecar(item)),
                init=not pods.is_sidecar(item),
            )
            for item in spec.get("initContainers", [])
        ]
        self._containers = [
            Supervisor(self._shared, item, pods.taken_over(pod, item), init=False) for item in spec["containers"]
        ]
        self.observe(pod)

    def observe(self, pod: Obj) -> None:
        """Take over a newer version of the object: its deletion, conditions of other writers, labels."""
        self.pod = self._volumes.pod = pod
        # The node controller sets Ready to False on the pods of a node that was silent.
        statuses = {item["type"]: item["status"] for item in pod.get("status", {}).get("conditions", [])}
        reported = self._reported.get("conditions", [])
        self._overwritten = any(statuses.get(item["type"]) != item["status"] for item in reported)
        self._changed.set()
        if "deletionTimestamp" in pod["metadata"]:
            self._stopping.request(pod["metadata"].get("deletionGracePeriodSeconds", 0))
            self._deletion.set()

    def forget(self) -> None:
        """Kill the pod without a report, because its object is gone, perhaps by a forced deletion."""
        self._gone = True
        self._stopping.request(0)
        self._deletion.set()

    async def run(self) -> None:
        """Run the pod to its end, report the end, wait for the object's deletion and finish the deletion."""
        if self.pod.get("status", {}).get("phase") not in FINAL:
            async with TaskGroup() as group:
                group.create_task(self._report_changes())
                await self._live()
                # Do not cancel the reports: one in flight could arrive after the last one and overwrite it.
                self._lived = True
                self._changed.set()
            self._state = replace(self._state, finished=True)
            await self._persist(self._report)
            await self._clean_up()
        await self._deletion.wait()
        if not self._gone:
            await self._persist(lambda: self._host.api.delete_now(self.pod))
        self._log.info("pod gone")

    async def _live(self) -> None:
        if problem := pods.unsupported(self.pod):
            self._state = replace(self._state, reason="UnsupportedPod", message=problem)
            return
        self._log.info("pod bound")
        async with TaskGroup() as group:
            others = [group.create_task(self._refresh_volumes()), group.create_task(self._enforce_deadline())]
            await (self._pretend() if self._host.report_only else self._run_containers())
            for task in others:
                task.cancel()

    async def _run_containers(self) -> None:
        if not await self._prepare():
            return
        sidecars: list[tuple[Supervisor, asyncio.Task[bool]]] = []
        async with TaskGroup() as group:
            await self._run_in_order(sidecars, group)
            # No container is left that the sidecars were started for; the last one started is the first one stopped.
            self._stopping.request(self.pod["spec"].get("terminationGracePeriodSeconds", 30))
            for supervisor, running in reversed(sidecars):
                supervisor.stop_sidecar()
                await running

    async def _run_in_order(self, sidecars: list[tuple[Supervisor, asyncio.Task[bool]]], group: TaskGroup) -> None:
        """Run the init containers one after another, then the others to their end; add the sidecars that started."""
        for supervisor in self._init:
            if supervisor.state.sidecar:
                sidecars.append((supervisor, group.create_task(supervisor.run())))
                if not await supervisor.wait_started():
                    return
            elif not await supervisor.run():
                return
        async with TaskGroup() as mains:
            for supervisor in self._containers:
                mains.create_task(supervisor.run())

    async def _pretend(self) -> None:
        """Report that all containers run, until the pod is deleted."""
        self._state = replace(self._state, pod_ip=self._host.network.allocate(self._uid))
        now = datetime.now(UTC)
        sidecars = [supervisor for supervisor in self._init if supervisor.state.sidecar]
        for supervisor in (*sidecars, *self._containers):
            supervisor.state = replace(supervisor.state, state=Running(now), started=True, ready=True)
        self._changed.set()
        await self._stopping.wait()

    async def _prepare(self) -> bool:
        """Set up network and volumes, with retries until both succeed; return False if the pod stops before."""
        failures = 0
        while not self._stopping:
            try:
                await self._set_up()
            except (VolumeError, ConfigError, NetworkError, ApiError, Unreachable, OSError) as error:
                failures += 1
                self._log.warning("pod not set up", error=str(error), failures=failures)
                if failures >= QUIET_FAILURES:
                    for supervisor in [*self._init, *self._containers]:
                        supervisor.waits(str(error))
                await self._stopping.sleep(min(FIRST_RETRY_SECONDS * 2**failures, LAST_RETRY_SECONDS))
            else:
                return True
        return False

    async def _set_up(self) -> None:
        folder = self._shared.folder
        folder.mkdir(parents=True, exist_ok=True)
        if self._state.pod_ip is None:
            address = await self._host.network.add(self._uid)
            self._shared.addresses["status.podIP"] = address
            self._volumes.addresses = self._shared.addresses
            hosts = f"127.0.0.1\tlocalhost\n::1\tlocalhost\n{address}\t{pods.hostname(self.pod)}\n"
            (folder / "hosts").write_text(hosts)
            # Without the address of a server a look-up fails at once, not after 10 s.
            server = self._host.cluster_dns
            names = resolv_conf(self.pod["metadata"]["namespace"], server) if server else ""
            (folder / "resolv.conf").write_text(names)
            self._state = replace(self._state, pod_ip=address)
            self._changed.set()
        await self._volumes.refresh()

    async def _refresh_volumes(self) -> None:
        """Update mounted ConfigMaps, Secrets and tokens every 60 s."""
        while True:
            await asyncio.sleep(VOLUME_REFRESH_SECONDS)
            if self._host.report_only or self._state.pod_ip is None:
                continue
            try:
                await self._volumes.refresh()
            except (VolumeError, ConfigError, ApiError, Unreachable) as error:
                self._log.warning("volumes not refreshed", error=str(error))

    async def _enforce_deadline(self) -> None:
        if seconds := self.pod["spec"].get("activeDeadlineSeconds"):
            await asyncio.sleep(seconds)
            message = "Pod was active on the node longer than the specified deadline"
            self._state = replace(self._state, reason="DeadlineExceeded", message=message)
            self._stopping.request(self.pod["spec"].get("terminationGracePeriodSeconds", 30))

    async def _lookup(self, kind: str, name: str) -> Obj | None:
        resource = {"configmaps": CONFIG_MAPS, "secrets": SECRETS}[kind]
        try:
            return await self._host.api.client.get(resource, name, self.pod["metadata"]["namespace"])
        except NotFound:
            return None

    async def _report_changes(self) -> None:
        while not self._lived:
            await self._changed.wait()
            self._changed.clear()
            await self._persist(self._report)

    async def _report(self) -> None:
        """Write the status if it differs from the last written one, or if another client has overwritten it."""
        state = replace(
            self._state,
            init=[supervisor.state for supervisor in self._init],
            containers=[supervisor.state for supervisor in self._containers],
        )
        report = pods.status(
            self.pod,
            state,
            host_ip=self._host.address,
            previous=self._reported.get("conditions", self.pod.get("status", {}).get("conditions", [])),
            now=datetime.now(UTC),
        )
        if report != self._reported or self._overwritten:
            await self._host.api.patch_status(PODS, self.pod, report)
            self._reported, self._overwritten = report, False

    async def _persist(self, write: Callable[[], Any]) -> None:
        """Repeat a write until the API server has accepted it or the object is gone."""
        while not self._gone:
            try:
                await write()
            except (NotFound, Conflict):
                return
            except (ApiError, Unreachable) as error:
                self._log.warning("write to the API server failed", error=str(error))
                await asyncio.sleep(RETRY_SECONDS)
            else:
                return

    async def _clean_up(self) -> None:
        if self._host.report_only:
            self._host.network.release(self._uid)
            return
        try:
            await self._host.network.remove(self._uid)
        except NetworkError as error:
            self._log.warning("network namespace not removed", error=str(error))
        await asyncio.to_thread(shutil.rmtree, self._shared.folder, ignore_errors=True)


async def kill_leftovers(root: Path) -> None:
    """Remove containers, networks and folders of an earlier kubelet with this root folder."""
    with contextlib.suppress(FileNotFoundError):
        for folder in (root / "pods").iterdir():
            for container in (folder / "containers").glob("*"):
                if containers.kill_leftover(container):
                    log.info("killed a container of an earlier kubelet", folder=str(container))
            await remove_namespace(folder.name)
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
