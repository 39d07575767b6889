"""Why a replica does not serve, in the words of whoever knows: scheduler, kubelet, the engine's last lines, the agent.

The first of the gravest is told: one cause that can be acted on is worth more than a list.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from controller.binder import Room, able
from controller.processes import Standing
from controller.requirements import Advice, Phase, Problem
from crds.meta import MEMORY_PRESSURE
from crds.metalprocess import MetalProcess
from crds.size import size_text
from kube.client import Obj
from runtimes.registry import RUNTIMES

_BROKEN: Final = frozenset(
    {
        "ImagePullBackOff",
        "ErrImagePull",
        "InvalidImageName",
        "CreateContainerConfigError",
        "CreateContainerError",
        "RunContainerError",
        "CrashLoopBackOff",
    }
)
_GRAVITY: Final[tuple[Phase, ...]] = ("Failed", "Pending", "Downloading", "Progressing")
_QUOTED_CHARACTERS: Final = 400


def gravest(problems: Iterable[Problem | None]) -> Problem | None:
    """Return the first of the gravest, or None when there is none."""
    return min((each for each in problems if each), key=lambda each: _GRAVITY.index(each.phase), default=None)


def of_deployment(deployment: Obj) -> Problem | None:
    """Return why a Deployment cannot make its pods, such as a quota."""
    for condition in deployment.get("status", {}).get("conditions", []):
        if condition["type"] == "ReplicaFailure" and condition["status"] == "True":
            return Problem(condition.get("reason") or "ReplicaFailure", condition.get("message", ""), "Failed")
    return None


def of_pod(pod: Obj) -> Problem | None:
    """Return why a pod does not run, or None while it is only taking its time."""
    name, status = pod["metadata"]["name"], pod.get("status", {})
    for condition in status.get("conditions", []):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            reason = condition.get("reason") or "Unschedulable"
            return Problem(reason, f"pod {name}: {condition.get('message', 'no node fits')}", "Pending")
    for container in status.get("containerStatuses", []):
        waiting = container.get("state", {}).get("waiting", {})
        if waiting.get("reason") in _BROKEN:
            ended = _last_end(container)
            return Problem(waiting["reason"], f"pod {name}: {ended or waiting.get('message', '')}", "Failed")
        if ended := _last_end(container):
            return Problem("Restarting", f"pod {name}: {ended}", "Progressing")
    return None


def _last_end(container: Obj) -> str:
    """Return how a container ended the last time, with its last words."""
    ended = container.get("lastState", {}).get("terminated") or container.get("state", {}).get("terminated")
    if ended is None:
        return ""
    words = ended.get("message", "").strip()[-_QUOTED_CHARACTERS:]
    cause = f" ({ended['reason']})" if ended.get("reason") not in {None, "", "Error"} else ""
    return f"{container['name']} ended with exit code {ended['exitCode']}{cause}{': ' if words else ''}{words}"


def of_process(
    process: MetalProcess, rooms: Sequence[Room], siblings: Standing, advise: Callable[[int], Advice]
) -> Problem | None:
    """Return why a process does not serve, or None when it does.

    Args:
        process: one that is wanted.
        rooms: what each live host can still take.
        siblings: what there is beside it.
        advise: says what would fit into so many bytes.
    """
    status, host = process.status, process.spec.host_name
    if status.phase == "Ready":
        return None
    if host is None:
        return _unbound(process, rooms, siblings, advise)
    if status.phase == "Failed":
        return Problem(status.reason or "ProcessFailed", f"host {host}: {status.message}", "Failed")
    if status.phase == "Fetching":
        return Problem("Fetching", f"host {host} {_progress(process)}", "Downloading")
    what = status.message or "the engine is being started"
    return Problem(status.reason or "Starting", f"host {host}: {what}", "Progressing")


def _progress(process: MetalProcess) -> str:
    progress = process.status.progress
    if progress is None or not progress.total_bytes:
        return "fetches the weights"
    return f"has {size_text(progress.bytes)} of {size_text(progress.total_bytes)} of the weights"


def _unbound(
    process: MetalProcess, rooms: Sequence[Room], siblings: Standing, advise: Callable[[int], Advice]
) -> Problem:
    runtime, needed = process.spec.runtime, process.spec.memory_bytes
    if not rooms:
        message = f"no live host: run `pomona agent` on one that has {size_text(needed)} free"
        return Problem("NoHost", message, "Pending")
    capable = [room for room in rooms if runtime in room.runtimes]
    if not capable:
        hint = RUNTIMES[runtime].install_hint if runtime in RUNTIMES else "install it"
        message = f"none of the {len(rooms)} live hosts can run {runtime}: {hint} on one of them"
        return Problem("NoHost", message, "Pending")
    refused = {each.spec.host_name: each.status.message for each in siblings.rejected}
    left_by = {each.spec.host_name for each in siblings.displaced}
    short = [room.host for room in capable if room.short_of_memory or room.host in left_by]
    left = able(runtime, {*refused, *left_by}, rooms)
    if not left and short:
        message = (
            f"host {short[0]} is short of memory, takes on nothing until that is over, and no other host can run it: "
            f"end what uses the memory there, or run `pomona agent` on a host that has {size_text(needed)} free"
        )
        return Problem(MEMORY_PRESSURE, message, "Pending")
    if not left:
        host, why = next(iter(refused.items()))
        return Problem("Rejected", f"host {host} rejected it: {why}", "Failed")
    best = left[0]
    if best.free_bytes >= needed:
        return Problem("Binding", f"host {best.host} has room", "Pending")
    advice = advise(best.free_bytes)
    message = (
        f"a replica needs {size_text(needed)}{f' ({advice.parts})' if advice.parts else ''}; the host with most free "
        f"memory, {best.host}, has {size_text(best.free_bytes)}, {size_text(needed - best.free_bytes)} too few: free "
        f"some there; {advice.way_out}"
    )
    if short:
        message += f"; host {short[0]} is short of memory, and takes on nothing until that is over"
    return Problem("NoHostFits", message, "Pending")
