"""One container of a pod over all its runs: start, probe, stop, restart with back-off, and its state.

The worker creates a `Pod`, which the containers of one pod share. A supervisor is cancelled only when the kubelet
stops, and then leaves the process running, as kubelets do.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import structlog

from kube.errors import ApiError, Unreachable
from tests.controlplane.kubelet import containers, environment, images, logs, pods, probes
from tests.controlplane.kubelet.containers import Container, Launch, Mount, StartError
from tests.controlplane.kubelet.environment import ConfigError, Lookup
from tests.controlplane.kubelet.podnet import netns
from tests.controlplane.kubelet.pods import (
    Backoff,
    ContainerState,
    Running,
    Terminated,
    Waiting,
    crashes_in_a_row,
    restarts,
)

Obj = dict[str, Any]

TERMINATION_PATH = "/dev/termination-log"
CONFIG_RETRY_SECONDS = 1.0
START_ERROR_CODE = 128
# As documented: a sidecar whose pod has used up the grace period still gets SIGTERM, and this time.
SIDECAR_GRACE_SECONDS = 2.0

log = structlog.get_logger()


class StopRequest:
    """The request to stop a pod, with the deadline of its processes; a later request may only shorten it."""

    def __init__(self) -> None:
        self._requested = asyncio.Event()
        self._hurry = asyncio.Event()
        self._kill_at = float("inf")

    def __bool__(self) -> bool:
        return self._requested.is_set()

    def request(self, grace_seconds: float) -> None:
        """Request a stop within the grace period, counted from now."""
        self._kill_at = min(self._kill_at, asyncio.get_running_loop().time() + grace_seconds)
        self._requested.set()
        self._hurry.set()

    async def wait(self) -> None:
        """Wait until a stop is requested."""
        await self._requested.wait()

    async def sleep(self, seconds: float) -> bool:
        """Sleep until a stop is requested, at most `seconds`; return whether it is requested."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._requested.wait()
        return bool(self)

    async def carry_out(
        self, process: Container, pre_stop_seconds: float = 0, turn: asyncio.Event | None = None
    ) -> None:
        """Wait for the request, terminate the process, and kill it after the grace period; cancelled when it ended.

        Args:
            process: the process of a container.
            pre_stop_seconds: the sleep of its preStop hook, which is a part of the grace period.
            turn: the turn of a sidecar to be stopped, or None. If it does not come within the grace period, which the
                containers before it have used up, the sidecar still has a moment to end by itself.
        """
        await self._requested.wait()
        await self._wait_until(asyncio.get_running_loop().time() + pre_stop_seconds)
        if turn:
            await self._wait_until(float("inf"), turn)
        process.terminate()
        if turn:
            await asyncio.sleep(SIDECAR_GRACE_SECONDS)
        await self._wait_until(float("inf"))
        process.kill()

    def give_turn(self, turn: asyncio.Event) -> None:
        """Stop the sidecar that waits for `turn`."""
        turn.set()
        self._hurry.set()

    async def _wait_until(self, moment: float, turn: asyncio.Event | None = None) -> None:
        """Wait until this moment of the loop's clock, until the turn comes, or until the grace period ends."""
        while (left := min(moment, self._kill_at) - asyncio.get_running_loop().time()) > 0:
            if turn and turn.is_set():
                return
            self._hurry.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._hurry.wait()


@dataclass
class Pod:
    """The resources that the containers of one pod share. `volumes` maps volume names to folders."""

    spec: Obj
    folder: Path
    volumes: dict[str, Path]
    addresses: dict[str, str]
    lookup: Lookup
    logs: logs.LogFolder
    backoff: Backoff
    session: aiohttp.ClientSession
    stopping: StopRequest
    changed: Callable[[], None]

    @property
    def ip(self) -> str:
        """Address of the pod."""
        return self.addresses["status.podIP"]


class Supervisor:
    """The supervisor of one container, which applies the pod's restart policy; `state` is always current."""

    def __init__(self, pod: Pod, container: Obj, state: ContainerState, *, init: bool) -> None:
        self.state = state
        self._pod = pod
        self._container = container
        self._init = init
        self._started = asyncio.Event()
        self._turn = asyncio.Event() if state.sidecar else None
        metadata = pod.spec["metadata"]
        self._log = log.bind(pod=f"{metadata['namespace']}/{metadata['name']}", container=container["name"])

    def _set(self, **changes: Any) -> None:
        self.state = replace(self.state, **changes)
        self._pod.changed()

    def waits(self, message: str) -> None:
        """Report the reason why the container has not been started yet."""
        if isinstance(self.state.state, Waiting):
            self._set(state=replace(self.state.state, message=message))

    async def wait_started(self) -> bool:
        """Wait until the sidecar has started, its startup probe included; return False if the pod stops before."""
        waits = [asyncio.ensure_future(wait) for wait in (self._started.wait(), self._pod.stopping.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return not self._pod.stopping

    def stop_sidecar(self) -> None:
        """Stop the sidecar of a pod that stops, because the containers that it was started before have ended."""
        if self._turn:
            self._pod.stopping.give_turn(self._turn)

    async def run(self) -> bool:
        """Run the container until it has ended for good or the pod stops; return whether it succeeded."""
        policy = "Always" if self.state.sidecar else self._pod.spec["spec"].get("restartPolicy", "Always")
        crashes = 0
        while not isinstance(self.state.state, Terminated) or self._again(policy, self.state.state):
            began = asyncio.get_running_loop().time()
            if not await self._run_once():
                return False
            ended = self.state.state
            if not isinstance(ended, Terminated) or not self._again(policy, ended):
                break
            crashes = crashes_in_a_row(crashes, asyncio.get_running_loop().time() - began)
            if delay := self._pod.backoff.delay(crashes):
                text = f"back-off {delay:g}s restarting failed container={self.state.name}"
                self._set(state=Waiting("CrashLoopBackOff", text), last=ended)
                if await self._pod.stopping.sleep(delay):
                    self._set(state=ended)
                    return False
        return isinstance(self.state.state, Terminated) and self.state.state.exit_code == 0

    def _again(self, policy: str, ended: Terminated) -> bool:
        return not self._pod.stopping and restarts(policy, ended.exit_code, init=self._init)

    async def _run_once(self) -> bool:
        """Start the container and wait for its end; return False when the pod stopped before it could start."""
        launch = await self._launch()
        if launch is None:
            return False
        previous = self.state.state if isinstance(self.state.state, Terminated) else self.state.last
        count = self.state.restart_count + (1 if self.state.container_id else 0)
        began = datetime.now(UTC)
        try:
            process = await containers.start(launch)
        except (StartError, OSError) as error:
            self._log.warning("container not started", error=str(error))
            container_id = f"process://{launch.folder.parent.parent.name}/{self.state.name}/{count}"
            ended = Terminated(START_ERROR_CODE, "StartError", str(error), began, datetime.now(UTC), container_id)
            self._set(state=ended, last=previous, restart_count=count, container_id=container_id)
            return True
        container_id = f"process://{process.pid}"
        self._log.info("container started", pid=process.pid, restart_count=count)
        self._set(state=Running(began), last=previous, restart_count=count, container_id=container_id)
        code = await self._attend(process)
        message = logs.termination_message(
            launch.folder / "termination",
            launch.log,
            policy=self._container.get("terminationMessagePolicy", "File"),
            failed=code != 0,
        )
        logs.complete(launch.log)
        self._log.info("container ended", exit_code=code)
        reason = "Error" if code else "Completed"
        self._set(
            state=Terminated(code, reason, message, began, datetime.now(UTC), container_id),
            started=False,
            ready=self._init and code == 0,
        )
        return True

    async def _attend(self, process: Container) -> int:
        async with asyncio.TaskGroup() as group:
            stopping = group.create_task(self._pod.stopping.carry_out(process, self._pre_stop_seconds, self._turn))
            probing = group.create_task(self._probe(process))
            code = await process.wait()
            stopping.cancel()
            probing.cancel()
        return code

    @property
    def _pre_stop_seconds(self) -> float:
        seconds: float = self._container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        return seconds

    async def _probe(self, process: Container) -> None:
        if probe := self._container.get("startupProbe"):
            await self._hold(probe, process, kind="startup", once=True)
        readiness, liveness = (self._container.get(kind) for kind in ("readinessProbe", "livenessProbe"))
        self._set(started=True, ready=not readiness and not self._init)
        self._started.set()
        async with asyncio.TaskGroup() as group:
            if readiness:
                group.create_task(self._follow(readiness, process))
            if liveness:
                group.create_task(self._hold(liveness, process, kind="liveness", once=False))

    async def _follow(self, probe: Obj, process: Container) -> None:
        """Set the readiness of the container to the result of the readiness probe."""
        results = probes.verdicts(probe, self._container, process, self._pod.ip, self._pod.session)
        async for ready, why in results:
            if ready != self.state.ready:
                self._log.info("readiness changed", ready=ready, why=None if ready else why)
                self._set(ready=ready)

    async def _hold(self, probe: Obj, process: Container, *, kind: str, once: bool) -> None:
        """Stop the container when the probe fails; return after the first success if `once` is set."""
        results = probes.verdicts(probe, self._container, process, self._pod.ip, self._pod.session)
        async with contextlib.aclosing(results):
            async for healthy, why in results:
                if healthy and once:
                    return
                if not healthy:
                    # As documented: during termination no liveness probe counts, only the pod's grace period.
                    if self._pod.stopping:
                        return
                    self._log.warning("probe failed, stopping the container", probe=kind, why=why)
                    grace = self._pod.spec["spec"].get("terminationGracePeriodSeconds", 30)
                    restart = StopRequest()
                    restart.request(probe.get("terminationGracePeriodSeconds", grace))
                    await restart.carry_out(process, self._pre_stop_seconds)
                    return

    async def _launch(self) -> Launch | None:
        """Wait for image and configuration, and return the parameters of the start; None if the pod stops before."""
        failures = 0
        while not self._pod.stopping:
            image = images.find(self._container["image"])
            if image is None:
                failures += 1
                await self._no_image(failures)
                continue
            try:
                return await self._compose(image)
            except (ConfigError, ApiError, Unreachable) as error:
                self._set(state=Waiting("CreateContainerConfigError", str(error)))
                await self._pod.stopping.sleep(CONFIG_RETRY_SECONDS)
        return None

    async def _no_image(self, failures: int) -> None:
        name = self._container["image"]
        text = f'image "{name}" is not in the table of tests/controlplane/kubelet/images.py'
        self._set(state=Waiting("ErrImagePull", text))
        await self._pod.stopping.sleep(CONFIG_RETRY_SECONDS)
        self._set(state=Waiting("ImagePullBackOff", f'Back-off pulling image "{name}": {text}'))
        await self._pod.stopping.sleep(self._pod.backoff.delay(failures + 1))

    async def _compose(self, image: images.Image) -> Launch:
        pod, container, metadata = self._pod, self._container, self._pod.spec["metadata"]
        hostname = pods.hostname(pod.spec)
        base = {**images.DEFAULT_ENVIRONMENT, **image.environment, "HOSTNAME": hostname}
        variables = await environment.resolve(container, pod.spec, base, addresses=pod.addresses, lookup=pod.lookup)
        folder = pod.folder / "containers" / container["name"]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "termination").write_bytes(b"")
        mounts = [self._mount(entry, variables) for entry in container.get("volumeMounts", [])]
        mounts.append(Mount(folder / "termination", container.get("terminationMessagePath", TERMINATION_PATH)))
        mounts += [Mount(pod.folder / name, f"/etc/{name}") for name in ("hosts", "resolv.conf")]
        count = self.state.restart_count + (1 if self.state.container_id else 0)
        return Launch(
            argv=environment.command(container, image.entrypoint, variables),
            environment=variables,
            working_dir=container.get("workingDir") or image.working_dir,
            hostname=hostname,
            netns=netns(metadata["uid"]),
            mounts=sorted(mounts, key=lambda mount: mount.target),  # /a before /a/b
            visible=image.visible,
            image_root=image.root,
            user=pods.find_user(pod.spec, container, image.user),
            read_only_root=container.get("securityContext", {}).get("readOnlyRootFilesystem", False),
            folder=folder,
            log=pod.logs.path(metadata["namespace"], metadata["name"], metadata["uid"], container["name"], count),
        )

    def _mount(self, entry: Obj, variables: dict[str, str]) -> Mount:
        source = self._pod.volumes[entry["name"]]
        below = entry.get("subPath") or environment.expand(entry.get("subPathExpr", ""), variables)
        if below:
            source /= below
            if not source.exists():
                source.mkdir(parents=True)
        return Mount(source, entry["mountPath"], read_only=entry.get("readOnly", False))
