"""An API for the queue's loop that loses answers and refuses at the moment that a test names.

What the real API server decides is tested on it (`tests/cluster/queue`); here the clock is virtual, or faults have an
exact moment.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from copy import deepcopy
from typing import Any

from controller.placement.admission_loop import Admission
from controller.placement.admission_parts import AdmissionParts, RoundReport
from controller.placement.cell_registry import CellRegistry
from controller.placement.ledger import LEDGER
from controller.placement.planner import PlanRules
from controller.reconcile.plan import Leading
from crds.meta import CONTROLLER_NAMESPACE
from devices.vendors import VENDORS
from kube.client import Client, Obj
from kube.errors import ApiError, Conflict, NotFound, Unreachable
from kube.resources import CONFIG_MAPS, METAL_HOSTS, METAL_PROCESSES, NODES, ObjectKey, Resource, object_key
from kube.store import Store
from tests.support.background import running
from tests.support.json_patches import apply_patch

Place = tuple[Resource, ObjectKey]


class AdmissionApi(Client):
    """An API server with these objects."""

    def __init__(self, *objects: tuple[Resource, Obj]) -> None:
        self.objects: dict[Place, Obj] = {(resource, object_key(obj)): obj for resource, obj in objects}
        self.tries: list[tuple[str, str]] = []
        """Name and place of each admission that was asked for; the place is empty for a pod without a pin."""
        self.refuse: Callable[[str, str], ApiError | Unreachable | None] = lambda _name, _place: None
        self.before_answer: Callable[[str], None] = lambda _name: None
        self.loses_answers = False
        self.refused_reads = 0
        """Reads that are not answered from now on."""
        self.evictions: list[str] = []
        self.refuse_eviction: Callable[[str], ApiError | None] = lambda _name: None
        self.deleted: list[str] = []
        self.before_ledger: Callable[[], object] = lambda: None
        """Called at each write of the ledger, which is between a decision and its effects."""
        self.refuse_ledger: Callable[[], ApiError | Unreachable | None] = lambda: None
        self.lost_ledger_answers = 0
        """Writes of the ledger that are made from now on, and not answered."""

    def find(self, resource: Resource, name: str, namespace: str | None = "team") -> Obj:
        """Return an object. Raises NotFound."""
        stored = self.objects.get((resource, ObjectKey(namespace or "", name)))
        if stored is None:
            raise NotFound("get", status=404)
        return stored

    def host_of(self, name: str) -> str:
        """Return the host of a process; empty if it waits."""
        return str(self.find(METAL_PROCESSES, name)["spec"].get("hostName", ""))

    def put(self, resource: Resource, obj: Obj) -> Obj:
        """Replace an object, with another version."""
        version = str(int(obj["metadata"].get("resourceVersion", "0")) + 100)
        stored = {**obj, "metadata": {**obj["metadata"], "resourceVersion": version}}
        self.objects[resource, object_key(obj)] = stored
        return stored

    async def get(self, resource: Resource, name: str, namespace: str | None = None) -> Obj:
        await asyncio.sleep(0)
        resource.path(namespace, name)
        if resource != CONFIG_MAPS and self.refused_reads > 0:
            self.refused_reads -= 1
            raise Unreachable("get: cut")
        return self.find(resource, name, namespace)

    async def create(self, resource: Resource, obj: Mapping[str, Any]) -> Obj:
        return self.put(resource, dict(obj))

    async def patch_json(
        self,
        resource: Resource,
        name: str,
        namespace: str | None,
        operations: Sequence[Mapping[str, Any]],
        *,
        subresource: str = "",
    ) -> Obj:
        del subresource
        await asyncio.sleep(0)
        is_ledger = resource == CONFIG_MAPS
        if is_ledger:
            self.before_ledger()
            if error := self.refuse_ledger():
                raise error
        place = _place_of(operations)
        if not is_ledger:
            self.tries.append((name, place))
            if refusal := self.refuse(name, place):
                raise refusal
        try:
            patched = self.put(resource, apply_patch(self.find(resource, name, namespace), operations))
        except LookupError as error:
            raise Conflict("patch", status=409, message=str(error)) from error
        if is_ledger and self.lost_ledger_answers > 0:
            self.lost_ledger_answers -= 1
            raise Unreachable("patch: cut")
        if not is_ledger:
            self.before_answer(name)
            if self.loses_answers:
                raise Unreachable("patch: cut")
        return patched

    async def patch_merge(
        self,
        resource: Resource,
        name: str,
        namespace: str | None,
        patch: Mapping[str, Any],
        *,
        field_manager: str,
    ) -> Obj:
        del field_manager
        await asyncio.sleep(0)
        obj = deepcopy(self.find(resource, name, namespace))
        annotations = {**obj["metadata"].get("annotations", {}), **patch["metadata"]["annotations"]}
        obj["metadata"]["annotations"] = {key: value for key, value in annotations.items() if value is not None}
        return self.put(resource, obj)

    async def create_subresource(
        self, resource: Resource, name: str, namespace: str | None, subresource: str, obj: Mapping[str, Any]
    ) -> Obj:
        del resource, namespace, subresource
        await asyncio.sleep(0)
        self.evictions.append(name)
        if refusal := self.refuse_eviction(name):
            raise refusal
        return dict(obj)

    async def delete(
        self,
        resource: Resource,
        name: str,
        namespace: str | None = None,
        *,
        uid: str | None = None,
        propagation: str = "Background",
    ) -> None:
        del propagation
        await asyncio.sleep(0)
        if uid is not None and self.find(resource, name, namespace)["metadata"]["uid"] != uid:
            raise Conflict("delete", status=409)
        self.deleted.append(name)


def _place_of(operations: Sequence[Mapping[str, Any]]) -> str:
    for operation in operations:
        if operation["path"] == "/spec/hostName":
            return str(operation["value"])
        if operation["op"] == "add" and "affinity" in operation["path"]:
            terms = operation["value"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
                "nodeSelectorTerms"
            ]
            # One that goes to any node of a pool has labels instead of a name.
            return str(terms[0]["matchFields"][0]["values"][0]) if "matchFields" in terms[0] else ""
    return ""


class SilentRecorder:
    """A recorder of Events that nobody reads."""

    async def event(self, *_arguments: object) -> None:
        """Send nothing."""


class AdmissionBench:
    """The loop on a store and an API that agree at first; a test changes either.

    Args:
        objects: all objects of both.
        alive: the hosts that are alive; None: all.
        rules: the administrator's rules.
        known: the watch cache; it must have the indexes of the controller.
    """

    def __init__(
        self,
        known: Store,
        *objects: tuple[Resource, Obj],
        alive: Collection[str] | None = None,
        rules: PlanRules | None = None,
        identity: str = "one",
        recorder: Any = None,
    ) -> None:
        self.known = known
        self._recorder: Any = recorder or SilentRecorder()
        self.during_plan: Callable[[], None] = lambda: None
        """Called between the moment at which the units are read and the decision."""
        self.api = AdmissionApi(*((resource, obj) for resource, obj in objects if resource not in {METAL_HOSTS, NODES}))
        # One that has never been would make the loop wait for late writes.
        metadata = {"name": LEDGER, "namespace": CONTROLLER_NAMESPACE}
        self.api.put(CONFIG_MAPS, {"metadata": metadata, "data": {"ledger.json": "{}"}})
        self.outcomes: list[str] = []
        self.reports: list[RoundReport] = []
        for resource, obj in objects:
            known.put(resource, obj)
        self.registry = CellRegistry(known, VENDORS, lambda name: alive is None or name in alive, clock=_loop_time)
        self._rules = rules or PlanRules()
        self.loop = Admission(
            AdmissionParts(
                self.registry,
                VENDORS,
                identity,
                rules=self._read_rules,
                on_round=self.reports.append,
                on_outcome=self.outcomes.append,
            )
        )

    def _read_rules(self) -> PlanRules:
        self.during_plan()
        return self._rules

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the loop until the context ends."""
        leading = Leading(self.api, self.known, self._recorder, lambda _resource, _key: None)
        async with running(self.loop.run(leading)):
            yield

    def show(self, resource: Resource, name: str, namespace: str | None = "team") -> None:
        """Put an object into the watch cache as the API has it."""
        self.known.put(resource, self.api.find(resource, name, namespace))

    def change(self, resource: Resource, obj: Obj) -> None:
        """Put another version of an object into the watch cache and the API."""
        self.known.put(resource, self.api.put(resource, obj))

    def remove(self, resource: Resource, name: str, namespace: str = "team") -> None:
        """Delete an object, which the watch shows."""
        removed = self.api.objects.pop((resource, ObjectKey(namespace, name)))
        self.known.remove(resource, namespace, name, uid=removed["metadata"]["uid"])


def _loop_time() -> float:
    return asyncio.get_running_loop().time()
