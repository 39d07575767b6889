"""Service `chat` in a simulated cluster: its plans are executed in memory, and nodes with limited room run its pods.

A Deployment controller, a scheduler and a kubelet each take one step when a test says so. Copies of weights appear and
go as a test says.
"""

from collections import Counter
from datetime import timedelta
from typing import Any

from controller.models.served import weights_path
from controller.models.volume import WEIGHTS
from controller.pod_settings import DEFAULT_SETTINGS, PodSettings
from controller.reconcile.plan import FIELD_MANAGER, Plan
from controller.reconcile.stamp import needs_apply
from controller.reconcile.triggers import is_gated
from crds.meta import API_VERSION, LABEL_MODEL
from kube.client import Obj
from kube.resources import DEPLOYMENTS, INFERENCE_SERVICES, JOBS, MODELS, PODS, PVCS, Resource
from tests.support.api_objects import NAMESPACE, NOW, condition, model, service
from tests.support.service_decisions import decide_chat, kept_part
from tests.support.simulated_rollout import GATED

SOURCE = "http://models.example/tiny.gguf"
REFUSED: Obj = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no room"}
"""The condition of a pod for which no node has room."""
_OF_MODEL: Obj = {"apiVersion": API_VERSION, "kind": "Model", "name": "tiny", "uid": "uid-tiny", "controller": True}


class SimulatedPods:
    """The service, the copies of its Model, and its pods on nodes that have room for a number of them."""

    def __init__(self, rooms: dict[str, int], **spec: Any) -> None:
        self.rooms = dict(rooms)
        self.spec: Obj = {"replicas": 1, **spec}
        self.cache: Obj = {"scope": "node", "storageClassName": "local"}
        self.settings: PodSettings = DEFAULT_SETTINGS
        self.may_roll_out = True
        self.copies: list[Obj] = []
        self.coming: dict[str, Obj | None] = {}
        """The pod of the Job of each copy that is being made, by claim."""
        self.is_cached = True
        self.revision = "r1"
        self.deployments: dict[str, Obj] = {}
        self.pods: dict[str, Obj] = {}
        self.plan = Plan()
        self._made = 0

    def add_copy(self, node: str, revision: str = "r1") -> str:
        """Add a verified copy, and return the name of its claim."""
        name = f"tiny-cache-{node}-{revision}"
        self.coming.pop(name, None)
        path = weights_path(SOURCE, revision, "tiny.gguf")
        self.copies.append({"node": node, "name": name, "claim": f"uid-{name}", "path": path})
        return name

    def remove_copies(self, node: str, revision: str = "r1") -> None:
        """Remove a copy from the status of the Model."""
        self.copies = [copy for copy in self.copies if copy["name"] != f"tiny-cache-{node}-{revision}"]

    def make_copy(self, node: str, *, is_refused: bool = False) -> None:
        """Begin to make a copy for a node, with a pod that the scheduler may have refused."""
        metadata = {"name": f"fetch-{node}", "namespace": NAMESPACE, "uid": f"uid-fetch-{node}", "resourceVersion": "1"}
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": f"fetch-{node}", "uid": f"uid-job-{node}"}
        pod = {
            "metadata": metadata
            | {"ownerReferences": [owner | {"controller": True}], "creationTimestamp": ""}
            | {"labels": {LABEL_MODEL: "tiny"}},
            "spec": {},
            "status": {"conditions": [REFUSED] if is_refused else []},
        }
        self.coming[f"tiny-cache-{node}-{self.revision}"] = pod

    def list_objects(self) -> list[tuple[Resource, Obj]]:
        """Return all that the controller's store has."""
        status = {"copies": self.copies, "revision": self.revision}
        conditions = [condition("Ready", "True"), condition("Cached", str(self.is_cached), "Fetching")]
        tiny = model(status=status | {"conditions": conditions}, cache=self.cache)
        objects: list[tuple[Resource, Obj]] = [(INFERENCE_SERVICES, service(**self.spec)), (MODELS, tiny)]
        for name, pod in self.coming.items():
            owned = {"namespace": NAMESPACE, "resourceVersion": "1", "ownerReferences": [_OF_MODEL]}
            annotations = {WEIGHTS: weights_path(SOURCE, self.revision, "tiny.gguf")}
            claim = owned | {"name": name, "uid": f"uid-{name}", "annotations": annotations}
            volumes = [{"name": "models", "persistentVolumeClaim": {"claimName": name}}]
            objects.append((PVCS, {"metadata": claim, "spec": {}}))
            if pod is not None:
                job = owned | pod["metadata"]["ownerReferences"][0] | {"ownerReferences": [_OF_MODEL]}
                objects.append((JOBS, {"metadata": job, "spec": {"template": {"spec": {"volumes": volumes}}}}))
                objects.append((PODS, pod))
        objects += [(DEPLOYMENTS, deployment) for deployment in self.deployments.values()]
        return objects + [(PODS, each) for each in self.pods.values()]

    def decide(self) -> Plan:
        """Decide once, and execute the plan."""
        self.plan = decide_chat(*self.list_objects(), settings=self.settings, may_roll_out=self.may_roll_out)
        for resource, obj in self.plan.apply:
            if resource == DEPLOYMENTS:
                self._apply(obj)
        for patch in self.plan.patch:
            self.deployments[patch.ref.name]["spec"]["replicas"] = patch.operations[-1]["value"]
        for ref in self.plan.delete:
            if ref.resource == DEPLOYMENTS:
                del self.deployments[ref.name]
        return self.plan

    def _apply(self, obj: Obj) -> None:
        name = obj["metadata"]["name"]
        there = self.deployments.get(name)
        if there is not None and not needs_apply(DEPLOYMENTS, obj, kept_part(there)):
            return
        owned: Obj = {f"f:{field}": {} for field in obj["spec"]}
        metadata = obj["metadata"] | {
            "uid": there["metadata"]["uid"] if there else f"uid-{name}",
            "generation": there["metadata"]["generation"] + 1 if there else 1,
            "resourceVersion": "1",
            "managedFields": [{"manager": FIELD_MANAGER, "operation": "Apply", "fieldsV1": {"f:spec": owned}}],
        }
        self.deployments[name] = {**obj, "spec": dict(obj["spec"]), "metadata": metadata, "status": {}}

    def run_deployments(self) -> None:
        """Create and end pods as Deployments do that make no room for a new pod before an earlier one has ended."""
        for pod in self.pods.values():
            if pod["deployment"] not in self.deployments:
                _end_pod(pod)
        for name, obj in self.deployments.items():
            template, wanted = obj["spec"]["template"], obj["spec"]["replicas"]
            pods = [pod for pod in self.pods.values() if pod["deployment"] == name and not _is_ending(pod)]
            old = [pod for pod in pods if pod["template"] != template]
            if obj["spec"]["strategy"]["type"] == "Recreate":
                ended = old
            else:
                ended = old[:1] if all(map(_is_ready, pods)) else [pod for pod in old if not _is_ready(pod)]
            left = [pod for pod in pods if pod not in ended]
            surplus = max(0, len(left) - wanted)
            ended += sorted(left, key=lambda pod: ("nodeName" in pod["spec"], _is_ready(pod)))[:surplus]
            for pod in ended:
                _end_pod(pod)
            waits = obj["spec"]["strategy"]["type"] == "Recreate" and any(
                pod["deployment"] == name and pod["template"] != template for pod in self.pods.values()
            )
            for _ in range(0 if waits else wanted - len(left)):
                self._create_pod(obj)

    def _create_pod(self, deployment: Obj) -> None:
        self._made += 1
        name = f"{deployment['metadata']['name']}-{self._made}"
        template = deployment["spec"]["template"]
        metadata = {"name": name, "namespace": NAMESPACE, "uid": f"uid-{name}", "resourceVersion": "1"}
        own = {"deployment": deployment["metadata"]["name"], "template": template}
        gates = template["spec"].get("schedulingGates", [])
        self.pods[name] = own | {
            "metadata": metadata | {"labels": template["metadata"]["labels"], "creationTimestamp": NOW.isoformat()},
            "spec": {"schedulingGates": list(gates)} if gates else {},
            "status": {"conditions": [GATED] if gates else []},
        }

    def schedule(self) -> None:
        """Place the pods for which their node has room, and refuse the others; those with a gate wait."""
        for pod in self.pods.values():
            if "nodeName" in pod["spec"] or _is_ending(pod):
                continue
            used = self.count_pods()
            node = next((node for node in self._nodes_of(pod) if self.rooms.get(node, 0) > used[node]), None)
            scheduled = REFUSED
            if node is None and is_gated(pod):
                continue
            if node is not None:
                pod["spec"] = {"nodeName": node}
                scheduled = {"type": "PodScheduled", "status": "True"}
            pod["status"] = {"conditions": [scheduled]}

    def _nodes_of(self, pod: Obj) -> list[str]:
        affinity = pod["template"]["spec"].get("affinity", {})
        required = affinity.get("nodeAffinity", {}).get("requiredDuringSchedulingIgnoredDuringExecution")
        if required is None:
            return sorted(self.rooms)
        ((field,),) = [term["matchFields"] for term in required["nodeSelectorTerms"]]
        assert (field["key"], field["operator"]) == ("metadata.name", "In")
        return list(field["values"])

    def pass_queue_time(self) -> None:
        """Pass the time after which the queue has certainly looked at each pod that waits."""
        for pod in filter(is_gated, self.pods.values()):
            pod["metadata"]["creationTimestamp"] = (NOW - timedelta(minutes=1)).isoformat()

    def run_pods(self) -> None:
        """Make all pods ready that have a node, remove those that end, and report both."""
        self.pods = {name: pod for name, pod in self.pods.items() if not _is_ending(pod)}
        for pod in self.pods.values():
            if "nodeName" in pod["spec"]:
                pod["status"]["conditions"] = [
                    {"type": "PodScheduled", "status": "True"},
                    {"type": "Ready", "status": "True"},
                ]
        self.report()

    def report(self) -> None:
        """Write the status of the Deployments."""
        for name, obj in self.deployments.items():
            pods = [pod for pod in self.pods.values() if pod["deployment"] == name and not _is_ending(pod)]
            template = obj["spec"]["template"]
            obj["status"] = {
                "observedGeneration": obj["metadata"]["generation"],
                "replicas": len(pods),
                "updatedReplicas": sum(pod["template"] == template for pod in pods),
                "readyReplicas": sum(map(_is_ready, pods)),
            }

    def settle(self, least_ready: int = 0) -> Plan:
        """Run all controllers until nothing changes; at any time this number of pods is ready."""
        for _ in range(40):
            before = self._summary()
            steps = (self.decide, self.run_deployments, self.report, self.schedule, self.pass_queue_time)
            for work in (*steps, self.decide, self.run_pods):
                work()
                assert self.count_ready() >= least_ready, f"after {work.__name__}: {self._summary()}"
            if self._summary() == before:
                return self.plan
        raise AssertionError(f"does not end: {self._summary()}")

    def _summary(self) -> object:
        deployments = {
            name: (obj["spec"]["replicas"], obj["metadata"]["generation"]) for name, obj in self.deployments.items()
        }
        return deployments, repr({name: (pod["spec"], pod["status"]) for name, pod in self.pods.items()})

    def count_ready(self) -> int:
        return sum(_is_ready(pod) and not _is_ending(pod) for pod in self.pods.values())

    def count_pods(self) -> Counter[str]:
        """Return the number of pods on each node."""
        return Counter(pod["spec"]["nodeName"] for pod in self.pods.values() if "nodeName" in pod["spec"])

    def replicas_by_node(self) -> dict[str, int]:
        """Return the replicas that each Deployment asks for, by the node to which it is pinned; empty: to none."""
        replicas = {}
        for obj in self.deployments.values():
            affinity = obj["spec"]["template"]["spec"].get("affinity", {}).get("nodeAffinity", {})
            terms = affinity.get("requiredDuringSchedulingIgnoredDuringExecution", {}).get("nodeSelectorTerms", [{}])
            fields = terms[0].get("matchFields", [{"values": [""]}])
            replicas[fields[0]["values"][0]] = obj["spec"]["replicas"]
        return replicas


def _end_pod(pod: Obj) -> None:
    pod["metadata"]["deletionTimestamp"] = (NOW + timedelta(seconds=30)).isoformat()


def _is_ending(pod: Obj) -> bool:
    return "deletionTimestamp" in pod["metadata"]


def _is_ready(pod: Obj) -> bool:
    return any(
        (condition["type"], condition["status"]) == ("Ready", "True") for condition in pod["status"]["conditions"]
    )
