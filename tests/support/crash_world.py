"""A namespace in which the whole controller runs in this process, and is started again after each crash.

Everything that decides is real: the API server, the controller manager, the controller's queues, workers, admission
and prober. Only what runs models is simulated: pods are reported as running or ended as soon as they exist and no gate
holds them, and hosts are `FakeMetalAgent`s. A scenario is what a user does, with the state that must follow; after any
fault that state must be the same as in an undisturbed run, which `checkpoint` compares.
"""

import asyncio
import base64
import contextlib
import copy
import json
import re
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any, Final

from controller.controller_options import ControllerOptions
from controller.placement.pod_requests import find_pinned_node, is_gated
from controller.pod_settings import PodSettings
from controller.reconcile.indexes import mounted_claims
from controller.run import Controller
from crds.meta import CLI_FIELD_MANAGER, DRAINED, LABEL_SLICE_MANAGED_BY, ROTATE_KEY, ROTATE_TOKEN, SLICE_MANAGED_BY
from kube.client import Client, Obj
from kube.errors import ApiError
from kube.resources import (
    DEPLOYMENTS,
    ENDPOINT_SLICES,
    GATEWAY_KEYS,
    INFERENCE_SERVICES,
    JOBS,
    METAL_HOSTS,
    METAL_PROCESSES,
    MODELS,
    PODS,
    PVCS,
    SECRETS,
    SERVICES,
    ObjectKey,
    Resource,
    object_key,
)
from kube.store import Store
from kube.transport import Request
from kube.watch import Selection, reflect
from tests.controlplane.network import ADDRESS
from tests.controlplane.plane import ControlPlane, NotThereError
from tests.support.api_faults import WRITES, Crash, FaultyTransport
from tests.support.eventually import eventually
from tests.support.fake_metal_agent import FakeMetalAgent
from tests.support.foreign_objects import FOREIGN, foreign_objects
from tests.support.scoped_transport import ScopedTransport
from tests.support.simulated_nodes import count_devices
from tests.support.watched_controller import no_credentials

GIB: Final = 2**30
NODES: Final = ("crash-node-1", "crash-node-2")
"""The nodes of all pods, which a fixture keeps ready."""
DEVICES: Final = 8
"""GPUs of each node, for each world."""
LOOK_SECONDS: Final = 0.4
"""Pause of the agents: many worlds run at once."""
CHECKPOINT_SECONDS: Final = 120.0
SETTLE_SECONDS: Final = 2.0
"""Time without a change after which a state is final: a busy machine may not run one of many processes meanwhile."""
POD_CONDITIONS: Final = ("PodScheduled", "ContainersReady", "Ready")
"""Conditions that are True of a pod that runs."""
MIRROR: Final = "mirror.example/"
"""The prefix that a policy may put before images: it is left out of a state."""
COMPARED: Final = (
    MODELS,
    INFERENCE_SERVICES,
    GATEWAY_KEYS,
    METAL_PROCESSES,
    DEPLOYMENTS,
    SERVICES,
    SECRETS,
    JOBS,
    PVCS,
)
JOB_RESULTS: Final = {
    "inspect": {"file": "tiny.gguf", "revision": "v1", "sizeBytes": 1000, "gguf": {"architecture": "llama"}},
    "fetch": {"file": "tiny.gguf", "sizeBytes": 1000},
}
_VOLATILE: Final = frozenset(
    {
        *("uid", "resourceVersion", "creationTimestamp", "generation", "managedFields", "annotations", "clusterIP"),
        *("lastTransitionTime", "clusterIPs", "volumeName", "data", "observedGeneration", "deletionTimestamp", "proof"),
        # Keys are random.
        *("digest", "validUntil"),
        # Which of two equal nodes was the best, and why, depends on what was free and ready when it was chosen.
        *("unusedSince", "enqueuedAt", "estimatedStart", "noEstimate", "placement", "nodes"),
    }
)

State = dict[str, Any]
"""All objects of a namespace by kind and name, without what differs between two equal runs."""


def renumber_processes(state: State) -> State:
    """Return a state in which the MetalProcesses of one spec are numbered by their hosts.

    After the process of the first replica was replaced, that of the second one has a lower number.
    """
    text, counts, processes = json.dumps(state), Counter[str](), state["metalprocesses"]
    for name in sorted(processes, key=lambda name: (processes[name]["spec"].get("hostName", ""), len(name), name)):
        prefix = name.rpartition("-")[0]
        text = text.replace(f'"{name}"', f'"{prefix}-#{counts[prefix]}"')
        counts[prefix] += 1
    renumbered: State = json.loads(text)
    return renumbered


class CrashWorld:
    """One namespace with its controller.

    Args:
        plane: the control plane.
        client: the API, as cluster administrator.
        namespace: the namespace; hosts are named after it.
        transport: the controller's own connection, whose plan makes the faults.
        undisturbed: the world whose states this one must reach; None: this is the undisturbed one.
    """

    def __init__(
        self,
        plane: ControlPlane,
        client: Client,
        namespace: str,
        transport: ScopedTransport,
        undisturbed: "CrashWorld | None" = None,
    ) -> None:
        self.plane = plane
        self.client = client
        self.namespace = namespace
        self.transport = FaultyTransport(transport)
        self.crashes = 0
        self._states: defaultdict[str, asyncio.Future[State]] = defaultdict(asyncio.Future)
        """States at the checkpoints, which other worlds may wait for."""
        self._undisturbed = undisturbed
        self._hosts = AsyncExitStack()
        self._is_over = False
        self._controllers = 1
        self._has_copies = False
        """A Model has copies of its weights on nodes, whose claims have the same names in each world."""
        self._booked: defaultdict[str, dict[ObjectKey, int]] = defaultdict(dict)
        """Devices of the pods that each node has now."""
        self.double_bookings: list[str] = []
        """Every moment at which a node had more devices given away than it has."""

    @contextlib.asynccontextmanager
    async def running(self, controllers: int = 1) -> AsyncIterator["CrashWorld"]:
        """Run controllers and kubelet until the context ends; foreign objects must then be as they were."""
        self._controllers = controllers
        async with foreign_objects(self.client, self.namespace) as assert_unchanged:
            async with asyncio.TaskGroup() as group, self._hosts:
                tasks = [group.create_task(self._live()) for _ in range(controllers)]
                tasks.append(group.create_task(self._run_pods()))
                try:
                    yield self
                finally:
                    self._is_over = True
                    for task in tasks:
                        task.cancel()
                    # Before the hosts go: a grant that is still on its way would be created again behind them.
                    await asyncio.wait(tasks)
                    await self.transport.settle()
            await assert_unchanged()
        assert self.double_bookings == [], self.double_bookings

    async def host(self, number: int = 1, gib: int = 8, *, lease_seconds: int = 40) -> FakeMetalAgent:
        """Start a host, which runs until the world ends; return when processes may be bound to it."""
        name = f"{self.namespace}-{number}"
        agent = FakeMetalAgent(
            self.client,
            name,
            gib * GIB,
            lease_seconds=lease_seconds,
            look_seconds=LOOK_SECONDS,
        )
        await self._hosts.enter_async_context(agent.running())

        async def bindable() -> bool:
            conditions = (await self.client.get(METAL_HOSTS, name))["status"]["conditions"]
            return any((condition["type"], condition["status"]) == ("Ready", "True") for condition in conditions)

        await eventually(bindable)
        return agent

    async def drain(self, number: int = 1, *, is_drained: bool = True) -> None:
        """Drain a host, or open it again."""
        name, spec = f"{self.namespace}-{number}", {"drain": is_drained}
        await self.client.patch_merge(METAL_HOSTS, name, None, {"spec": spec}, field_manager=CLI_FIELD_MANAGER)

    async def await_drain(self, reason: str, number: int = 1) -> None:
        """Wait until condition Drained of a host has this reason."""

        async def reached() -> bool:
            host = await self.client.get(METAL_HOSTS, f"{self.namespace}-{number}")
            conditions = host["status"]["conditions"]
            return any((condition["type"], condition["reason"]) == (DRAINED, reason) for condition in conditions)

        await eventually(reached, CHECKPOINT_SECONDS)

    async def make(self, resource: Resource, name: str, **spec: Any) -> None:
        """Create an object."""
        self._has_copies |= spec.get("cache", {}).get("scope") == "node"
        await self.client.create(resource, {"metadata": {"name": name, "namespace": self.namespace}, "spec": spec})

    async def edit(self, name: str = "chat", resource: Resource = INFERENCE_SERVICES, **spec: Any) -> None:
        """Edit the spec of a service, or of another object."""
        operations = [{"op": "add", "path": f"/spec/{field}", "value": value} for field, value in spec.items()]
        await self.client.patch_json(resource, name, self.namespace, operations)

    async def replace_token(self, name: str = "chat") -> None:
        """Ask for another bearer token of a service, by its annotation."""
        operation = {"op": "add", "path": "/metadata/annotations", "value": {ROTATE_TOKEN: "another"}}
        await self.client.patch_json(INFERENCE_SERVICES, name, self.namespace, [operation])

    async def replace_key(self, value: str, name: str = "app") -> None:
        """Ask for another key of a GatewayKey, by its annotation."""
        operation = {"op": "add", "path": "/metadata/annotations", "value": {ROTATE_KEY: value}}
        await self.client.patch_json(GATEWAY_KEYS, name, self.namespace, [operation])

    async def put_key(self, text: str, name: str = "app") -> None:
        """Put a key into the Secret of a GatewayKey, as a user does."""
        operation = {"op": "add", "path": "/data/key", "value": base64.b64encode(text.encode()).decode()}
        await self.client.patch_json(SECRETS, f"{name}-key", self.namespace, [operation])

    async def delete(self, resource: Resource, name: str) -> None:
        """Delete an object."""
        observed = await self.client.get(resource, name, self.namespace)
        self.transport.deleted_owners.add(observed["metadata"]["uid"])
        await self.client.delete(resource, name, self.namespace)

    async def checkpoint(self, name: str, condition: Callable[[State], bool]) -> None:
        """Wait until the state is that of the undisturbed world; there, until it fulfils `condition` and stays."""
        if self._undisturbed is not None:
            expected = await asyncio.shield(self._undisturbed._states[name])
            await eventually(lambda: self._is_at(name, expected), CHECKPOINT_SECONDS)
            return

        async def settled() -> State | None:
            first, writes = await self.state(), len(self.writes())
            assert condition(first), json.dumps(first["inferenceservices"], indent=1)
            await asyncio.sleep(SETTLE_SECONDS)
            return first if (await self.state(), len(self.writes())) == (first, writes) else None

        state = await eventually(settled, CHECKPOINT_SECONDS)
        assert state is not None, "a state that has settled"
        self._states[name].set_result(state)

    async def _is_at(self, name: str, expected: State) -> bool:
        state = await self.state()
        if self._controllers > 1:
            # One that has not seen an edit deletes the process of another that has, whose successor has another number.
            state, expected = renumber_processes(state), renumber_processes(expected)
        differences = {
            f"{kind} {key}": (objects.get(key), expected[kind].get(key))
            for kind, objects in state.items()
            for key in {*objects, *expected[kind]}
            if objects.get(key) != expected[kind].get(key)
        }
        assert not differences, f"{name}: found and expected: {json.dumps(differences)}"
        return True

    async def state(self) -> State:
        """Return all objects of the namespace without what differs between two equal runs."""
        lists = await asyncio.gather(*(self.client.list(resource, self.namespace) for resource in COMPARED))
        ours = f"{LABEL_SLICE_MANAGED_BY}={SLICE_MANAGED_BY}"
        slices = await self.client.list(ENDPOINT_SLICES, self.namespace, label_selector=ours)
        objects = {resource.plural: listed.items for resource, listed in zip(COMPARED, lists, strict=True)}
        # What one change of pods that queue was allowed stays until the next one, and depends on what ended first.
        objects["deployments"] = [_forget_strategy(deployment) for deployment in objects["deployments"]]
        objects["jobs"] = [_forget_tolerations(job) for job in objects["jobs"]]
        # The ports of simulated hosts differ from run to run.
        objects["endpointslices"] = [{**item, "ports": []} for item in slices.items]
        return {
            kind: {
                self._identify(item): self._normalized(item)
                for item in items
                if item["metadata"]["name"] != "default" and item["metadata"]["name"] != FOREIGN
            }
            for kind, items in objects.items()
        }

    def _identify(self, obj: Obj) -> str:
        """Return the name of an object in a state; the Jobs of several copies are told apart by their claims."""
        claims = mounted_claims(obj["spec"]["template"]["spec"]) if obj.get("kind") == JOBS.kind else ()
        return "/".join(self._normalized(name) for name in (obj["metadata"]["name"], *claims))

    def _normalized(self, value: Any) -> Any:
        if isinstance(value, dict):
            # The status of Kubernetes' own objects is its controllers' business, and follows ours by itself.
            builtin = "spec" in value and value.get("apiVersion") in {"v1", "apps/v1", "batch/v1"}
            dropped = _VOLATILE | {"status"} if builtin else _VOLATILE
            return {self._normalized(key): self._normalized(part) for key, part in value.items() if key not in dropped}
        if isinstance(value, list):
            return [self._normalized(part) for part in value]
        if isinstance(value, str):
            plain = value.replace(self.namespace, "NAMESPACE")
            # The names of Jobs and of claims for all pods have a digest of the Model's uid.
            kinds = "inspect|fetch" if self._has_copies else "inspect|fetch|cache"
            plain = re.sub(rf"-({kinds})-[0-9a-f]{{8}}", r"-\1-DIGEST", plain)
            # Each simulated host has an address and a port of its own.
            plain = re.sub(r"10\.77\.\d+\.\d+(:\d+)?", "ADDRESS", plain)
            plain = plain.replace(MIRROR, "")
            return re.sub(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f-]{22}", "UID", plain)
        return value

    @property
    def created(self) -> dict[str, int]:
        """Count of creations by object, Events aside; of evictions, the count of pods of a service."""
        counts = Counter[str]()
        for (collection, name), count in self.transport.created.items():
            if collection.endswith("/eviction"):
                counts[_rename_pods(self._normalized(collection))] += 1
            elif not collection.endswith("/events"):
                counts[self._normalized(f"{collection}/{name}")] += count
        return counts

    def writes(self) -> list[str]:
        """Return the controller's writes so far, Events and Leases aside, named as in every other world."""
        counts: dict[str, int] = {}
        names = []
        for request in self.transport.sent:
            if name := self.write_name(request):
                counts[name] = counts.get(name, 0) + 1
                names.append(f"{name} #{counts[name]}")
        return names

    def write_name(self, request: Request) -> str | None:
        """Return the name of a write; None for what is no write, or an Event's."""
        if request.method not in WRITES or "/events" in request.path:
            return None
        return f"{request.method} {_rename_pods(request.path.replace(self.namespace, 'NAMESPACE'))}"

    async def _live(self) -> None:
        # A crash at the very end hides the cancellation.
        while not self._is_over:
            try:
                options = ControllerOptions(PodSettings("pomona:test"), elects=False, min_run_seconds=0.0, gateway=True)
                await Controller(Client(self.transport), no_credentials, options).run()
            except* Crash:
                self.crashes += 1

    async def _run_pods(self) -> None:
        """Report each pod as running or ended, as a kubelet would."""
        store, changed = Store(), asyncio.Event()
        store.subscribe(lambda *_: changed.set())
        store.subscribe(self._book)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(reflect(self.client, store, Selection(PODS, self.namespace)))
            while True:
                await changed.wait()
                changed.clear()
                for pod in store.list(PODS):
                    with contextlib.suppress(ApiError, NotThereError):  # deleted or changed meanwhile
                        await self._report_pod(pod)

    def _book(self, _resource: Resource, old: Obj | None, new: Obj | None) -> None:
        """Count the devices of a node, at each state of a pod that the watch shows."""
        pod = new or old
        assert pod is not None
        key, node = object_key(pod), pod["spec"].get("nodeName") or find_pinned_node(pod["spec"])
        if new is None or not node or new["status"].get("phase") in {"Succeeded", "Failed"} or is_gated(new["spec"]):
            for booked in self._booked.values():
                booked.pop(key, None)
            return
        self._booked[node][key] = count_devices(new)
        if sum(self._booked[node].values()) > DEVICES:
            self.double_bookings.append(f"{node}: {self._booked[node]}")

    async def _report_pod(self, pod: Obj) -> None:
        metadata, path = pod["metadata"], PODS.path(self.namespace, pod["metadata"]["name"])
        if metadata["name"] == FOREIGN:
            return
        if "deletionTimestamp" in metadata:
            await self.plane.request("DELETE", path, {"gracePeriodSeconds": 0}, accept={404})
        if "deletionTimestamp" in metadata or pod["status"].get("phase") != "Pending" or is_gated(pod["spec"]):
            return
        container = pod["spec"]["containers"][0]["name"]
        if container != "inspect" and "nodeName" not in pod["spec"]:
            # Kubernetes publishes no endpoint of a pod that is on no node, and no copy of weights is on none.
            target = {"target": {"kind": "Node", "name": _choose_node(pod)}, "metadata": {"name": metadata["name"]}}
            await self.plane.request("POST", f"{path}/binding", target, accept={409})
        if metadata["ownerReferences"][0]["kind"] == "Job":
            message = json.dumps(JOB_RESULTS[container])
            ended = {"exitCode": 0, "message": message, "finishedAt": "2026-11-21T12:00:00Z"}
            status: Obj = {"phase": "Succeeded", "containerStatuses": [_container(container, {"terminated": ended})]}
        else:
            since = {"startedAt": "2026-11-21T12:00:00Z"}
            status = {
                "phase": "Running",
                "podIP": ADDRESS,
                "podIPs": [{"ip": ADDRESS}],
                "conditions": [{"type": kind, "status": "True"} for kind in POD_CONDITIONS],
                "containerStatuses": [_container(container, {"running": since}, ready=True)],
            }
        operations = [{"op": "replace", "path": "/status", "value": status}]
        await self.client.patch_json(PODS, metadata["name"], self.namespace, operations, subresource="status")


def _rename_pods(path: str) -> str:
    """Return a path with the service of a Deployment's pod in place of its name, which differs from run to run."""
    return re.sub(r"(/pods/[a-z]+)-[0-9a-z]{7,10}-[0-9a-z]{5}\b", r"\1-POD", path)


def _forget_tolerations(job: Obj) -> Obj:
    """Return a Job without the taints that its pod tolerates: those of the services that were there before it."""
    job = copy.deepcopy(job)
    job["spec"]["template"]["spec"].pop("tolerations", None)
    return job


def _forget_strategy(deployment: Obj) -> Obj:
    """Return a Deployment without its strategy if its pods wait in the queue."""
    spec = deployment["spec"]
    if not spec["template"]["spec"].get("schedulingGates"):
        return deployment
    return {**deployment, "spec": {name: value for name, value in spec.items() if name != "strategy"}}


def _choose_node(pod: Obj) -> str:
    """Return the first node that a pod does not exclude by its name."""
    affinity = pod["spec"].get("affinity", {}).get("nodeAffinity", {})
    terms = affinity.get("requiredDuringSchedulingIgnoredDuringExecution", {}).get("nodeSelectorTerms", ())
    fields = [field for term in terms for field in term.get("matchFields", ())]
    return next(
        node for node in NODES if all((node in field["values"]) == (field["operator"] == "In") for field in fields)
    )


def _container(name: str, state: Obj, *, ready: bool = False) -> Obj:
    return {
        "name": name,
        "image": "pomona:test",
        "imageID": "",
        "ready": ready,
        "restartCount": 0,
        "state": state,
    }
