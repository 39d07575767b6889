"""Models with copies on nodes, in a simulated cluster: a store that plans change, and a scheduler for Jobs."""

import itertools
import json
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Final

import msgspec

from controller.models.jobs import Reservation
from controller.models.observation import ModelInputs
from controller.models.reconciler import model_reconciler
from controller.pod_settings import PodSettings
from controller.reconcile.conditions import find
from controller.reconcile.indexes import declare_indexes
from controller.reconcile.partial_objects import declare_partial_objects
from controller.reconcile.plan import Plan, Snapshot
from crds.cache import NodeCopy
from crds.inferenceservice import InferenceService
from crds.meta import LABEL_SERVICE, Condition
from crds.model import Model
from kube.client import Obj
from kube.resources import DEPLOYMENTS, INFERENCE_SERVICES, JOBS, MODELS, NODES, PODS, PVCS, ObjectKey, Resource
from kube.store import Store
from tests.support.simulated_model import INSPECTED, START

NAMESPACE: Final = "team"
SLOT: Final = "example.com/slot"
"""The resource of which a replica asks for one."""
_SELECTED: Final = "volume.kubernetes.io/selected-node"
_REQUIRED: Final = "requiredDuringSchedulingIgnoredDuringExecution"


class SimulatedCopies:
    """A store of objects, which plans of the Models' reconciler change.

    Args:
        nodes: the slots of each node.
        node_cache_bytes: the administrator's limit.
    """

    def __init__(self, nodes: dict[str, int], node_cache_bytes: int | None = None) -> None:
        self.settings = PodSettings("pomona:test", node_cache_bytes=node_cache_bytes)
        self.store = Store()
        declare_indexes(self.store)
        declare_partial_objects(self.store)
        self.now = START
        self.slots = dict(nodes)
        self.binds_immediately = False
        self.names_nodes = True
        """False: volumes that were made before, of whose claims only the pods know the node."""
        self.plans: list[Plan] = []
        """All plans with any write but that of the status."""
        self._numbers = itertools.count(1)
        self._job_specs: dict[str, Obj] = {}
        """The store keeps less of them."""
        self._reconciler = model_reconciler(self.settings, lambda _service, _served: Reservation({SLOT: "1"}))
        for node in nodes:
            self.put(NODES, node, namespace="")

    def put(self, resource: Resource, name: str, *, namespace: str = NAMESPACE, **body: Any) -> Obj:
        """Create or replace an object."""
        previous = self.store.get(resource, name, namespace)
        number = next(self._numbers)
        metadata = {
            "name": name,
            "namespace": namespace,
            "uid": previous["metadata"]["uid"] if previous else f"uid-{number}",
            "creationTimestamp": previous["metadata"]["creationTimestamp"] if previous else self.now.isoformat(),
            "generation": 1,
        }
        stored: Obj = json.loads(json.dumps(body))
        stored["metadata"] = metadata | stored.get("metadata", {}) | {"resourceVersion": str(number)}
        self.store.put(resource, stored)
        return stored

    def remove(self, resource: Resource, name: str) -> None:
        """Remove an object."""
        assert self.store.remove(resource, "" if resource == NODES else NAMESPACE, name)

    def make_model(
        self,
        name: str = "tiny",
        source: str = "http://models.example/tiny.gguf",
        *,
        answer: Obj = INSPECTED,
        **cache: Any,
    ) -> None:
        """Create a Model with copies on nodes, which is inspected already."""
        cache = {"scope": "node", "storageClassName": "local", **cache}
        self.put(MODELS, name, spec={"source": source, "cache": cache})
        self.settle()
        (job,) = self.jobs("inspect", name)
        self.end(job, 0, answer)
        self.settle()

    def make_service(self, name: str = "chat", model: str = "tiny", **spec: Any) -> None:
        """Create or edit a service that runs in pods."""
        self.put(INFERENCE_SERVICES, name, spec={"modelRef": model, "hardware": {"accelerator": "cpu"}, **spec})
        self.settle()

    def edit_model(self, name: str = "tiny", **spec: Any) -> None:
        """Edit the spec of a Model."""
        model = self.store.get(MODELS, name, NAMESPACE)
        assert model is not None
        generation = model["metadata"]["generation"] + 1
        self.put(MODELS, name, metadata={"generation": generation}, spec=model["spec"] | spec, status=model["status"])
        self.settle()

    def model(self, name: str = "tiny") -> Model:
        return msgspec.convert(self.store.get(MODELS, name, NAMESPACE), Model)

    def copies(self, name: str = "tiny") -> list[NodeCopy]:
        return self.model(name).status.copies

    def nodes_of(self, name: str = "tiny") -> list[str]:
        """Return the nodes of the copies that the status has."""
        return [copy.node for copy in self.copies(name)]

    def condition(self, kind: str, name: str = "tiny") -> Condition:
        found = find(self.model(name).status.conditions, kind)
        assert found is not None, kind
        return found

    def claims(self, name: str = "tiny") -> dict[str, Obj]:
        return {claim["metadata"]["name"]: claim for claim in self._children(PVCS, name)}

    def jobs(self, verb: str, name: str = "tiny") -> list[Obj]:
        return [self._whole(job) for job in self._children(JOBS, name) if f"-{verb}-" in job["metadata"]["name"]]

    def _whole(self, job: Obj) -> Obj:
        return {**job, "spec": self._job_specs[job["metadata"]["name"]]}

    def pending(self, name: str = "tiny") -> list[Obj]:
        """Return the fetch Jobs that have not ended."""
        return [job for job in self.jobs("fetch", name) if not job.get("status")]

    def _children(self, resource: Resource, model: str) -> list[Obj]:
        uid = self.model(model).metadata.uid
        children = self.store.by_index(resource, "owner", f"{NAMESPACE}/{uid}")
        return sorted(children, key=lambda child: int(child["metadata"]["uid"].partition("-")[2]))

    def step(self, name: str) -> Plan:
        """Decide about a Model once, and execute the plan."""
        key = ObjectKey(NAMESPACE, name)
        inputs = ModelInputs(classes={"local": {}} if self.binds_immediately else {})
        plan = self._reconciler.decide(Snapshot(self.store, self.now, inputs), key)
        if plan.create or plan.patch or plan.delete:
            self.plans.append(plan)
        for resource, obj in plan.create:
            created = obj["metadata"]["name"]
            assert self.store.get(resource, created, NAMESPACE) is None, f"{created} exists"
            if resource == JOBS:
                self._job_specs[created] = obj["spec"]
            self.put(resource, created, **obj)
        for patch in plan.patch:
            self._patch(patch.ref.resource, patch.ref.name, patch.operations)
        for ref in plan.delete:
            observed = self.store.get(ref.resource, ref.name, ref.namespace)
            assert observed is not None
            assert observed["metadata"]["uid"] == ref.uid
            self.remove(ref.resource, ref.name)
            if ref.resource == JOBS:
                for pod in self.store.by_index(PODS, "owner", f"{NAMESPACE}/{ref.uid}"):
                    self.remove(PODS, pod["metadata"]["name"])
        model = self.store.get(MODELS, name, NAMESPACE)
        assert model is not None
        status = json.loads(json.dumps(plan.status))
        for condition in status["conditions"]:
            condition.setdefault("lastTransitionTime", "2026-11-21T12:00:00Z")
        if status != model.get("status"):
            self.put(MODELS, name, **{**model, "status": status})
        return plan

    def _patch(self, resource: Resource, name: str, operations: Any) -> None:
        patched = json.loads(json.dumps(self.store.get(resource, name, NAMESPACE)))
        for operation in operations:
            *folders, field = (
                part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/") if part
            )
            place = patched
            for folder in folders:
                place = place[folder]
            if operation["op"] == "test":
                assert place[field] == operation["value"]
            else:
                place[field] = operation["value"]
        self.put(resource, name, **patched)

    def settle(self) -> None:
        """Decide about all Models until nothing changes; the result must be stable."""
        for _ in range(30):
            before = self.store.revision
            for model in self.store.list(MODELS):
                self.step(model["metadata"]["name"])
            if self.store.revision == before:
                return
        raise AssertionError("does not settle")

    def schedule(self) -> None:
        """Give each pending Job a pod, and a node if one has a free slot and fulfils the Job's affinity."""
        for job in list(self.store.list(JOBS)):
            if "-fetch-" in job["metadata"]["name"] and not job.get("status"):
                self._schedule(self._whole(job))
        self.settle()

    def _schedule(self, job: Obj) -> None:
        template = job["spec"]["template"]["spec"]
        (claim,) = (volume["persistentVolumeClaim"]["claimName"] for volume in template["volumes"])
        requested = int(template["containers"][0]["resources"]["requests"].get(SLOT, 0))
        pod = f"{job['metadata']['name']}-pod"
        observed = self.store.get(PODS, pod, NAMESPACE)
        if observed is not None and observed["spec"].get("nodeName"):
            return
        node = next((name for name in self._fitting(template, requested)), None)
        if observed is not None and node is None:
            return
        self._put_pod(pod, job, claim, node, slots=requested)
        if node is not None and self.names_nodes:
            annotations = {**self.claims_by_name(claim)["metadata"]["annotations"], _SELECTED: node}
            current = self.claims_by_name(claim)
            self.put(PVCS, claim, **{**current, "metadata": {**current["metadata"], "annotations": annotations}})

    def bind(self) -> None:
        """Make the volumes of all claims whose node is known."""
        for claim in list(self.store.list(PVCS)):
            if _SELECTED in claim["metadata"]["annotations"]:
                self.put(PVCS, claim["metadata"]["name"], **{**claim, "status": {"phase": "Bound"}})
        self.settle()

    def claims_by_name(self, claim: str) -> Obj:
        observed = self.store.get(PVCS, claim, NAMESPACE)
        assert observed is not None
        return observed

    def _put_pod(self, name: str, job: Obj, claim: str, node: str | None, *, slots: int) -> None:
        owner = {"apiVersion": "batch/v1", "kind": "Job", "controller": True}
        owner |= {"name": job["metadata"]["name"], "uid": job["metadata"]["uid"]}
        reason = {"reason": "Unschedulable", "message": "no node has a free slot"}
        scheduled = {"type": "PodScheduled", "status": "True"} if node else {"status": "False", **reason}
        spec: Obj = {"volumes": [{"persistentVolumeClaim": {"claimName": claim}}]}
        if node:
            spec["nodeName"] = node
        self.put(
            PODS,
            name,
            metadata={"ownerReferences": [owner], "labels": {SLOT.partition("/")[2]: str(slots)}},
            spec=spec,
            status={"phase": "Pending", "conditions": [{"type": "PodScheduled", **scheduled}]},
        )

    def _fitting(self, template: Obj, requested: int) -> Iterator[str]:
        terms = template.get("affinity", {}).get("nodeAffinity", {}).get(_REQUIRED, {}).get("nodeSelectorTerms")
        for node in sorted(listed["metadata"]["name"] for listed in self.store.list(NODES)):
            used = sum(
                int(pod["metadata"].get("labels", {}).get("slot", 0))
                for pod in self.store.list(PODS)
                if pod["spec"].get("nodeName") == node and pod["status"].get("phase") not in {"Succeeded", "Failed"}
            )
            allowed = terms is None or any(_matches(term, node) for term in terms)
            if allowed and used + requested <= self.slots[node]:
                yield node

    def end(self, job: Obj, exit_code: int, answer: Obj) -> None:
        """End a Job and its pod."""
        name = job["metadata"]["name"]
        pod = self.store.get(PODS, f"{name}-pod", NAMESPACE)
        if pod is None:
            owner = {"kind": "Job", "controller": True, "name": name, "uid": job["metadata"]["uid"]}
            pod = self.put(PODS, f"{name}-pod", metadata={"ownerReferences": [owner]}, spec={}, status={})
        terminated = {"exitCode": exit_code, "message": json.dumps(answer), "finishedAt": self.now.isoformat()}
        status = {
            "phase": "Failed" if exit_code else "Succeeded",
            "containerStatuses": [{"name": "fetch", "state": {"terminated": terminated}}],
        }
        self.put(PODS, f"{name}-pod", **{**pod, "status": status})
        kind = "Failed" if exit_code else "Complete"
        ended = {"type": kind, "status": "True", "lastTransitionTime": self.now.isoformat()}
        self.put(JOBS, name, **{**job, "status": {"conditions": [ended]}})

    def finish(self, *names: str) -> None:
        """End the fetches of Models that have a node, with success."""
        for job in list(self.store.list(JOBS)):
            pod = self.store.get(PODS, f"{job['metadata']['name']}-pod", NAMESPACE)
            model = job["metadata"]["ownerReferences"][0]["name"]
            if (
                pod is not None
                and pod["spec"].get("nodeName")
                and not job.get("status")
                and model in (names or (model,))
            ):
                self.end(job, 0, {"sizeBytes": 1})
        self.settle()

    def fetch_all(self) -> None:
        """Schedule and finish until no fetch goes on."""
        for _ in range(20):
            before = self.store.revision
            self.schedule()
            self.finish()
            if self.store.revision == before:
                return
        raise AssertionError("fetches for ever")

    def serve(self, claim: str, *, pod: str | None = None, node: str | None = None, service: str = "chat") -> None:
        """Add a pod of a service that mounts a claim: on the node, or refused by the scheduler if there is none."""
        scheduled = {"status": "True"} if node else {"status": "False", "reason": "Unschedulable"}
        spec: Obj = {"volumes": [{"persistentVolumeClaim": {"claimName": claim}}]}
        labels = {LABEL_SERVICE: service}
        if node:
            spec["nodeName"] = node
            labels["slot"] = "1"
        status = {"phase": "Running" if node else "Pending", "conditions": [{"type": "PodScheduled", **scheduled}]}
        self.put(PODS, pod or f"{service}-{claim}", metadata={"labels": labels}, spec=spec, status=status)
        self.settle()

    def deploy(self, claim: str) -> None:
        """Add a Deployment without pods that mounts a claim."""
        spec = {"volumes": [{"persistentVolumeClaim": {"claimName": claim}}]}
        self.put(DEPLOYMENTS, f"of-{claim}", spec={"template": {"spec": spec}})
        self.settle()

    def pass_time(self, **duration: float) -> None:
        self.now += timedelta(**duration)
        self.settle()

    def service(self, name: str = "chat") -> InferenceService:
        return msgspec.convert(self.store.get(INFERENCE_SERVICES, name, NAMESPACE), InferenceService)


def _matches(term: Obj, node: str) -> bool:
    wanted = {"In": True, "NotIn": False}
    fields = term.get("matchFields", ())
    assert all(len(field["values"]) == 1 for field in fields), "the API allows one value"
    return all((node in field["values"]) == wanted[field["operator"]] for field in fields)


def simulate_service(slots: dict[str, int], replicas: int = 1, **cache: Any) -> SimulatedCopies:
    """Return nodes with so many slots, a Model with copies on nodes, and a service of it whose copies are wanted."""
    simulated = SimulatedCopies(slots)
    simulated.make_model(**cache)
    simulated.make_service(replicas=replicas)
    return simulated
