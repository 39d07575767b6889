"""A process that leaves its host by a taint, or for a better host by request: the replacement answers before it ends.

Service decisions, the queue's planner and the release are the real ones; hosts do at once what they are assigned.
"""

import copy
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.models.served import Served
from controller.placement.actions import Admit
from controller.placement.cell_registry import CellRegistry
from controller.placement.displacement import REQUEST_SECONDS
from controller.placement.observed_units import observe_units
from controller.placement.planner import PlanRules, plan
from controller.reconcile.plan import Snapshot
from controller.services.metal_processes import observe_hosts
from crds.meta import ADMITTED_AT, MOVES, REBALANCE_AT
from devices.vendors import VENDORS
from kube.client import Obj
from kube.resources import ENDPOINT_SLICES, INFERENCE_SERVICES, METAL_HOSTS, METAL_PROCESSES
from kube.store import Store
from kube.time import rfc3339
from tests.support.api_objects import GIB, NOW, as_model, as_service, host, model, process, service, slice_of, store

REPLICA_GIB: Final = 2
NO_EXECUTE: Final = {"key": "dedicated", "value": "research", "effect": "NoExecute"}
MOST_ROUNDS: Final = 30


@dataclass
class SmallWorld:
    """The service `chat` on hosts of different size."""

    gib: dict[str, int]
    """Memory for models by host."""
    replicas: int = 1
    taints: dict[str, list[Obj]] = field(default_factory=dict)
    labels: dict[str, dict[str, str]] = field(default_factory=dict)
    spec: Obj = field(default_factory=dict)
    requested_at: str | None = None
    refuses: set[str] = field(default_factory=set)
    processes: dict[str, Obj] = field(default_factory=dict)
    seconds: float = 0.0
    moves: int = 0

    def store(self) -> Store:
        chat = service(replicas=self.replicas, hardware={"accelerator": "metal"}, **self.spec)
        chat["metadata"]["creationTimestamp"] = rfc3339(NOW - timedelta(hours=1))
        objects: list[tuple[Any, Obj]] = [(INFERENCE_SERVICES, chat)]
        objects += [(METAL_PROCESSES, copy.deepcopy(process)) for process in self.processes.values()]
        for name, gib in self.gib.items():
            here = [process for process in self.bound_to(name) if process["status"]["phase"] != "Rejected"]
            free = gib * GIB - sum(process["spec"]["memoryBytes"] for process in here)
            assert free >= 0
            observed = host(
                name,
                free,
                budgetBytes=gib * GIB,
                processes=[{"uid": process["metadata"]["uid"]} for process in here],
            )
            observed["metadata"]["labels"] = self.labels.get(name, {})
            objects.append((METAL_HOSTS, observed | {"spec": {"taints": self.taints.get(name, [])}}))
            if any(process["status"]["phase"] == "Ready" for process in here):
                objects.append((ENDPOINT_SLICES, slice_of("chat", name)))
        return store(*objects)

    def bound_to(self, name: str) -> list[Obj]:
        return [process for process in self.processes.values() if process["spec"].get("hostName") == name]

    def answering(self) -> int:
        return sum(
            process["status"]["phase"] == "Ready" and "deletionTimestamp" not in process["metadata"]
            for process in self.processes.values()
        )

    def places(self) -> list[str]:
        return sorted(process["spec"].get("hostName", "") for process in self.processes.values())

    def settle(self) -> list[str]:
        """Run all parts in turn until nothing changes, and return the hosts of all processes."""
        for _ in range(MOST_ROUNDS):
            before = copy.deepcopy(self.processes)
            self._reconcile()
            self._plan()
            self._run_hosts()
            self.seconds += 1
            if self.processes == before:
                return self.places()
        raise AssertionError(f"no end: {self.processes}")

    def _reconcile(self) -> None:
        chat = service(replicas=self.replicas, **self.spec)
        if self.requested_at is not None:
            chat["metadata"]["annotations"] = {REBALANCE_AT: self.requested_at}
        snapshot = Snapshot(self.store(), NOW + timedelta(seconds=self.seconds))
        served, before = Served(as_model(model()), "llama.cpp"), self.answering()
        steps = observe_hosts(snapshot, as_service(chat), served, self.replicas, REPLICA_GIB * GIB)
        for _, made in steps.create:
            name, annotations = made["metadata"]["name"], made["metadata"].get("annotations", {})
            assert name not in self.processes
            self.moves += MOVES in annotations
            created = rfc3339(snapshot.now)
            self.processes[name] = process(
                name, gib=REPLICA_GIB, annotations=dict(annotations), creationTimestamp=created
            )
            # A name is used again, a uid is not.
            self.processes[name]["metadata"]["uid"] = f"uid-{name}-{self.seconds}"
        for ref in steps.delete:
            self.processes[ref.name]["metadata"]["deletionTimestamp"] = rfc3339(snapshot.now)
        assert self.answering() >= min(before, self.replicas), "a replacement answers first"

    def _plan(self) -> None:
        store = self.store()
        cells = CellRegistry(store, VENDORS, lambda _host: True).list_cells()
        moment = NOW + timedelta(seconds=self.seconds)
        made = plan(cells, observe_units(store, VENDORS, moment).units, PlanRules(), moment.timestamp())
        for action in made.actions:
            if isinstance(action, Admit):
                process = self.processes[action.unit.key.name]
                process["spec"]["hostName"] = action.cells[0].removeprefix("host/")
                process["metadata"]["annotations"][ADMITTED_AT] = rfc3339(moment)

    def _run_hosts(self) -> None:
        for name, present in list(self.processes.items()):
            bound = present["spec"].get("hostName")
            if "deletionTimestamp" in present["metadata"]:
                del self.processes[name]
            elif bound is not None and present["status"]["phase"] == "Pending":
                present["status"]["phase"] = "Rejected" if bound in self.refuses else "Ready"


def request(world: SmallWorld) -> None:
    """Ask to rebalance the service, well after its processes were created."""
    world.seconds += 60
    world.requested_at = rfc3339(NOW + timedelta(seconds=world.seconds))


def started_on(name: str, **world: Any) -> SmallWorld:
    """Return a world whose one process runs on a host, because the others had no room when it came."""
    made = SmallWorld(**world)
    sizes, made.gib = made.gib, {host_name: gib if host_name == name else 0 for host_name, gib in made.gib.items()}
    assert made.settle() == [name]
    made.gib = sizes
    return made


@pytest.mark.parametrize(
    ("taint", "tolerations", "ends_on"),
    [
        (NO_EXECUTE, [], ["b"]),
        (NO_EXECUTE | {"effect": "NoSchedule"}, [], ["a"]),
        (NO_EXECUTE, [{"key": "dedicated", "value": "research"}], ["a"]),
        (NO_EXECUTE, [{"key": "dedicated", "value": "research", "effect": "NoSchedule"}], ["b"]),
        (NO_EXECUTE, [{"key": "dedicated", "value": "other"}], ["b"]),
        (NO_EXECUTE, [{"operator": "Exists"}], ["a"]),
    ],
)
def test_taint_moves_what_does_not_tolerate_it(taint: Obj, tolerations: list[Obj], ends_on: list[str]) -> None:
    world = started_on("a", gib={"a": 8, "b": 4}, spec={"tolerations": tolerations})
    world.taints["a"] = [taint]
    assert world.settle() == ends_on


def test_process_that_fits_nowhere_else_serves_on_a_host_with_a_taint() -> None:
    world = started_on("a", gib={"a": 8, "b": 1})
    world.taints["a"] = [NO_EXECUTE]
    assert world.settle() == ["", "a"], "its replacement waits"
    assert world.answering() == 1
    world.taints["a"] = []
    assert world.settle() == ["a"]


def test_edited_tolerations_replace_no_process_and_open_a_host() -> None:
    world = SmallWorld({"a": 8}, taints={"a": [NO_EXECUTE]})
    assert world.settle() == [""]
    world.spec = {"tolerations": [{"key": "dedicated", "operator": "Exists"}]}
    name = next(iter(world.processes))
    assert world.settle() == ["a"]
    assert list(world.processes) == [name]


def test_service_runs_on_hosts_with_the_labels_that_it_selects() -> None:
    world = SmallWorld({"a": 64, "b": 8}, labels={"b": {"room": "lab"}}, spec={"nodeSelector": {"room": "lab"}})
    assert world.settle() == ["b"]
    world.labels = {}
    assert world.settle() == ["b"], "what runs stays, as on a node"


def test_request_moves_a_process_to_the_better_host_once() -> None:
    world = started_on("a", gib={"a": 3, "b": 16})
    assert world.settle() == ["a"], "nothing moves without a request"
    request(world)
    assert world.settle() == ["b"]
    world.gib["a"] = 64
    assert world.settle() == ["b"], "the process is younger than the request"
    assert world.moves == 1


@pytest.mark.parametrize("gib", [{"a": 8, "b": 8}, {"a": 8, "b": 5}, {"a": 8, "b": 1}])
def test_request_moves_nothing_when_no_host_is_better(gib: dict[str, int]) -> None:
    world = started_on("a", gib=gib)
    request(world)
    assert world.settle() == ["a"]
    assert world.moves == 0


def test_request_spreads_replicas_that_share_a_host() -> None:
    world = started_on("a", gib={"a": 64, "b": 3}, replicas=1)
    world.gib["b"], world.replicas = 0, 2
    assert world.settle() == ["a", "a"]
    world.gib["b"] = 3
    request(world)
    assert world.settle() == ["a", "b"]
    assert world.moves == 1


def test_request_does_not_move_to_a_host_with_a_taint() -> None:
    world = started_on("a", gib={"a": 3, "b": 16}, taints={"b": [NO_EXECUTE | {"effect": "NoSchedule"}]})
    request(world)
    assert world.settle() == ["a"]
    assert world.moves == 0


def test_host_that_rejects_a_move_is_not_tried_again_at_once() -> None:
    world = started_on("a", gib={"a": 3, "b": 16}, refuses={"b"})
    request(world)
    assert world.settle() == ["a", "b"], "the rejected one stays while its host is avoided"
    assert world.moves == 1
    assert world.answering() == 1


@pytest.mark.parametrize("requested_at", ["", "now", "2026-11-21T12:00:00"])
def test_request_without_a_time_moves_nothing(requested_at: str) -> None:
    world = started_on("a", gib={"a": 3, "b": 16})
    world.requested_at = requested_at
    assert world.settle() == ["a"]


def test_request_is_forgotten_after_a_while() -> None:
    world = started_on("a", gib={"a": 8, "b": 4})
    request(world)
    assert world.settle() == ["a"]
    world.seconds += REQUEST_SECONDS
    world.gib["b"] = 64
    assert world.settle() == ["a"]


@given(
    gib=st.fixed_dictionaries({name: st.integers(0, 12) for name in "abcd"}),
    first=st.sets(st.sampled_from("abcd"), min_size=1),
    replicas=st.integers(1, 3),
    refuses=st.sets(st.sampled_from("abcd"), max_size=1),
)
def test_rebalancing_ends_and_never_lowers_what_answers(
    gib: dict[str, int], first: set[str], replicas: int, refuses: set[str]
) -> None:
    world = SmallWorld({name: size if name in first else 0 for name, size in gib.items()}, replicas)
    world.settle()
    answering, world.gib, world.refuses = world.answering(), gib, refuses
    world.settle()
    request(world)
    world.settle()
    assert world.answering() >= answering
    assert world.moves <= replicas + len(refuses) * replicas


def test_move_whose_better_host_fills_up_is_given_up() -> None:
    world = started_on("a", gib={"a": 8, "b": 16})
    (name,) = world.processes
    request(world)
    world._reconcile()
    assert len(world.processes) == 2
    world.gib["b"] = 1
    world._plan()
    assert world.settle() == ["a"]
    assert list(world.processes) == [name], "its replacement did not go to the host that it should leave"
