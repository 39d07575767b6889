"""Diagnose why a replica does not serve, by the reports of scheduler, kubelet and agent, and the engine's last output.

Only the first of the most severe problems is reported: one cause with its remedy helps a reader more than a list.
"""

import re
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

from controller.models.job_pods import advise_on_refusal
from controller.placement.capacity import HostCapacity, list_eligible_hosts
from controller.placement.node_rules import find_untolerated
from controller.placement.units import HostRequirement
from controller.reconcile.triggers import is_gated
from controller.services.preconditions import Phase, ServiceProblem
from controller.services.replica_memory import MemoryAdvice
from controller.services.rollout import SortedProcesses
from crds.meta import FLAPPING, HOST_PAUSED, MEMORY_PRESSURE, PROXY_CONTAINER
from crds.metalprocess import MetalProcess
from crds.size import size_text
from kube.client import Obj
from runtimes.engine_errors import find_cause
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
_OUT_OF_MEMORY: Final = "OOMKilled"
_MISSING_CLASS: Final = re.compile(r"no PriorityClass with name (pomona-[a-z]+) was found")
_SEVERITY: Final[tuple[Phase, ...]] = ("Failed", "Pending", "WaitingForGPU", "Downloading", "Progressing")
QUEUED: Final = "Queued"
"""Reason of a replica in a pod that waits in the queue, which has a better one as soon as it has looked at it."""
_MOST_NAMED: Final = 3
_NO_HOST_FITS: Final = "NoHostFits"
WAITS_FOR_HOST: Final = frozenset({"NoHost", _NO_HOST_FITS, MEMORY_PRESSURE, HOST_PAUSED, FLAPPING})
"""Reasons of a replica that has no host."""
SCHEDULING_GATED: Final = "SchedulingGated"
"""Reason by which Kubernetes' scheduler says that a pod has a gate."""
LOADING: Final = "Loading"
"""Reason of a replica whose engine runs and has not been ready since its start."""
BINDING: Final = "Binding"
"""Reason of a replica that fits on a host and has not been given to it yet."""
_UNKNOWN_MEMORY: Final[Mapping[str, str]] = MappingProxyType({})


def pick_most_severe(problems: Iterable[ServiceProblem | None]) -> ServiceProblem | None:
    """Return the first of the most severe problems, or None if there is no problem."""
    return min(
        (problem for problem in problems if problem), key=lambda problem: _SEVERITY.index(problem.phase), default=None
    )


def diagnose_deployment(deployment: Obj) -> ServiceProblem | None:
    """Return why a Deployment cannot create its pods, for example a quota, or None."""
    for condition in deployment.get("status", {}).get("conditions", []):
        if condition["type"] == "ReplicaFailure" and condition["status"] == "True":
            message: str = condition.get("message", "")
            if (match := _MISSING_CLASS.search(message)) is not None:  # Pomona's own classes
                message = (
                    f"PriorityClass {match[1]} does not exist, so no pod can be created: kubectl apply --server-side "
                    "-f deploy/install/priority-classes.yaml"
                )
                return ServiceProblem("PriorityClassMissing", message, "Failed")
            return ServiceProblem(condition.get("reason") or "ReplicaFailure", advise_on_refusal(message), "Failed")
    return None


def diagnose_pod(pod: Obj, memory: Mapping[str, str] = _UNKNOWN_MEMORY) -> ServiceProblem | None:
    """Return why a pod is not ready, or None if it is only starting.

    The first that applies decides: it waits for the queue, no node fits, a container cannot start, one has ended and is
    restarted, or one runs and is not ready. `memory` is what each container may use, by name, for the message.
    """
    name, status = pod["metadata"]["name"], pod.get("status", {})
    if is_gated(pod):
        return ServiceProblem(QUEUED, f"pod {name} waits for the queue", "WaitingForGPU")

    # The scheduler has found no node for it.
    for condition in status.get("conditions", []):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            reason = condition.get("reason") or "Unschedulable"
            if reason == SCHEDULING_GATED and not pod["spec"].get("schedulingGates"):
                continue  # it was let go a moment ago, and the scheduler has not looked at it since
            return ServiceProblem(reason, f"pod {name}: {condition.get('message', 'no node fits')}", "Pending")

    # A container cannot start.
    for container in status.get("containerStatuses", []):
        waiting = container.get("state", {}).get("waiting", {})
        if waiting.get("reason") in _BROKEN:  # it cannot start, or ends again and again
            ended = _describe_last_end(container, memory)
            return ServiceProblem(waiting["reason"], f"pod {name}: {ended or waiting.get('message', '')}", "Failed")

    # A container has ended, and is started again.
    for container in status.get("containerStatuses", []):
        if ended := _describe_last_end(container, memory):
            return ServiceProblem("Restarting", f"pod {name}: {ended}", "Progressing")

    # A container runs, and is not ready.
    for container in status.get("containerStatuses", []):
        if "running" in container.get("state", {}) and not container.get("ready"):
            return _diagnose_unready(pod, container)
    return None


def _diagnose_unready(pod: Obj, container: Obj) -> ServiceProblem:
    """Return why a container that runs is not ready: it loads the model, or it was ready before and fails now."""
    name = pod["metadata"]["name"]
    subject, option = container["name"], f"-c {container['name']}"
    if subject == PROXY_CONTAINER:
        # It is not ready as long as its engine is not, whose log says why; Ollama's progress is in that of the proxy.
        subject, option = "the engine", "--all-containers"

    logs = f"`kubectl logs -n {pod['metadata']['namespace']} {name} {option}`"

    # It was ready before if it became unready after its start; times in this form sort as text.
    started_at = container["state"]["running"].get("startedAt", "")
    unready_since = [
        condition.get("lastTransitionTime", "")
        for condition in pod["status"].get("conditions", [])
        if condition["type"] == "Ready" and condition["status"] == "False"
    ]
    if started_at and any(since > started_at for since in unready_since):
        message = f"pod {name}: {subject} has served, and its readiness probe fails now: see {logs}"
        return ServiceProblem("NotAnswering", message, "Progressing")
    return ServiceProblem(LOADING, f"pod {name}: {subject} is loading the model: see {logs}", "Progressing")


def _describe_last_end(container: Obj, memory: Mapping[str, str]) -> str:
    """Describe the last end of a container: exit code, reason and last output; empty if it has not ended."""
    ended = container.get("state", {}).get("terminated") or container.get("lastState", {}).get("terminated")
    if ended is None:
        return ""
    name, reason = container["name"], ended.get("reason")
    if reason == _OUT_OF_MEMORY:
        return _describe_killed(name, memory.get(name, ""))
    text = f"{name} ended with exit code {ended['exitCode']}"
    if reason not in {None, "", "Error"}:
        text += f" ({reason})"
    last_output = find_cause(ended.get("message", ""))
    return f"{text}: {last_output}" if last_output else text


def _describe_killed(container: str, memory: str) -> str:
    """Describe a container that was killed for its memory, with the way out."""
    readable = size_text(int(memory)) if memory.isdecimal() else memory
    more = f"took more than its memory{' of ' if readable else ''}{readable}"
    if container == PROXY_CONTAINER:
        return (
            f"{container} was killed ({_OUT_OF_MEMORY}): Pomona's proxy {more}, which no field of the service raises, "
            "or its node ran out of memory: raise replicas, so that each proxy holds fewer requests, or send smaller "
            "requests, such as with smaller images"
        )
    return (
        f"{container} was killed ({_OUT_OF_MEMORY}): it {more}, or its node ran out of memory: raise resources.memory, "
        "or lower contextLength or parallel"
    )


def diagnose_process(
    process: MetalProcess,
    capacities: Sequence[HostCapacity],
    siblings: SortedProcesses,
    advise: Callable[[int], MemoryAdvice],
    requirement: HostRequirement,
) -> ServiceProblem | None:
    """Return why a process does not serve, or None if it serves.

    Args:
        process: a wanted process.
        capacities: the capacity that each live host has left.
        siblings: the processes of the service, by their next step.
        advise: returns advice on how a replica would fit into a number of bytes.
        requirement: its demands on a host.
    """
    status, host = process.status, process.spec.host_name
    if status.phase == "Ready":
        return None

    if host is None:
        return _diagnose_unbound(process, capacities, siblings, advise, requirement)

    # It has a host, whose agent reports its phase.
    if status.phase == "Failed":
        return ServiceProblem(status.reason or "ProcessFailed", f"host {host}: {status.message}", "Failed")
    if status.phase == "Fetching":
        return ServiceProblem("Fetching", f"host {host}: {_describe_progress(process)}", "Downloading")
    what = status.message or "the engine is starting"
    return ServiceProblem(status.reason or "Starting", f"host {host}: {what}", "Progressing")


def _describe_progress(process: MetalProcess) -> str:
    """Describe how much of the weights has been downloaded."""
    progress = process.status.progress
    if progress is None or not progress.total_bytes:
        return "downloading the weights"
    return f"downloaded {size_text(progress.bytes)} of {size_text(progress.total_bytes)} of the weights"


class _ClosedHosts(NamedTuple):
    """Hosts that take no process for one reason."""

    reason: str
    """Reason of a service that fits nowhere else."""
    state: str
    remedy: str


def _list_closed_hosts(capable: Sequence[HostCapacity], short_hosts: Collection[str | None]) -> list[_ClosedHosts]:
    """Return why some of these hosts take no process now, the most important reason first, each with its remedy.

    The reasons are: short of memory, paused by the owner, flapping (its Lease expired several times, so it is not
    trusted yet), and cordoned. No message counts hosts: while an administrator drains one host after the other, each
    new number would rewrite the status of all that waits.

    Args:
        capable: hosts that could run the replica.
        short_hosts: names of the hosts that move a replica of the service away because they are short of memory.
    """
    # The hosts with each reason; one may have several.
    cordoned = [capacity.host for capacity in capable if capacity.is_cordoned]
    paused = [capacity for capacity in capable if capacity.pause and not capacity.is_cordoned]
    flapping = [capacity for capacity in capable if capacity.distrust]

    # A host counts as short of memory only if it is neither cordoned, nor paused, nor flapping.
    named_for_another_reason = {*cordoned, *(capacity.host for capacity in (*paused, *flapping))}
    short = [
        capacity.host
        for capacity in capable
        if capacity.host not in named_for_another_reason and (capacity.short_of_memory or capacity.host in short_hosts)
    ]

    # One entry for each reason.
    closed = []
    if short:
        state = f"host {short[0]} is short of memory and accepts nothing until it has recovered"
        closed.append(_ClosedHosts(MEMORY_PRESSURE, state, remedy="free memory there"))
    if paused:
        state = f"host {paused[0].host} is paused by its owner ({paused[0].pause})"
        closed.append(_ClosedHosts(HOST_PAUSED, state, remedy="wait for the end of the pause"))
    if flapping:
        state = flapping[0].distrust
        closed.append(_ClosedHosts(FLAPPING, state, remedy="wait until it is stable"))
    if cordoned:
        more = " and more" if len(cordoned) > _MOST_NAMED else ""
        names = ", ".join(cordoned[:_MOST_NAMED]) + more
        state = f"host {names} is cordoned" if len(cordoned) == 1 else f"hosts {names} are cordoned"
        closed.append(_ClosedHosts(_NO_HOST_FITS, state, remedy=f"`pomona host uncordon {cordoned[0]}`"))
    return closed


def _explain_rules(capable: Sequence[HostCapacity], requirement: HostRequirement) -> str:
    """Return the label or taint that keeps a replica from all of these hosts, with the way out.

    Each of these hosts has a taint that is not tolerated, or lacks a label of the nodeSelector. A taint comes first: it
    is that of a host whose labels are right.
    """
    # A taint of a host whose labels are right.
    labelled = [capacity for capacity in capable if requirement.selector <= capacity.labels]
    for host in labelled:
        if (taint := find_untolerated(host.taints, requirement.tolerations)) is not None:
            return (
                f"the service does not tolerate the taint {taint.text} of host {host.host}, and no other host can run "
                f"it: add the taint to spec.tolerations, or run `pomona host taint {host.host} {taint.key}-`"
            )

    # No host has the labels, so the first one lacks some.
    host = capable[0]
    key, value = min(requirement.selector - host.labels)
    return (
        f"no live host that can run it has the labels of nodeSelector: host {host.host} lacks {key}={value}: run "
        f"`kubectl label metalhost {host.host} {shlex.quote(f'{key}={value}')}`, or change nodeSelector"
    )


def _explain_shortage(
    needed: int,
    eligible: Sequence[HostCapacity],
    advise: Callable[[int], MemoryAdvice],
) -> str:
    """Return why a replica fits none of these hosts now, which could run it if enough memory were free.

    The host with the most memory for models decides: either even all of that is too little, and the advice says how
    the replica would need less, or it waits until enough of it is free.
    """
    # No message quotes the free memory: it changes every few seconds, and each change would rewrite all that waits.
    by_name = sorted(eligible, key=lambda capacity: capacity.host)
    largest = max(by_name, key=lambda capacity: capacity.budget_bytes)

    # What the replica needs, and what this host has in all.
    advice = advise(largest.budget_bytes)
    parts = f" ({advice.memory_parts})" if advice.memory_parts else ""
    message = f"a replica needs {size_text(needed)}{parts}; the largest host, {largest.host}, has "

    if largest.budget_bytes < needed:
        message += f"{size_text(largest.budget_bytes)} for models, which is too little: {advice.way_out}"
    else:
        message += (
            f"{size_text(largest.budget_bytes)} for models, of which too little is free now: it starts once enough is "
            "free; free memory there, or lower contextLength or parallel"
        )
    return message


def _diagnose_unbound(
    process: MetalProcess,
    capacities: Sequence[HostCapacity],
    siblings: SortedProcesses,
    advise: Callable[[int], MemoryAdvice],
    requirement: HostRequirement,
) -> ServiceProblem:
    """Return why no host runs a process: the first demand that no host meets, of those that meet all before it."""
    runtime, namespace, needed = process.spec.runtime, process.metadata.namespace, process.spec.memory_bytes

    # 1. The hosts that could run it, by namespace, address, engine, labels and taints.
    if not capacities:
        message = f"no live host: run `pomona agent` on a host that has {size_text(needed)} of memory free"
        return ServiceProblem("NoHost", message, "Pending")
    allowed = [capacity for capacity in capacities if capacity.accepts(namespace)]
    if not allowed:
        message = (
            f"none of the {len(capacities)} live hosts is given to namespace {namespace}: an administrator may add it "
            f"to spec.namespaces of one, such as MetalHost {min(host.host for host in capacities)}"
        )
        return ServiceProblem("NoHost", message, "Pending")
    reachable = [capacity for capacity in allowed if not capacity.address_problem]
    if not reachable:
        message = f"no endpoint of host {allowed[0].host} is accepted: {allowed[0].address_problem}"
        return ServiceProblem("NoHost", message, "Pending")
    capable = [capacity for capacity in reachable if runtime in capacity.runtimes]
    if not capable:
        hint = RUNTIMES[runtime].install_hint if runtime in RUNTIMES else "install it"
        message = f"none of the {len(reachable)} live hosts can run {runtime}: {hint} on one of them"
        return ServiceProblem("NoHost", message, "Pending")
    admitting = [host for host in capable if requirement.refuse_host(host) not in {"LabelMissing", "Taint"}]
    if not admitting:
        return ServiceProblem("NoHost", _explain_rules(capable, requirement), "Pending")

    # 2. Of these, the hosts that take it now. Left out are those that have rejected a replica of this service, that one
    # of its replicas has to leave, or that are closed to all.
    rejecting = {process.spec.host_name: process.status.message or "it has stopped it" for process in siblings.rejected}
    displacing = {displaced.process.spec.host_name for displaced in siblings.displaced}
    short = {leaving.process.spec.host_name for leaving in siblings.displaced if leaving.why.cause == MEMORY_PRESSURE}
    closed = _list_closed_hosts(admitting, short)
    eligible = list_eligible_hosts(requirement, {*rejecting, *displacing}, reachable)
    if not eligible and closed:
        reason, state, remedy = closed[0]
        message = f"{state}; no other host can run it: {remedy}"
        message += f", or run `pomona agent` on a host that has {size_text(needed)} free"
        return ServiceProblem(reason, "; ".join((message, *(hosts.state for hosts in closed[1:]))), "Pending")
    if not eligible:
        host, why = next(iter(rejecting.items()))  # neither closed nor eligible: it has rejected one
        return ServiceProblem("Rejected", f"host {host} rejected it: {why}", "Failed")

    # 3. Of these, the hosts with enough free memory.
    best = eligible[0]
    if best.free_bytes >= needed:
        return ServiceProblem(BINDING, f"waiting to be bound to host {best.host}, which has enough memory", "Pending")
    message = "; ".join((_explain_shortage(needed, eligible, advise), *(hosts.state for hosts in closed)))
    if len(allowed) < len(capacities):
        message += f"; {len(capacities) - len(allowed)} more live hosts are not given to namespace {namespace}"
    return ServiceProblem(_NO_HOST_FITS, message, "Pending")
