"""The tree of what a service waits for: its Model, its replicas, and the hosts and nodes that they are on."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from cli.api_objects import Obj, count_serving, find_condition, has_condition
from cli.output import age_text, wrap_text
from cli.service.verdict import Verdict
from crds.inferenceservice import ScaledService, wanted_replicas
from crds.meta import QUEUE_GATE
from crds.size import share_text
from crds.text import escape_controls

_LEAST_WIDTH: Final = 20
_BRANCH: Final = ("├─ ", "│  ")
_LAST_BRANCH: Final = ("└─ ", "   ")


@dataclass(frozen=True, slots=True)
class TreeNode:
    """One line of the tree, with texts and further lines below it."""

    title: str
    texts: tuple[str, ...] = ()
    children: tuple["TreeNode", ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceObjects:
    """A service and the objects that belong to it, as the API server sends them."""

    service: Obj
    models: Mapping[str, Obj | None]
    """The Models that it names, by name; None if there is none."""
    pods: Sequence[Obj] = ()
    processes: Sequence[Obj] = ()
    hosts: Mapping[str, Obj] = field(default_factory=dict)
    """MetalHosts by name."""
    hidden: tuple[str, ...] = ()
    """A sentence for each kind that the user may not read."""


def render_status(objects: ServiceObjects, verdict: Verdict, width: int) -> list[str]:
    """Return the verdict and the tree, in lines of at most `width` columns where words allow it."""
    name = objects.service["metadata"]["name"]
    states = {"on its way": "is on its way", "suspended": "is suspended", "not seen": "is not seen yet"}
    text = f"{name} {states.get(verdict.state, verdict.state)}" + (f": {verdict.message}" if verdict.message else "")
    lines = [*wrap_text(text, width), *wrap_text(f"next: {verdict.next_step}", width), ""]
    lines += _render_node(build_tree(objects), "", "", width)
    for sentence in objects.hidden:
        lines += ["", *wrap_text(sentence, width)]
    return lines


def build_tree(objects: ServiceObjects) -> TreeNode:
    """Return the tree of a service: below it its Models, and its replicas, which are pods or processes on hosts."""
    service = objects.service
    status = service.get("status", {})
    wanted = wanted_replicas(msgspec.convert(service, ScaledService))
    place = " with ".join(part for part in (status.get("accelerator"), status.get("runtime")) if part)
    title = f"replicas: {count_serving(service)} of {wanted} ready{f', on {place}' if place else ''}"
    memory = status.get("deviceMemory") or status.get("memory")
    texts = (f"each takes {memory}" if memory else "", *_describe_placement(status))
    pods = [_build_pod(pod) for pod in objects.pods]
    processes = [_build_process(process, objects.hosts) for process in objects.processes]
    replicas = TreeNode(title, tuple(text for text in texts if text), (*pods, *processes))
    models = [_build_model(name, model) for name, model in objects.models.items()]
    endpoint = (str(status["endpoint"]),) if status.get("endpoint") else ()
    # A node of the tree is a title, lines of text, and the nodes below it.
    return TreeNode(f"InferenceService {service['metadata']['name']}  {_phase(service)}", endpoint, (*models, replicas))


def _describe_placement(status: Obj) -> Iterable[str]:
    """Yield the lines about placement that apply to a service.

    They are: where the last replica was placed and why; that a replica fits nowhere; that one is slow for its hardware,
    or does not fit where it runs.
    """
    if placement := status.get("placement"):
        rate = f" at {placement['tokensPerSecond']} tokens/s" if placement.get("tokensPerSecond") else ""
        source = f" ({placement['source'].lower()})" if placement.get("source") else ""
        yield f"placed on {placement['place']}{rate}{source}: {placement.get('reason', '')}"

    # The condition Fits is bad if it is not True, the two below if they are True.
    fits = find_condition({"status": status}, "Fits")
    if fits and fits["status"] != "True":
        yield _describe_condition(fits)
    for kind in ("SpeedDegraded", "FitDegraded"):
        degraded = find_condition({"status": status}, kind)
        if degraded and degraded["status"] == "True":
            yield _describe_condition(degraded)


def _phase(obj: Obj) -> str:
    return str(obj.get("status", {}).get("phase", "Pending"))


def _build_model(name: str, model: Obj | None) -> TreeNode:
    """Return a Model with its facts, and the conditions that tell why it is not ready."""
    if model is None:
        return TreeNode(f"Model {name}  does not exist")
    status = model.get("status", {})
    gguf = status.get("gguf", {})
    parameters = f"{status['parameters']} parameters" if status.get("parameters") else ""
    facts = (status.get("size"), gguf.get("quantization"), parameters)
    texts = [", ".join(str(fact) for fact in facts if fact)]
    if not status:
        texts.append("the controller has not seen it yet")
    # A condition is notable if it is not True, but for a download that goes on although the Model is ready.
    conditions = status.get("conditions", [])
    texts += [_describe_condition(condition) for condition in conditions if _is_notable(model, condition)]
    return TreeNode(f"Model {name}  {_phase(model)}", tuple(text for text in texts if text))


def _is_notable(model: Obj, condition: Obj) -> bool:
    """Return whether a condition of a Model is worth a line: it is not True, as all is well then.

    `Cached` False is the progress of a download, and of no interest once the Model is ready.
    """
    return condition["status"] != "True" and not (condition["type"] == "Cached" and _phase(model) == "Ready")


def _describe_condition(condition: Obj) -> str:
    return f"{condition['type']} is {condition['status']} ({condition['reason']}): {condition['message']}"


def _build_pod(pod: Obj) -> TreeNode:
    """Return a pod with its node, and what keeps it from being ready."""
    metadata, status = pod["metadata"], pod.get("status", {})
    ready = has_condition(pod, "Ready")
    phase = "Ready" if ready else status.get("phase", "Pending")
    if metadata.get("deletionTimestamp"):
        phase = "Terminating"
    node = pod.get("spec", {}).get("nodeName")
    place = f"on node {node}" if node else "on no node yet"
    # A scheduling gate keeps a pod off the scheduler; QUEUE_GATE is that of the queue.
    gates = {gate["name"] for gate in pod.get("spec", {}).get("schedulingGates") or ()}
    if QUEUE_GATE in gates:
        return TreeNode(f"Pod {metadata['name']}  {phase}", ("waits in the queue",))
    texts = [] if ready else list(_describe_pod_troubles(status))
    return TreeNode(f"Pod {metadata['name']}  {phase}", (place, *texts))


def _describe_pod_troubles(status: Obj) -> Iterable[str]:
    """Yield why a pod is not scheduled, and what its containers wait for or how they ended."""
    for condition in status.get("conditions", []):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            yield f"{condition.get('reason', 'Unschedulable')}: {condition.get('message', '')}"
    for container in (*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])):
        name, state = container["name"], container.get("state", {})
        if waiting := state.get("waiting"):
            yield f"{name} waits: {waiting.get('reason', '')} {waiting.get('message', '')}"
        elif "running" in state and not container.get("ready"):
            yield f"{name} runs since {age_text(state['running'].get('startedAt'))}, and is not ready yet"
        # lastState: how the container ended before it was started again; of its message, the end says most.
        if ended := container.get("lastState", {}).get("terminated"):
            output = " ".join(ended.get("message", "").split())[-200:]
            yield f"{name} ended before with exit code {ended['exitCode']}{f': {output}' if output else ''}"


def _build_process(process: Obj, hosts: Mapping[str, Obj]) -> TreeNode:
    """Return the node of a MetalProcess, an engine on a host, with its progress and restarts; below it is its host."""
    # 1. Its phase.
    metadata, status = process["metadata"], process.get("status", {})
    # A process that is deleted stops first, which its own phase may not say yet.
    phase = "Stopping" if metadata.get("deletionTimestamp") and _phase(process) != "Stopped" else _phase(process)
    reason = f" ({status['reason']})" if status.get("reason") else ""

    # 2. The lines below it.
    texts = [str(status["message"])] if status.get("message") and phase != "Ready" else []
    progress = status.get("progress", {})
    if phase == "Fetching" and progress.get("totalBytes"):
        here, total = progress.get("bytes", 0), progress["totalBytes"]
        texts.append(f"downloaded {share_text(here, total)}")
    if restarts := status.get("restarts"):
        texts.append(f"its engine was restarted {restarts} time{'s' if restarts > 1 else ''}")

    # 3. Its host.
    host = process["spec"].get("hostName")
    if not host:
        texts.append("on no host yet")
    children = (_build_host(host, hosts.get(host)),) if host else ()
    return TreeNode(f"MetalProcess {metadata['name']}  {phase}{reason}", tuple(texts), children)


def _build_host(name: str, host: Obj | None) -> TreeNode:
    """Return a host with its state and free memory, and the conditions that explain why it does not serve."""
    if host is None:
        return TreeNode(f"MetalHost {name}")
    available = host.get("status", {}).get("available")
    troubles = [
        _describe_condition(condition)
        for condition in host.get("status", {}).get("conditions", [])
        if _is_trouble(condition)
    ]
    free = f", {available} free" if available else ""
    return TreeNode(f"MetalHost {name}  {describe_host_state(host)}{free}", tuple(troubles))


def _is_trouble(condition: Obj) -> bool:
    """Return whether a condition of a host explains why it does not serve, or why its drain does not end.

    Most conditions are good if True, such as Ready; MemoryPressure and Paused are good if False.
    """
    kind, status = condition["type"], condition["status"]
    if kind == "Drained":
        return bool(condition.get("reason") == "DrainBlocked")
    bad_status = "True" if kind in {"MemoryPressure", "Paused"} else "False"
    return bool(status == bad_status)


def describe_host_state(host: Obj) -> str:
    """Return the state of a host in one word, as kubectl states that of a node: Ready,Cordoned."""
    # Without the condition, or with a status of Unknown, nothing is known.
    ready = find_condition(host, "Ready").get("status", "Unknown")
    words = [{"True": "Ready", "False": "NotReady"}.get(ready, "Unknown")]
    spec = host.get("spec", {})
    if spec.get("drain"):
        words.append("Drained" if has_condition(host, "Drained") else "Draining")
    elif spec.get("unschedulable"):
        words.append("Cordoned")
    if find_condition(host, "Stable").get("status") == "False":
        words.append("Flapping")
    words += [kind for kind in ("Paused", "MemoryPressure") if has_condition(host, kind)]
    return ",".join(words)


def _render_node(node: TreeNode, head: str, indent: str, width: int) -> list[str]:
    """Return the lines of a node and of all below it; `head` begins the first line, `indent` the others."""
    lines = [head + escape_controls(" ".join(node.title.splitlines()))]
    # Texts of a node with children stand beside the line that leads down to these.
    below = indent + ("│  " if node.children else "   ")
    for text in node.texts:
        lines += [below + line for line in wrap_text(text, max(width - len(below), _LEAST_WIDTH))]
    for number, child in enumerate(node.children):
        is_last = number == len(node.children) - 1
        # The first is drawn before the child's own line, the second before all lines below it.
        child_head, child_indent = _LAST_BRANCH if is_last else _BRANCH
        lines += _render_node(child, indent + child_head, indent + child_indent, width)
    return lines
