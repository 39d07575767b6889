"""One service on simulated hosts that are drained, tainted, paused, lost and broken in every order, also all at once.

Service decisions, the queue's planner, release and condition Drained are the real ones; hosts are simulated. Each part
acts when it is its turn, from the state that it finds, so that a sequence of turns is also what a controller decides
that dies and starts anew between any two lines.
"""

import copy
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final

from hypothesis import given
from hypothesis import strategies as st

from controller.hosts.drain import WAITING_SECONDS, build_drained_condition
from controller.models.served import Served
from controller.placement.actions import Admit, Nominate, WithdrawNomination
from controller.placement.cell_registry import CellRegistry
from controller.placement.observed_units import encode_nomination, observe_units
from controller.placement.planner import PlanRules, plan
from controller.reconcile.plan import Snapshot
from controller.services.metal_processes import decide_release, observe_hosts
from controller.services.rollout import AVOID_SECONDS
from crds.meta import NOMINATED, REBALANCE_AT
from devices.vendors import VENDORS
from kube.client import Obj
from kube.resources import ENDPOINT_SLICES, INFERENCE_SERVICES, METAL_HOSTS, METAL_PROCESSES, ObjectKey
from kube.store import Store
from tests.support.api_objects import (
    GIB,
    NOW,
    as_host,
    as_hosted,
    as_model,
    as_service,
    condition,
    host,
    model,
    process,
    service,
    slice_of,
    store,
)

HOSTS: Final = ("a", "b", "c")
REPLICA_GIB: Final = 2
PARTS: Final = ("service", "queue", "release", *HOSTS)
MOST_ROUNDS: Final = 30
"""Rounds of all parts in which a service becomes steady; so many replicas load one after the other."""


@dataclass
class SimulatedHost:
    """A host, and what its administrator, its owner and its defects do to it."""

    gib: int = 8
    is_drained: bool = False
    is_tainted: bool = False
    """It has a taint with effect NoExecute, which the service does not tolerate."""
    is_paused: bool = False
    evicts: bool = False
    """The pause has lasted too long for what serves there."""
    is_lost: bool = False
    fails: bool = False
    """No engine starts there."""
    refuses: bool = False


@dataclass
class World:
    """The service `chat` with its processes, by name, and three hosts."""

    hosts: dict[str, SimulatedHost] = field(default_factory=lambda: {name: SimulatedHost() for name in HOSTS})
    processes: dict[str, Obj] = field(default_factory=dict)
    exposed: dict[str, frozenset[str]] = field(default_factory=dict)
    """Names of the processes that each host's EndpointSlice reaches."""
    wanted: int = 1
    context_length: int = 4096
    seconds: float = 0.0
    requested_at: str = ""
    """When a user has asked to rebalance the service."""

    def store(self) -> Store:
        """Return what the controller's watches bring."""
        objects = [(METAL_PROCESSES, process) for process in self.processes.values()]
        for name, simulated in self.hosts.items():
            bound = self.bound_to(name)
            holding = [process for process in bound if process["status"]["phase"] not in {"Stopped", "Rejected"}]
            used = sum(process["spec"]["memoryBytes"] for process in holding)
            assert used <= simulated.gib * GIB, "no host is promised more memory than it has"
            observed = host(
                name,
                simulated.gib * GIB - used,
                ready="False" if simulated.is_lost else "True",
                processes=[{"uid": process["metadata"]["uid"]} for process in holding],
            )
            if simulated.is_paused:
                observed["status"]["conditions"].append(condition("Paused", "True", "OwnerActive"))
            taints = [{"key": "dedicated", "effect": "NoExecute"}] if simulated.is_tainted else []
            objects.append((METAL_HOSTS, observed | {"spec": {"drain": simulated.is_drained, "taints": taints}}))
            if self.reached_at(name):
                objects.append((ENDPOINT_SLICES, slice_of("chat", name)))
        objects.append((INFERENCE_SERVICES, service(replicas=self.wanted, contextLength=self.context_length)))
        return store(*objects)

    def bound_to(self, name: str) -> list[Obj]:
        return [process for process in self.processes.values() if process["spec"].get("hostName") == name]

    def reached_at(self, name: str) -> set[str]:
        """Return the processes of a host that answer: once it is reached, its proxy gives requests to all of them.

        That a successor follows one that is to stop does not interrupt it (`ClusterExposure._slice`).
        """
        here = {process["metadata"]["name"] for process in self.bound_to(name) if process["status"]["phase"] == "Ready"}
        is_reached = not self.hosts[name].is_lost and not here.isdisjoint(self.exposed.get(name, ()))
        return (
            {process_name for process_name in here if is_ready(self.processes[process_name])} if is_reached else set()
        )

    def answering(self) -> set[str]:
        return {process_name for name in self.hosts for process_name in self.reached_at(name)}

    @property
    def snapshot(self) -> Snapshot:
        return Snapshot(self.store(), NOW + timedelta(seconds=self.seconds))

    def take_turn(self, part: str) -> None:
        """Run one part."""
        match part:
            case "service":
                self._reconcile_service()
            case "queue":
                self._play_round()
            case "release":
                self._release()
            case name if not self.hosts[name].is_lost:
                self._run_agent(name)

    def _play_round(self) -> None:
        """Play a round of the queue, and carry it out."""
        store = self.store()
        cells = CellRegistry(store, VENDORS, lambda name: not self.hosts[name].is_lost).list_cells()
        now = self.snapshot.now
        for action in plan(cells, observe_units(store, VENDORS, now).units, PlanRules(), now.timestamp()).actions:
            if isinstance(action, Admit):
                (host_name,) = (cell.removeprefix("host/") for cell in action.cells)
                assert not self.hosts[host_name].is_drained, "nothing is bound to a drained host"
                assert not self.hosts[host_name].is_tainted, "nothing is bound to a host whose taint is not tolerated"
                self.processes[action.unit.key.name]["spec"]["hostName"] = host_name
                self._nominate(action.unit.key.name, None)
            elif isinstance(action, Nominate):
                self._nominate(action.unit.key.name, encode_nomination(action.nomination))
            else:
                assert isinstance(action, WithdrawNomination), "no unit is evicted for one of its own priority"
                self._nominate(action.unit.key.name, None)

    def _nominate(self, name: str, value: str | None) -> None:
        annotations = self.processes[name]["metadata"].get("annotations", {})
        annotations = {key: annotation for key, annotation in annotations.items() if key != NOMINATED}
        self.processes[name]["metadata"]["annotations"] = annotations | ({NOMINATED: value} if value else {})

    def _reconcile_service(self) -> None:
        before = self.answering()
        observed = service(replicas=self.wanted, contextLength=self.context_length)
        observed["metadata"]["annotations"] = {REBALANCE_AT: self.requested_at}
        chat = as_service(observed)
        served = Served(as_model(model()), "llama.cpp")
        on_hosts = observe_hosts(self.snapshot, chat, served, self.wanted, REPLICA_GIB * GIB)
        for _, made in on_hosts.create:
            name = made["metadata"]["name"]
            assert name not in self.processes, "a name is not used again while an object holds it"
            self.processes[name] = process(
                name,
                gib=REPLICA_GIB,
                annotations=made["metadata"].get("annotations", {}),
                creationTimestamp=self.snapshot.now.isoformat(),
                contextLength=self.context_length,
            )
            # A name is used again once it is free, a uid never.
            self.processes[name]["metadata"]["uid"] = f"uid-{name}-{self.seconds}"
        for ref in on_hosts.delete:
            self.processes[ref.name]["metadata"]["deletionTimestamp"] = self.snapshot.now.isoformat()
        lost = {name for name in before - self.answering() if self._is_current(name)}
        assert not lost or len(self.answering()) >= self.wanted, f"{lost} answered"

    def _is_current(self, name: str) -> bool:
        """Return whether a process has the latest spec: an edit may stop one before, to use its memory."""
        return bool(self.processes[name]["spec"]["contextLength"] == self.context_length)

    def _release(self) -> None:
        for name, observed in list(self.processes.items()):
            bound_to = observed["spec"].get("hostName")
            waited = 0.0 if bound_to and self.hosts[bound_to].is_lost else None
            snapshot = Snapshot(self.store(), NOW, waited)
            if decide_release(snapshot, ObjectKey("team", name)).patch:
                del self.processes[name]

    def _run_agent(self, name: str) -> None:
        """Advance each process of a host by one step, as its agent does."""
        simulated = self.hosts[name]
        ready = frozenset(process["metadata"]["name"] for process in self.bound_to(name) if is_ready(process))
        for present in self.bound_to(name):
            phase = present["status"]["phase"]
            displaced = simulated.is_paused and phase not in {"Stopped", "Rejected"} and not is_leaving(present)
            if is_leaving(present):
                phase = "Stopped"
            elif displaced and (simulated.evicts or phase != "Ready"):
                phase = "Pending"
            elif phase == "Pending":
                phase = "Rejected" if simulated.refuses else "Starting"
            elif phase in {"Starting", "Failed"}:
                phase = "Failed" if simulated.fails else "Ready"
            conditions = [condition("DisruptionTarget", "True", "HostPaused")] if displaced else []
            present["status"] = {"phase": phase, "conditions": conditions}
        # Clients reach a process a while after it has become Ready.
        self.exposed[name] = ready

    def settle(self) -> None:
        """Run all parts until nothing changes any more, also where hosts displace to each other."""
        for _ in range(MOST_ROUNDS):
            before = copy.deepcopy((self.processes, self.exposed))
            for part in ("service", "queue", "release", *self.hosts):
                self.take_turn(part)
            self.seconds += 1.0
            if (self.processes, self.exposed) == before:
                return
        raise AssertionError(f"after {MOST_ROUNDS} rounds something still changes")

    def drained_reason(self, name: str) -> str:
        """Return the reason of condition Drained."""
        bound = self.bound_to(name)
        elsewhere = as_hosted(*(process for process in self.processes.values() if process not in bound))
        observed = host(name) | {"spec": {"drain": True}}
        observed["status"]["conditions"] = [condition("Drained", "False")]
        snapshot = self.snapshot
        drained = build_drained_condition(as_host(observed), as_hosted(*bound), {"uid-chat": elsewhere}, snapshot.now)
        assert drained is not None
        return str(drained["reason"])


def is_leaving(observed: Obj) -> bool:
    return "deletionTimestamp" in observed["metadata"]


def is_ready(observed: Obj) -> bool:
    return observed["status"]["phase"] == "Ready" and not is_leaving(observed)


Change = tuple[str, str, bool]
CHANGES = st.one_of(
    st.tuples(
        st.sampled_from(
            ["is_drained", "is_drained", "is_tainted", "is_paused", "evicts", "is_lost", "fails", "refuses"]
        ),
        st.sampled_from(HOSTS),
        st.booleans(),
    ),
    st.tuples(st.just("edit"), st.just(""), st.booleans()),
    st.tuples(st.just("request"), st.just(""), st.booleans()),
    st.tuples(st.just("scale"), st.sampled_from(["0", "1", "2", "4"]), st.booleans()),
)
TURNS = st.lists(st.sampled_from(PARTS), max_size=12)
STORIES = st.lists(st.tuples(CHANGES, TURNS), max_size=8)
GIBS = st.tuples(*(st.sampled_from([2, 4, 16]) for _ in HOSTS))


def apply_change(world: World, change: Change) -> None:
    what, which, value = change
    match what:
        case "edit":
            world.context_length = 8192 if value else 4096
        case "request":
            world.requested_at = world.snapshot.now.isoformat() if value else ""
        case "scale":
            world.wanted = int(which)
        case _:
            setattr(world.hosts[which], what, value)


def live_through(gibs: tuple[int, ...], story: list[tuple[Change, list[str]]]) -> World:
    world = World()
    for simulated, gib in zip(world.hosts.values(), gibs, strict=True):
        simulated.gib = gib
    world.settle()
    for change, turns in story:
        apply_change(world, change)
        for part in turns:
            world.take_turn(part)
        world.seconds += 1.0
    return world


@given(GIBS, STORIES, st.sampled_from(HOSTS))
def test_drain_ends_in_a_steady_state_and_says_that_it_is_blocked_if_and_only_if_something_is_left(
    gibs: tuple[int, ...], story: list[tuple[Change, list[str]]], drained: str
) -> None:
    world = live_through(gibs, story)
    world.settle()
    for simulated in world.hosts.values():
        simulated.is_lost = simulated.fails = simulated.refuses = False
    world.hosts[drained].is_drained = True
    world.settle()
    world.seconds += WAITING_SECONDS
    is_left = bool(world.bound_to(drained))
    assert world.drained_reason(drained) == ("DrainBlocked" if is_left else "Drained")


@given(STORIES, st.sampled_from(HOSTS), st.booleans())
def test_drained_or_tainted_host_is_empty_once_others_take_its_processes(
    story: list[tuple[Change, list[str]]], left: str, is_drained: bool
) -> None:
    """After whatever has happened, all hosts but one work again, and there is a new one."""
    world = live_through((16, 16, 16), story)
    world.hosts = {name: SimulatedHost(16) for name in (*HOSTS, "new")}
    world.hosts[left] = SimulatedHost(16, is_drained=is_drained, is_tainted=not is_drained)
    world.settle()
    # A host that has rejected a move is avoided for a while.
    world.seconds += AVOID_SECONDS
    world.settle()
    assert world.bound_to(left) == []
    assert not is_drained or world.drained_reason(left) == "Drained"
    assert len(world.answering()) == len(world.processes) == world.wanted
