"""The choice of copies: what runs stays, refused replicas move on once, and the choice comes to an end."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.services.pods.copy_choice import CopyPods, choose_copies


@pytest.mark.parametrize(
    ("replicas", "copies", "coming", "chosen"),
    [
        (2, {}, 0, {}),
        (1, {"a": CopyPods(), "b": CopyPods()}, 0, {"a": 1}),
        (3, {"a": CopyPods(), "b": CopyPods()}, 0, {"a": 2, "b": 1}),
        (3, {"a": CopyPods(2, 2, 2), "b": CopyPods()}, 0, {"a": 2, "b": 1}),
        (2, {"a": CopyPods(2, 2, 2), "b": CopyPods()}, 0, {"a": 2}),
        (2, {"a": CopyPods()}, 1, {"a": 1}),
        (2, {"a": CopyPods()}, 0, {"a": 2}),
        (2, {"a": CopyPods(2, 1, 1, 1)}, 0, {"a": 2}),
        (2, {"a": CopyPods(2, 1, 1, 1), "b": CopyPods()}, 0, {"a": 2, "b": 1}),
        (2, {"a": CopyPods(2, 1, 1, 1), "b": CopyPods(1)}, 0, {"a": 2, "b": 1}),
        (2, {"a": CopyPods(2, 1, 1, 1), "b": CopyPods(1, 1)}, 0, {"a": 1, "b": 1}),
        (2, {"a": CopyPods(2, 1, 1, 1), "b": CopyPods(1, 0, 0, 1)}, 0, {"a": 2, "b": 1}),
        (1, {"a": CopyPods(2, 0, 0, 2), "b": CopyPods(1, 0, 0, 1)}, 0, {"a": 1, "b": 1}),
        (1, {"a": CopyPods(1, 1, 0), "b": CopyPods(1, 1, 1)}, 0, {"b": 1}),
        (2, {"a": CopyPods(3, 3, 3), "b": CopyPods(1, 1, 1)}, 0, {"a": 1, "b": 1}),
        (2, {"a": CopyPods(1, 2, 2), "b": CopyPods(1, 1, 1)}, 0, {"a": 1, "b": 1}),
    ],
    ids=[
        "no copy",
        "first of equal ones",
        "spread",
        "the least loaded",
        "what runs stays",
        "share of a coming copy is left",
        "one copy takes all",
        "refused where no other copy is",
        "refused is tried elsewhere",
        "the scheduler has not decided",
        "placed elsewhere",
        "refused everywhere",
        "no more tries than missing replicas",
        "ready ones stay",
        "fewer replicas are spread",
        "pods that a scaling has not ended yet",
    ],
)
def test_choice(replicas: int, copies: dict[str, CopyPods], coming: int, chosen: dict[str, int]) -> None:
    assert choose_copies(replicas, copies, coming) == chosen


NAMES = "abcd"
counts = st.integers(0, 4)


@st.composite
def pods(draw: st.DrawFn) -> CopyPods:
    """Return the pods of a Deployment whose last scaling has ended; the scheduler may not have decided about all."""
    placed, refused, undecided = draw(counts), draw(counts), draw(counts)
    return CopyPods(placed + refused + undecided, placed, draw(st.integers(0, placed)), refused)


@given(st.integers(0, 9), st.dictionaries(st.sampled_from(NAMES), pods()), st.integers(0, 2))
def test_choice_that_is_applied_changes_nothing(replicas: int, copies: dict[str, CopyPods], coming: int) -> None:
    chosen = choose_copies(replicas, copies, coming)
    applied = {name: copy._replace(replicas=chosen.get(name, 0)) for name, copy in copies.items()}
    assert choose_copies(replicas, applied, coming) == chosen


@given(st.integers(0, 9), st.dictionaries(st.sampled_from(NAMES), pods()), st.integers(0, 2))
def test_nothing_that_runs_moves(replicas: int, copies: dict[str, CopyPods], coming: int) -> None:
    chosen = choose_copies(replicas, copies, coming)
    runs = {name: copy.placed for name, copy in copies.items()}
    kept = {name: min(chosen.get(name, 0), count) for name, count in runs.items()}
    assert sum(kept.values()) == min(replicas, sum(runs.values()))


@dataclass
class SimulatedNode:
    """A node with a copy: the room that it has, and the pods of the service, by how they stand."""

    room: int
    replicas: int = 0
    placed: int = 0
    ready: int = 0
    refused: int = 0
    undecided: int = 0

    def scale(self, replicas: int) -> None:
        """Create and end pods as a ReplicaSet does: those without a node end first, then those that are not ready."""
        self.replicas = replicas
        self.undecided += max(0, replicas - self.placed - self.refused - self.undecided)
        for kind in ("undecided", "refused", "placed"):
            excess = max(0, self.placed + self.refused + self.undecided - replicas)
            setattr(self, kind, max(0, getattr(self, kind) - excess))
        self.ready = min(self.ready, self.placed)

    def schedule(self, *, retry: bool) -> None:
        """Decide about pods, and about refused ones again."""
        tried = self.undecided + (self.refused if retry else 0)
        placed = max(0, min(tried, self.room - self.placed))
        self.refused = self.refused - (self.refused if retry else 0) + tried - placed
        self.placed, self.undecided = self.placed + placed, 0

    @property
    def pods(self) -> CopyPods:
        return CopyPods(self.replicas, self.placed, self.ready, self.refused)


@dataclass
class SimulatedService:
    """A service whose choice is applied to nodes that fill and empty."""

    replicas: int
    nodes: dict[str, SimulatedNode] = field(default_factory=dict)
    coming: int = 0

    def decide(self) -> bool:
        """Apply the choice; return whether it changed anything."""
        before = {name: simulated_node.replicas for name, simulated_node in self.nodes.items()}
        chosen = choose_copies(
            self.replicas, {name: simulated_node.pods for name, simulated_node in self.nodes.items()}, self.coming
        )
        for name, node in self.nodes.items():
            node.scale(chosen.get(name, 0))
        # By its own choice it never has more than wanted; a refused pod that its node has room for at last may follow.
        assert (
            sum(simulated_node.placed + simulated_node.undecided for simulated_node in self.nodes.values())
            <= self.replicas
        )
        return before != {name: simulated_node.replicas for name, simulated_node in self.nodes.items()}

    def settle(self) -> None:
        """Run controllers and scheduler until nothing changes."""
        for _ in range(4 * len(self.nodes) + 4):
            for node in self.nodes.values():
                node.schedule(retry=True)
            if not self.decide() and not any(simulated_node.undecided for simulated_node in self.nodes.values()):
                return
        raise AssertionError(f"does not end: {self}")


nodes = st.dictionaries(st.sampled_from(NAMES), st.builds(SimulatedNode, st.integers(0, 3)), min_size=1)
disturbances = st.lists(
    st.one_of(
        st.tuples(st.just("decide")),
        st.tuples(st.sampled_from(["schedule", "ready", "lose", "leave"]), st.sampled_from(NAMES)),
        st.tuples(st.sampled_from(["room", "join"]), st.sampled_from(NAMES), st.integers(0, 3)),
        st.tuples(st.just("replicas"), st.integers(0, 6)),
        st.tuples(st.just("coming"), st.integers(0, 2)),
    ),
    max_size=30,
)


def disturb(world: SimulatedService, kind: str, *arguments: object) -> None:
    """Change something in the cluster."""
    node = world.nodes.get(str(arguments[0])) if arguments else None
    match kind, arguments:
        case "decide", _:
            world.decide()
        case "replicas", (int(count),):
            world.replicas = count
        case "coming", (int(count),):
            world.coming = count
        case "join", (str(name), int(room)):
            world.nodes.setdefault(name, SimulatedNode(room))
        case "leave", (str(name),) if len(world.nodes) > 1:
            world.nodes.pop(name, None)
        case _ if node is None:
            return
        case "room", (_, int(room)):
            node.room = room
        case "schedule", _:
            node.schedule(retry=False)
        case "ready", _:
            node.ready = node.placed
        case "lose", _ if node.placed:
            node.placed, node.undecided, node.ready = node.placed - 1, node.undecided + 1, 0


@given(st.integers(0, 6), nodes, disturbances)
def test_choice_ends_beside_a_scheduler_that_refuses(
    replicas: int, known: dict[str, SimulatedNode], happened: list[tuple[object, ...]]
) -> None:
    world = SimulatedService(replicas, {name: SimulatedNode(node.room) for name, node in known.items()})
    for kind, *arguments in happened:
        disturb(world, str(kind), *arguments)
    world.coming = 0
    world.settle()
    placed = sum(node.placed for node in world.nodes.values())
    room = sum(max(node.room, node.placed) for node in world.nodes.values())
    assert placed == min(world.replicas, room), "all that there is room for, and no more than wanted"
    if placed == world.replicas:
        assert not any(node.refused for node in world.nodes.values()), "refused pods go when all have a node"
