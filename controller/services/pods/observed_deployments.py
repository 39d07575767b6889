"""The Deployments of a service as they are, each with its pods: what is ready, what has no node, and why.

A service has one Deployment, or one for each copy of its Model's weights beside which it runs.
"""

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Final, NamedTuple

from controller.reconcile.conditions import has_condition
from controller.reconcile.indexes import SERVICE_INDEX, namespaced
from controller.reconcile.plan import Patch, Snapshot, ref
from controller.reconcile.stamp import is_desired
from controller.reconcile.triggers import ENDED, end_of_pod, is_scheduled, lacks_room, queue_seconds
from controller.services import diagnosis
from controller.services.pods.copy_choice import CopyPods
from controller.services.preconditions import ServiceProblem
from crds.inferenceservice import InferenceService
from crds.meta import LABEL_ACCELERATOR, LABEL_COPY
from kube.client import Obj
from kube.resources import DEPLOYMENTS, PODS

_RELEASE_SECONDS: Final = 1.0
"""Time after which a pod that should have ended is seen to have ended, or to stay."""


class ServicePods(NamedTuple):
    """The pods of a service that are not being deleted, and the nodes on which others are being deleted."""

    pods: Sequence[Obj]
    leaving: frozenset[str] = frozenset()
    """Nodes that will have room soon: a pod of the service ends there."""
    leaves_by: datetime | None = None
    """When the last of them has to have ended; a pod that stays for longer gives no room."""
    ending: int = 0
    """Pods that end there, and make room for as many."""
    without_room: frozenset[str] = frozenset()
    """The uids of pods for which the scheduler found no room, or which the queue lets wait."""
    queue_seconds: float | None = None
    """Time after which the next pod counts as one that the queue lets wait."""

    @property
    def total(self) -> int:
        """Replicas that exist: a pod at which no scheduler has looked is none yet."""
        # Counted by the pods: the Deployment's own number follows seconds later when its controller has much to do.
        return sum(is_scheduled(pod) and not _has_ended(pod) for pod in self.pods)

    @property
    def ready(self) -> int:
        """Ready pods of any template."""
        return sum(map(is_ready, self.pods))

    @property
    def refused(self) -> int:
        """Pods without room."""
        return len(self.without_room)

    def refusal_seconds(self, now: datetime) -> float | None:
        """Return the time after which a refusal is final, although no watch reports a change.

        None: no pod is refused, or none that ends can still make room.
        """
        if not self.refused or self.leaves_by is None:
            return None
        return (self.leaves_by - now).total_seconds() + _RELEASE_SECONDS

    @property
    def nodes(self) -> frozenset[str]:
        """Nodes that have one of the pods."""
        return frozenset(node for pod in self.pods if (node := node_of(pod)))


class ObservedDeployment(NamedTuple):
    """A Deployment of a service, and its pods that are not being deleted."""

    obj: Obj
    pods: Sequence[Obj]
    without_room: frozenset[str] = frozenset()
    """The uids of those of the service's pods that have no room."""

    @property
    def name(self) -> str:
        """Its name."""
        name: str = self.obj["metadata"]["name"]
        return name

    @property
    def replicas(self) -> int:
        """Pods that it asks for."""
        replicas: int = self.obj["spec"].get("replicas", 1)
        return replicas

    @property
    def nodes(self) -> frozenset[str]:
        """Nodes that have one of its pods."""
        return frozenset(node for pod in self.pods if (node := node_of(pod)))

    def list_placed(self) -> list[Obj]:
        """Return its pods that have a node and have not ended."""
        return [pod for pod in self.pods if node_of(pod) and not _has_ended(pod)]

    def count_pods(self, node: str = "", leaving: frozenset[str] = frozenset()) -> CopyPods:
        """Return the numbers of its pods by their state; refusals do not count on a node that is about to have room."""
        placed = self.list_placed()
        refused = 0 if node in leaving else sum(pod["metadata"]["uid"] in self.without_room for pod in self.pods)
        return CopyPods(replicas=self.replicas, placed=len(placed), ready=sum(map(is_ready, placed)), refused=refused)

    def list_current(self, desired: Obj | None) -> list[str]:
        """Return as many uids of ready pods as certainly have the template of `desired`, or (None) of the Deployment.

        Which pods those are is not known: only their number counts.
        """
        ready_uids = sorted(pod["metadata"]["uid"] for pod in self.pods if is_ready(pod))
        current = _count_current_ready(self.obj, desired, len(ready_uids))
        return ready_uids[-current:] if current else []

    def list_problems(self) -> list[ServiceProblem | None]:
        """Return why pods of it are not ready, or cannot be created."""
        memory = _list_memory(self.obj)
        unready = (pod for pod in self.pods if not is_ready(pod))
        return [diagnosis.diagnose_deployment(self.obj), *(diagnosis.diagnose_pod(pod, memory) for pod in unready)]

    def scale(self, wanted: int, *, may_grow: bool) -> tuple[Patch, ...]:
        """Return the patch that changes the number of its pods alone; none if that is right, or may not grow."""
        if self.replicas == wanted or (self.replicas < wanted and not may_grow):
            return ()
        operations = (
            {"op": "test", "path": "/metadata/uid", "value": self.obj["metadata"]["uid"]},
            {"op": "replace", "path": "/spec/replicas", "value": wanted},
        )
        return (Patch(ref(DEPLOYMENTS, self.obj), operations),)


def list_service_pods(snapshot: Snapshot, service: InferenceService, label: str | None = None) -> ServicePods:
    """Return the pods of a service that are not being deleted, and where others are about to leave room.

    With a `label`, only pods with this value of LABEL_ACCELERATOR count; "" stands for pods without the label.
    """
    # 1. Those that stay, and of those that are being deleted the node, the number, and the time by which they end.
    named = namespaced(service.metadata.namespace, service.metadata.name)
    pods, leaving, leaves_by, ending = [], set(), None, 0
    for pod in snapshot.store.by_index(PODS, SERVICE_INDEX, named):
        if label is not None and accelerator_label(pod) != label:
            continue
        if "deletionTimestamp" not in pod["metadata"]:
            pods.append(pod)
        # A pod that is being deleted makes room when it ends; end_of_pod gives no time if it never will.
        elif (node := node_of(pod)) and (due := end_of_pod(pod, snapshot.now)) is not None:
            leaving.add(node)
            ending += 1
            leaves_by = due if leaves_by is None else max(leaves_by, due)  # the last of them

    # 2. The pods without room: the scheduler has refused them, or the queue has let them wait for long.
    without_room = frozenset(pod["metadata"]["uid"] for pod in pods if lacks_room(pod, snapshot.now))
    # The time until the queue has let the next one wait for long.
    waits = (queue_seconds(pod, snapshot.now) for pod in pods)
    next_seconds = min((seconds for seconds in waits if seconds is not None), default=None)

    return ServicePods(pods, frozenset(leaving), leaves_by, ending, without_room, queue_seconds=next_seconds)


def list_deployments(deployments: Iterable[Obj], pods: ServicePods) -> list[ObservedDeployment]:
    """Return each of these Deployments of a service with those of `pods` that have its labels."""
    by_selector: dict[tuple[str, str], list[Obj]] = {}
    for pod in pods.pods:
        by_selector.setdefault(_selector_of(pod), []).append(pod)
    return [
        ObservedDeployment(deployment, by_selector.get(_selector_of(deployment), []), pods.without_room)
        for deployment in deployments
    ]


def _selector_of(obj: Obj) -> tuple[str, str]:
    """Return the labels that pods share with their Deployment: the accelerator, and the claim of a copy, if any."""
    copy: str = (obj["metadata"].get("labels") or {}).get(LABEL_COPY, "")
    return accelerator_label(obj), copy


def accelerator_label(obj: Obj) -> str:
    """Return the accelerator in the labels of a Deployment or pod; empty if there is none."""
    label: str = (obj["metadata"].get("labels") or {}).get(LABEL_ACCELERATOR, "")
    return label


def node_of(pod: Obj) -> str:
    """Return the node of a pod; empty if it has none yet."""
    node: str = pod.get("spec", {}).get("nodeName") or ""
    return node


def _has_ended(pod: Obj) -> bool:
    return pod["status"].get("phase") in ENDED


def is_ready(pod: Obj) -> bool:
    """Return whether a pod is ready."""
    return has_condition(pod, "Ready")


def _count_current_ready(observed: Obj, desired: Obj | None, ready: int) -> int:
    """Return how many of `ready` pods have the `desired` template for certain; None: that which the Deployment has.

    0 if the Deployment is not as desired, or if its controller has not seen its latest change: then its numbers say
    nothing about the template.
    """
    status = observed.get("status", {})
    applied = desired is None or is_desired(desired, observed)
    if not applied or status.get("observedGeneration") != observed["metadata"]["generation"]:
        return 0

    # The pods of earlier templates: in the worst case, all of them are among the ready ones.
    earlier: int = status.get("replicas", 0) - status.get("updatedReplicas", 0)
    reported: int = status.get("readyReplicas", 0)
    return max(0, min(ready, reported) - earlier)


def _list_memory(observed: Obj) -> dict[str, str]:
    """Return the memory that each container of a pod may use, by name: its limit, else its request, else empty."""
    pod = observed["spec"]["template"]["spec"]
    # The engine is a sidecar of the proxy.
    return {
        container["name"]: _memory_of(container.get("resources", {}))
        for container in (*pod.get("initContainers", ()), *pod["containers"])
    }


def _memory_of(resources: Obj) -> str:
    stated: str = resources.get("limits", {}).get("memory") or resources.get("requests", {}).get("memory") or ""
    return stated
