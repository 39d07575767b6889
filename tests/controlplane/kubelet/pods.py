"""A pod's status and the next step of its containers, as pure functions over the observed state.

Nothing here reads a clock or the API; the worker in `worker.py` executes the steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

Obj = dict[str, Any]
Phase = Literal["Pending", "Running", "Succeeded", "Failed"]

VOLUME_KINDS = frozenset(
    {"configMap", "downwardAPI", "emptyDir", "hostPath", "persistentVolumeClaim", "projected", "secret"}
)

HOSTNAME_LENGTH = 63

# The back-off of a container is reset after so long a run without a problem.
BACKOFF_RESET_SECONDS = 600.0


@dataclass(frozen=True)
class Waiting:
    """A container that is not running, and the reason."""

    reason: str
    message: str = ""


@dataclass(frozen=True)
class Running:
    """A container that is running."""

    started_at: datetime


@dataclass(frozen=True)
class Terminated:
    """A container that has ended. The exit code is 128 plus the signal's number if a signal ended the container."""

    exit_code: int
    reason: str
    message: str
    started_at: datetime
    finished_at: datetime
    container_id: str


@dataclass(frozen=True)
class ContainerState:
    """The observed state of one container of the spec, over all its runs."""

    name: str
    image: str
    state: Waiting | Running | Terminated
    last: Terminated | None = None
    restart_count: int = 0
    started: bool = False
    ready: bool = False
    container_id: str = ""
    sidecar: bool = False
    """An init container that runs beside the main containers and is restarted for ever."""


@dataclass(frozen=True)
class PodState:
    """The observed state of one pod. `finished` means that it has no running process and will start none."""

    started_at: datetime
    init: Sequence[ContainerState]
    containers: Sequence[ContainerState]
    pod_ip: str | None = None
    finished: bool = False
    reason: str = ""
    message: str = ""


@dataclass(frozen=True)
class Backoff:
    """Delays between restarts: none after the first crash, then `base_seconds` doubling up to `cap_seconds`."""

    base_seconds: float = 10.0
    cap_seconds: float = 300.0

    def delay(self, crashes: int) -> float:
        """Return the delay in seconds after so many crashes in a row."""
        return 0.0 if crashes <= 1 else float(min(self.base_seconds * 2 ** min(crashes - 2, 64), self.cap_seconds))


def crashes_in_a_row(crashes: int, ran_seconds: float) -> int:
    """Return the count after one more exit of a container; a run of 600 s resets it to 1."""
    return 1 if ran_seconds >= BACKOFF_RESET_SECONDS else crashes + 1


def restarts(policy: str, exit_code: int, *, init: bool = False) -> bool:
    """Return whether an ended container is restarted; a successful init container never is."""
    if policy == "Never":
        return False
    return exit_code != 0 or (policy == "Always" and not init)


def unsupported(pod: Obj) -> str | None:
    """Return a message about the first unsupported field of a pod's spec, or None."""
    spec = pod["spec"]
    for name in ("hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace", "readinessGates", "hostname"):
        if spec.get(name):
            return f"spec.{name} is not supported by the process kubelet"
    for volume in spec.get("volumes", []):
        kind = next(key for key in volume if key != "name")
        if kind not in VOLUME_KINDS:
            return f"volume {volume['name']}: {kind} is not supported by the process kubelet"
    for container in spec.get("initContainers", []):
        if (policy := container.get("restartPolicy")) not in {None, "Always"}:
            return f"init container {container['name']}: restartPolicy {policy} is not supported by the process kubelet"
    for container in [*spec.get("initContainers", []), *spec["containers"]]:
        for hook, handler in container.get("lifecycle", {}).items():
            if hook != "preStop" or set(handler) != {"sleep"}:
                return f"container {container['name']}: lifecycle.{hook} is not supported by the process kubelet"
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            if "grpc" in container.get(probe, {}):
                return f"container {container['name']}: a grpc {probe} is not supported by the process kubelet"
    return None


def hostname(pod: Obj) -> str:
    """Return the pod's host name, cut to the kernel's limit."""
    name: str = pod["metadata"]["name"]
    return name[:HOSTNAME_LENGTH].rstrip("-.")


def find_user(pod: Obj, container: Obj, of_image: int) -> int:
    """Return the user that runs a container: its own, else the pod's, else the image's."""
    contexts = (spec.get("securityContext") or {} for spec in (container, pod["spec"]))
    return next((int(context["runAsUser"]) for context in contexts if "runAsUser" in context), of_image)


def is_sidecar(container: Obj) -> bool:
    """Return whether an init container runs beside the main containers."""
    return container.get("restartPolicy") == "Always"


def initialized(state: PodState) -> bool:
    """Return whether all init containers succeeded and all sidecars have started; one may crash later."""
    if any(item.container_id for item in state.containers):
        return True
    return all(
        item.started if item.sidecar else isinstance(item.state, Terminated) and item.state.exit_code == 0
        for item in state.init
    )


def phase(state: PodState) -> Phase:
    """Return the pod's phase: final once it is finished, Running from when all containers were started once."""
    if state.reason and state.finished:
        return "Failed"
    if state.finished:
        codes = [item.state.exit_code if isinstance(item.state, Terminated) else None for item in state.containers]
        return "Succeeded" if initialized(state) and all(code == 0 for code in codes) else "Failed"
    started = all(item.last is not None or not isinstance(item.state, Waiting) for item in state.containers)
    return "Running" if initialized(state) and started else "Pending"


def conditions(state: PodState) -> list[tuple[str, bool, str]]:
    """Return (type, status, reason) of the conditions that a kubelet owns."""
    final = phase(state)
    done = {"Succeeded": "PodCompleted", "Failed": "PodFailed"}.get(final, "")
    sidecars = [item for item in state.init if item.sidecar]
    unready = [item.name for item in (*sidecars, *state.containers) if not item.ready]
    ready = final == "Running" and not unready
    not_ready = done or ("" if ready else "ContainersNotReady")
    return [
        ("PodReadyToStartContainers", state.pod_ip is not None and not state.finished, done if state.finished else ""),
        ("Initialized", initialized(state), "" if initialized(state) else done or "ContainersNotInitialized"),
        ("ContainersReady", ready, not_ready),
        ("Ready", ready, not_ready),
    ]


def merge_conditions(
    old: Iterable[Obj], new: Iterable[tuple[str, bool, str]], *, generation: int, now: datetime
) -> list[Obj]:
    """Return the conditions for the API; the time of a condition changes only when its status does."""
    before = {item["type"]: item for item in old}
    merged = []
    for name, value, reason in new:
        status = "True" if value else "False"
        previous = before.get(name, {})
        changed = previous.get("status") != status
        merged.append(
            {
                "type": name,
                "status": status,
                "lastTransitionTime": rfc3339(now) if changed else previous["lastTransitionTime"],
                "observedGeneration": generation,
                # null removes an older reason in a strategic merge patch
                "reason": reason or None,
            }
        )
    return merged


def status(pod: Obj, state: PodState, *, host_ip: str, previous: Iterable[Obj], now: datetime) -> Obj:
    """Return the pod's status as the kubelet reports it; `previous` are the last reported conditions."""
    generation = pod["metadata"].get("generation", 0)
    report: Obj = {
        "observedGeneration": generation,
        "phase": phase(state),
        "startTime": rfc3339(state.started_at),
        "hostIP": host_ip,
        "hostIPs": [{"ip": host_ip}],
        "conditions": merge_conditions(previous, conditions(state), generation=generation, now=now),
        "initContainerStatuses": [container_status(item) for item in state.init],
        "containerStatuses": [container_status(item) for item in state.containers],
    }
    if state.pod_ip is not None:
        report |= {"podIP": state.pod_ip, "podIPs": [{"ip": state.pod_ip}]}
    if state.reason:
        report |= {"reason": state.reason, "message": state.message}
    return report


def container_status(item: ContainerState) -> Obj:
    """Return one entry of containerStatuses."""
    return {
        "name": item.name,
        "image": item.image,
        "imageID": f"process://{item.image}" if item.container_id else "",
        "containerID": item.container_id,
        "restartCount": item.restart_count,
        "started": item.started,
        "ready": item.ready,
        "state": _state(item.state),
        "lastState": _state(item.last) if item.last else {},
    }


def taken_over(pod: Obj, container: Obj) -> ContainerState:
    """Return a container's initial state at the start of a kubelet, from the status that an earlier kubelet wrote.

    A container that was running was killed at the start of this kubelet, and its exit code is unknown: it counts as
    ended by SIGKILL, as after a reboot of the node. A container that had ended for good stays ended.
    """
    waiting = Waiting("PodInitializing" if pod["spec"].get("initContainers") else "ContainerCreating")
    statuses: Mapping[str, Obj] = {item["name"]: item for item in pod.get("status", {}).get("containerStatuses", [])}
    old = statuses.get(container["name"], {})
    container_id = old.get("containerID", "")
    if not container_id:
        return ContainerState(container["name"], container["image"], waiting)
    if ended := old["state"].get("terminated") or (old["state"].get("waiting") and old["lastState"].get("terminated")):
        began, finished = datetime.fromisoformat(ended["startedAt"]), datetime.fromisoformat(ended["finishedAt"])
        last = Terminated(
            ended["exitCode"], ended["reason"], ended.get("message", ""), began, finished, ended["containerID"]
        )
    else:
        began = datetime.fromisoformat(old["state"]["running"]["startedAt"])
        last = Terminated(137, "ContainerStatusUnknown", "the kubelet was restarted", began, began, container_id)
    again = restarts(pod["spec"].get("restartPolicy", "Always"), last.exit_code)
    return ContainerState(
        container["name"],
        container["image"],
        waiting if again else last,
        last=last if again else None,
        restart_count=old.get("restartCount", 0),
        container_id=container_id,
    )


def rfc3339(moment: datetime) -> str:
    """Return a time in the format of the API, in whole seconds."""
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def _state(state: Waiting | Running | Terminated) -> Obj:
    if isinstance(state, Waiting):
        return {"waiting": {"reason": state.reason} | ({"message": state.message} if state.message else {})}
    if isinstance(state, Running):
        return {"running": {"startedAt": rfc3339(state.started_at)}}
    ended = {
        "exitCode": state.exit_code,
        "reason": state.reason,
        "startedAt": rfc3339(state.started_at),
        "finishedAt": rfc3339(state.finished_at),
        "containerID": state.container_id,
    }
    return {"terminated": ended | ({"message": state.message} if state.message else {})}
