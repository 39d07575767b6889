"""Service `chat` in a simulated cluster whose Deployment controller replaces pods as Kubernetes' `rolling.go` does.

Controller, Deployment controller, ReplicaSet controller, queue, scheduler and kubelet each take one step when a test
says so. The controller decides only after a change that triggers it. A pod that ends makes room for a refused one at
once.
"""

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import msgspec

from controller.reconcile.plan import Plan
from controller.reconcile.stamp import needs_apply
from controller.reconcile.triggers import everything, is_gated, scheduled_pod
from crds.meta import LABEL_SERVICE, NOMINATED
from kube.client import Obj
from kube.resources import DEPLOYMENTS, INFERENCE_SERVICES, MODELS, NODES, PODS, Resource
from tests.support.api_objects import NAMESPACE, NOW, model, service
from tests.support.service_decisions import decide_chat, kept_part, manage

DEVICE = "nvidia.com/gpu"
_READY: Obj = {"type": "Ready", "status": "True"}
GATED: Obj = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}
"""The condition of a pod that waits for the queue."""
_PLACED: Obj = {"type": "PodScheduled", "status": "True"}


class SimulatedReplicaSet:
    """The pods of one template."""

    def __init__(self, template: Obj, name: str) -> None:
        self.template = template
        self.name = name
        self.replicas = 0
        self.annotated = (0, 0)
        """Replicas of the Deployment, and the most that it allowed, when this was scaled last."""
        self.available = 0
        self.present = 0
        self.failure = ""

    def scale(self, replicas: int, deployment: Obj) -> None:
        """Scale it, and note for which size of the Deployment."""
        self.replicas = replicas
        self.annotated = (deployment["spec"]["replicas"], deployment["spec"]["replicas"] + _count_surge(deployment))


class SimulatedRollout:
    """The service, its Deployment, and pods on nodes that have a number of devices; a quota may allow fewer."""

    def __init__(self, rooms: dict[str, int], quota: int | None = None, **spec: Any) -> None:
        self.rooms = rooms
        self.quota = quota
        self.spec: Obj = {"hardware": {"accelerator": "nvidia"}, "parallel": 1, **spec}
        self.deployment: Obj | None = None
        self.sets: dict[str, SimulatedReplicaSet] = {}
        self.pods: dict[str, Obj] = {}
        self.broken: set[int] = set()
        """Context lengths with which no pod becomes ready."""
        self.stuck: set[str] = set()
        """Nodes on which no pod ends."""
        self.has_rival = False
        """True if another service takes each room that the queue has promised to none of these pods."""
        self.writes = 0
        """Times that the Deployment was applied."""
        self._again = False
        self._seen: object = None
        self._made = 0

    @property
    def replicas(self) -> int:
        """Replicas that are wanted."""
        wanted: int = self.spec["replicas"]
        return wanted

    def list_objects(self) -> list[tuple[Resource, Obj]]:
        """Return all that the controller's store has."""
        # Pods of a ReadWriteOnce volume would run on one node.
        tiny = model(cache={"accessMode": "ReadWriteMany"})
        objects: list[tuple[Resource, Obj]] = [(INFERENCE_SERVICES, service(**self.spec)), (MODELS, tiny)]
        for name, room in self.rooms.items():
            metadata = {"name": name, "uid": name, "resourceVersion": "1", "labels": {}}
            objects.append((NODES, {"metadata": metadata, "status": {"allocatable": {DEVICE: str(room)}}}))
        if self.deployment is not None:
            objects.append((DEPLOYMENTS, self.deployment))
        return objects + [(PODS, pod) for pod in self.pods.values()]

    def decide(self) -> None:
        """Decide and execute the plan, if anything has changed of what triggers a decision."""
        pods = [scheduled_pod(pod) for pod in self.pods.values()]
        parts = [everything(kept_part(self.deployment))] if self.deployment is not None else [], pods
        seen = _encode((self.spec, parts))
        if seen != self._seen:
            self._seen = seen
            self._execute(_decide(self.list_objects()))

    def _execute(self, plan: Plan) -> None:
        self._again = plan.again_seconds is not None
        for _resource, obj in (applied for applied in plan.apply if applied[0] == DEPLOYMENTS):
            there = self.deployment
            if there is None or needs_apply(DEPLOYMENTS, obj, kept_part(there)):
                self.writes += 1
                generation = there["metadata"]["generation"] + 1 if there is not None else 1
                status = there["status"] if there is not None else {}
                self.deployment = json.loads(json.dumps(manage(obj, generation) | {"status": status}))

    def sync_deployment(self) -> None:
        """Take one step of the Deployment controller, and report."""
        deployment = self.deployment
        if deployment is None:
            return
        name = _encode(deployment["spec"]["template"])
        new, old = self.sets.get(name), [replica_set for key, replica_set in self.sets.items() if key != name]
        active = [replica_set for replica_set in self.sets.values() if replica_set.replicas]
        if any(replica_set.annotated[0] != deployment["spec"]["replicas"] for replica_set in active):
            _scale(deployment, new, old)
        else:
            if new is None:
                new = self.sets[name] = SimulatedReplicaSet(deployment["spec"]["template"], f"set-{len(self.sets)}")
            if not _scale_new(deployment, new, old):
                _scale_old(deployment, new, old)
        self._report(deployment, new)

    def _report(self, deployment: Obj, new: SimulatedReplicaSet | None) -> None:
        failures = [
            replica_set.failure for replica_set in (*([new] if new else ()), *self.sets.values()) if replica_set.failure
        ]
        failed: Obj = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate"}
        failed["message"] = "".join(failures[:1])
        deployment["status"] = {
            "observedGeneration": deployment["metadata"]["generation"],
            "replicas": sum(replica_set.present for replica_set in self.sets.values()),
            "updatedReplicas": new.present if new is not None else 0,
            "readyReplicas": sum(replica_set.available for replica_set in self.sets.values()),
            "conditions": [failed] if failures else [],
        }

    def sync_sets(self) -> None:
        """Create and end pods as the ReplicaSets ask, and report."""
        for replica_set in self.sets.values():
            pods = [pod for pod in self.pods.values() if pod["set"] == replica_set.name and not is_ending(pod)]
            pods.sort(key=lambda pod: ("nodeName" in pod["spec"], is_ready(pod)))
            for pod in pods[: max(0, len(pods) - replica_set.replicas)]:
                if "nodeName" in pod["spec"]:
                    pod["metadata"]["deletionTimestamp"] = (NOW + timedelta(seconds=30)).isoformat()
                else:
                    del self.pods[pod["metadata"]["name"]]
            replica_set.failure = ""
            for _ in range(replica_set.replicas - len(pods)):
                self._create_pod(replica_set)
            left = [pod for pod in self.pods.values() if pod["set"] == replica_set.name and not is_ending(pod)]
            replica_set.present, replica_set.available = len(left), sum(map(is_ready, left))

    def _create_pod(self, owner: SimulatedReplicaSet) -> None:
        devices = _count_devices(owner.template["spec"])
        used = sum(_count_devices(pod["spec"]) for pod in self.pods.values())
        if self.quota is not None and used + devices > self.quota:
            owner.failure = (
                f'pods "chat-x" is forbidden: exceeded quota: devices, requested: requests.{DEVICE}={devices}, '
                f"used: requests.{DEVICE}={used}, limited: requests.{DEVICE}={self.quota}"
            )
            return
        self._made += 1
        name = f"chat-{self._made}"
        labels = {LABEL_SERVICE: "chat", "pod-template-hash": owner.name}
        metadata = {"name": name, "namespace": NAMESPACE, "uid": f"uid-{name}", "resourceVersion": "1"}
        spec = json.loads(json.dumps(owner.template["spec"]))
        pod = {"metadata": metadata | {"labels": labels}, "spec": spec, "status": {"conditions": []}}
        if is_gated(pod):
            pod["status"]["conditions"].append(GATED)
        self.pods[name] = pod | {"set": owner.name}

    def admit(self) -> None:
        """Give the pods that wait for the queue a node, or nominate them for the place of an earlier pod."""
        for pod in filter(is_gated, self.pods.values()):
            promised_node = pod.pop("promised", "")
            pod["metadata"].pop("annotations", None)
            node = self._find_room(pod)
            if node is not None and not (self.has_rival and node != promised_node):
                pod["spec"]["schedulingGates"] = []
                pod["pinned"] = node
        if self.has_rival:
            self.rooms = {node: room - self._count_free(node) for node, room in self.rooms.items()}
        promised: set[str] = set()
        for pod in filter(is_gated, self.pods.values()):
            for earlier in self.pods.values():
                name = earlier["metadata"]["uid"]
                if earlier["set"] != pod["set"] and "nodeName" in earlier["spec"] and name not in promised:
                    promised.add(name)
                    pod["promised"] = earlier["spec"]["nodeName"]
                    nomination = {"cells": [f"node/{earlier['spec']['nodeName']}"], "victims": [name]}
                    pod["metadata"]["annotations"] = {NOMINATED: json.dumps(nomination)}
                    break

    def _find_room(self, pod: Obj) -> str | None:
        return next((room for room in self.rooms if self._count_free(room) >= _count_devices(pod["spec"])), None)

    def schedule(self) -> None:
        """Place the pods for which a node has room, and refuse the others; those with a gate wait."""
        for pod in self.pods.values():
            if "nodeName" in pod["spec"] or is_gated(pod):
                continue
            node = pod.pop("pinned", None) or self._find_room(pod)
            if node is not None:
                pod["spec"]["nodeName"] = node
                pod["status"]["conditions"] = [_PLACED]
            else:
                count = len(self.rooms)
                message = f"0/{count} nodes are available: {count} Insufficient {DEVICE}."
                refused = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
                pod["status"]["conditions"] = [refused]

    def _count_free(self, node: str) -> int:
        there = (pod for pod in self.pods.values() if node in {pod["spec"].get("nodeName"), pod.get("pinned")})
        return self.rooms[node] - sum(_count_devices(pod["spec"]) for pod in there)

    def start_pod(self) -> None:
        """Make the first pod ready that has a node, and is not."""
        for pod in self.pods.values():
            is_broken = self.read_context(pod) in self.broken
            if "nodeName" in pod["spec"] and not is_ready(pod) and not is_ending(pod) and not is_broken:
                pod["status"]["conditions"] = [_PLACED, _READY]
                return

    def end_pod(self) -> None:
        """Remove the first pod that is ending, and place pods in its room."""
        for name, pod in self.pods.items():
            if is_ending(pod) and pod["spec"]["nodeName"] not in self.stuck:
                del self.pods[name]
                self.schedule()  # nothing else does, if the pods have no gate
                return

    def pass_time(self) -> None:
        """Pass the time in which pods must have ended; the controller looks again if it asked for that."""
        for pod in self.pods.values():
            if is_ending(pod):
                pod["metadata"]["deletionTimestamp"] = (NOW - timedelta(seconds=1)).isoformat()
        if self._again:
            self._seen = None

    def read_context(self, pod: Obj) -> int:
        """Return the context length with which a pod was made."""
        arguments = pod["spec"]["initContainers"][0]["args"]
        return int(arguments[arguments.index("-c") + 1])

    def list_ready(self) -> list[Obj]:
        """Return the pods that serve."""
        return [pod for pod in self.pods.values() if is_ready(pod) and not is_ending(pod)]

    def summarize(self) -> str:
        """Return all that changes."""
        return _encode((self.deployment, [vars(replica_set) for replica_set in self.sets.values()], self.pods))


def _encode(value: Any) -> str:
    return msgspec.json.encode(value, order="sorted").decode()


_DECISIONS: dict[str, Plan] = {}


def _decide(objects: Sequence[tuple[Resource, Obj]]) -> Plan:
    """Decide about these objects, once: of all states of the clusters of a test, half come again and again."""
    asked = _encode([(resource.kind, obj) for resource, obj in objects])
    if asked not in _DECISIONS:
        _DECISIONS[asked] = decide_chat(*objects)
    return _DECISIONS[asked]


def _scale_new(deployment: Obj, new: SimulatedReplicaSet, old: list[SimulatedReplicaSet]) -> bool:
    """Scale the newest ReplicaSet as `reconcileNewReplicaSet` does, and return whether that changed it."""
    wanted = deployment["spec"]["replicas"]
    room = wanted + _count_surge(deployment) - new.replicas - sum(replica_set.replicas for replica_set in old)
    replicas = min(wanted, new.replicas + max(0, room))
    if replicas == new.replicas:
        return False
    new.scale(replicas, deployment)
    return True


def _scale_old(deployment: Obj, new: SimulatedReplicaSet, old: list[SimulatedReplicaSet]) -> None:
    """Scale earlier ReplicaSets as `reconcileOldReplicaSets` does: at first what is not available."""
    wanted = deployment["spec"]["replicas"]
    least = wanted - min(wanted, deployment["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"])
    total = new.replicas + sum(replica_set.replicas for replica_set in old)
    most = total - least - (new.replicas - new.available)
    if most <= 0 or not any(replica_set.replicas for replica_set in old):
        return
    for replica_set in old:
        unhealthy = min(most, replica_set.replicas - replica_set.available)
        if unhealthy < 0:
            return  # it was scaled a moment ago, and has not reported since
        if unhealthy:
            replica_set.scale(replica_set.replicas - unhealthy, deployment)
            most -= unhealthy
    surplus = new.available + sum(replica_set.available for replica_set in old) - least
    for replica_set in old:
        ended = max(0, min(replica_set.replicas, surplus))
        if ended:
            replica_set.scale(replica_set.replicas - ended, deployment)
            surplus -= ended


def _scale(deployment: Obj, new: SimulatedReplicaSet | None, old: list[SimulatedReplicaSet]) -> None:
    """Scale the ReplicaSets in proportion, as `scale` does after a change of the number of replicas."""
    wanted, every = deployment["spec"]["replicas"], [*([new] if new else ()), *reversed(old)]
    active = [replica_set for replica_set in every if replica_set.replicas]
    if len(active) == 1:
        active[0].scale(wanted, deployment)
        return
    if new is not None and new.replicas == new.available == wanted == new.annotated[0]:
        for replica_set in old:
            replica_set.scale(0, deployment)
        return
    most = wanted + _count_surge(deployment)
    missing = most - sum(replica_set.replicas for replica_set in active)
    active.sort(key=lambda replica_set: -replica_set.replicas)
    sizes, added = [], 0
    for replica_set in active:
        fraction = int(replica_set.replicas * most / replica_set.annotated[1] + 0.5) - replica_set.replicas
        part = min(fraction, missing - added) if missing > 0 else max(fraction, missing - added)
        sizes.append(replica_set.replicas + (part if missing else 0))
        added += part if missing else 0
    sizes[0] = max(0, sizes[0] + missing - added)
    for replica_set, size in zip(active, sizes, strict=True):
        replica_set.scale(size, deployment)


def _count_surge(deployment: Obj) -> int:
    surge: int = deployment["spec"]["strategy"]["rollingUpdate"]["maxSurge"]
    return surge


def _count_devices(pod_spec: Obj) -> int:
    containers = (*pod_spec.get("initContainers", ()), *pod_spec["containers"])
    return sum(int(container.get("resources", {}).get("requests", {}).get(DEVICE, 0)) for container in containers)


def is_ending(pod: Obj) -> bool:
    """Return whether a pod is being deleted."""
    return "deletionTimestamp" in pod["metadata"]


def is_ready(pod: Obj) -> bool:
    """Return whether a pod is ready."""
    return _READY in pod["status"]["conditions"]
