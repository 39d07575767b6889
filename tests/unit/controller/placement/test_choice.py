"""The choice among accelerators: who gets how many replicas, who keeps them, and when one moves."""

import random
from collections.abc import Sequence

import pytest

from controller.placement.choice import Candidate, choose, describe_shares, list_shares, list_watched

METAL = Candidate("metal")
NVIDIA = Candidate("nvidia")
SEEDS = range(300)


def test_replicas_go_where_there_is_room_in_the_order_of_the_service() -> None:
    candidates = [METAL._replace(room=2), Candidate("amd", room=1), NVIDIA._replace(room=9)]
    assert choose(5, candidates, None) == {"metal": 2, "amd": 1, "nvidia": 2}


def test_free_room_is_preferred_to_evictions_in_an_earlier_pool() -> None:
    assert choose(1, [METAL, NVIDIA._replace(room=1)], None) == {"metal": 0, "nvidia": 1}


def test_without_room_replicas_wait_in_the_first_pool_that_could_ever_run_them() -> None:
    candidates = [METAL._replace(could_run=False), NVIDIA, Candidate("amd")]
    assert choose(2, candidates, None) == {"metal": 0, "nvidia": 2, "amd": 0}
    assert choose(2, [candidate._replace(could_run=False) for candidate in candidates], None) == {
        "metal": 2,
        "nvidia": 0,
        "amd": 0,
    }


def test_refused_accelerator_gets_nothing_although_it_has_replicas_and_room() -> None:
    candidates = [METAL._replace(refusal="no", running=2, ready=2, room=5), NVIDIA]
    assert choose(2, candidates, {"metal": 2}) == {"nvidia": 2}
    assert choose(2, [candidate._replace(refusal="no") for candidate in candidates], None) == {}


def test_running_replicas_stay_although_an_earlier_pool_has_room() -> None:
    candidates = [METAL._replace(room=5), NVIDIA._replace(running=2, ready=2)]
    assert choose(2, candidates, {"nvidia": 2}) == {"metal": 0, "nvidia": 2}


def test_new_spec_chooses_anew_and_counts_the_room_of_its_own_replicas() -> None:
    candidates = [METAL._replace(room=1), NVIDIA._replace(running=2, ready=2)]
    assert choose(2, candidates, None) == {"metal": 1, "nvidia": 1}
    assert choose(2, [METAL, NVIDIA._replace(running=2)], None) == {"metal": 0, "nvidia": 2}


def test_waiting_replica_moves_only_after_it_has_settled() -> None:
    waiting = [METAL, NVIDIA._replace(room=1)]
    assert choose(1, waiting, {"metal": 1}) == {"metal": 1, "nvidia": 0}
    assert choose(1, [METAL._replace(settled=1), NVIDIA._replace(room=1)], {"metal": 1}) == {"metal": 0, "nvidia": 1}
    assert choose(1, [METAL._replace(settled=1), NVIDIA], {"metal": 1}) == {"metal": 1, "nvidia": 0}


def test_evicted_replica_moves_and_its_siblings_stay() -> None:
    candidates = [METAL._replace(room=1), NVIDIA._replace(running=1, ready=1, settled=1)]
    assert choose(2, candidates, {"nvidia": 2}) == {"metal": 1, "nvidia": 1}


def test_replica_whose_hardware_is_gone_moves_at_once() -> None:
    gone = NVIDIA._replace(could_run=False)
    assert choose(1, [METAL._replace(room=1), gone], {"nvidia": 1}) == {"metal": 1, "nvidia": 0}
    assert choose(1, [METAL, gone], {"nvidia": 1}) == {"metal": 1, "nvidia": 0}


def test_scaling_down_ends_what_waits_and_then_the_last_pool() -> None:
    candidates = [METAL._replace(running=1, ready=1), NVIDIA._replace(running=2, ready=2)]
    assert choose(3, candidates, {"metal": 2, "nvidia": 2}) == {"metal": 1, "nvidia": 2}
    assert choose(2, candidates, {"metal": 2, "nvidia": 2}) == {"metal": 1, "nvidia": 1}
    assert choose(0, candidates, {"metal": 2, "nvidia": 2}) == {"metal": 0, "nvidia": 0}


def test_one_replica_at_a_time_moves_to_a_better_pool() -> None:
    better = METAL._replace(room=5, is_better=True)
    settled = NVIDIA._replace(running=2, ready=2)
    assert choose(2, [better, settled], {"nvidia": 2}) == {"metal": 1, "nvidia": 1}
    on_its_way = [better, settled]
    assert choose(2, on_its_way, {"metal": 1, "nvidia": 1}) == {"metal": 1, "nvidia": 1}, "the first is not there yet"
    arrived = [better._replace(running=1, ready=1), settled]
    assert choose(2, arrived, {"metal": 1, "nvidia": 1}) == {"metal": 1, "nvidia": 1}, "its predecessor still serves"
    alone = [better._replace(running=1, ready=1), settled._replace(running=1, ready=1)]
    assert choose(2, alone, {"metal": 1, "nvidia": 1}) == {"metal": 2, "nvidia": 0}


@pytest.mark.parametrize(
    "later",
    [NVIDIA._replace(running=2, ready=1), NVIDIA._replace(running=1, ready=1)],
    ids=["not ready", "one waits"],
)
def test_no_replica_leaves_its_pool_while_another_does_not_serve(later: Candidate) -> None:
    assert choose(2, [METAL._replace(room=5, is_better=True), later], {"nvidia": 2}) == {"metal": 0, "nvidia": 2}


def test_later_pool_is_never_better() -> None:
    candidates = [METAL._replace(running=1, ready=1), NVIDIA._replace(room=5, is_better=True)]
    assert choose(1, candidates, {"metal": 1}) == {"metal": 1, "nvidia": 0}


def test_move_that_finds_no_room_goes_back_to_the_replica_that_still_serves() -> None:
    candidates = [METAL._replace(settled=1), NVIDIA._replace(running=1, ready=1)]
    assert choose(1, candidates, {"metal": 1}) == {"metal": 0, "nvidia": 1}


def test_room_is_watched_for_replicas_that_wait_or_may_move() -> None:
    candidates = [METAL, Candidate("amd"), NVIDIA._replace(running=1), Candidate("intel", refusal="no")]
    assert list_watched(candidates, {"nvidia": 2}, is_ordered=False) == {"metal", "amd", "nvidia"}
    assert list_watched(candidates, {"nvidia": 1}, is_ordered=True) == {"metal", "amd"}
    assert list_watched(candidates, {"nvidia": 1}, is_ordered=False) == frozenset()


def test_choice_says_why_others_were_refused() -> None:
    candidates = [
        METAL._replace(running=2),
        NVIDIA,
        Candidate("amd", could_run=False, lack="no node has amd.com/gpu"),
        Candidate("intel", refusal="runtime vllm has no image for accelerator intel"),
        Candidate("intel-gaudi", room=3),
        Candidate("cerebras", lack="too little is free"),
    ]
    shares = list_shares(candidates, {"metal": 2, "nvidia": 1})
    assert [share.reason for share in shares] == [None, None, "NoSuchHardware", "Refused", "NotNeeded", "NoRoom"]
    assert describe_shares(shares) == (
        "2 on metal, 1 on nvidia; amd: no node has amd.com/gpu; intel: runtime vllm has no image for accelerator "
        "intel; cerebras: too little is free"
    )


class World:
    """Pools whose room comes and goes, and one service that the choice places there."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)  # noqa: S311 - a simulation
        self.names = [f"pool-{number}" for number in range(self.random.randint(1, 4))]
        self.capacity = {name: self.random.randint(0, 4) for name in self.names}
        self.exists = {name: self.random.random() < 0.8 for name in self.names}
        self.refused = {name for name in self.names if self.random.random() < 0.2}
        self.wanted = self.random.randint(0, 6)
        self.running = dict.fromkeys(self.names, 0)
        self.chosen: dict[str, int] = {}

    def candidates(self, *, settled: bool, better: bool) -> list[Candidate]:
        """Return the pools as the choice sees them."""
        return [
            Candidate(
                name,
                refusal="refused" if name in self.refused else "",
                room=max(0, self.capacity[name] - self.running[name]) if self.exists[name] else 0,
                could_run=self.exists[name],
                running=self.running[name],
                ready=self.running[name],
                settled=99 if settled else 0,
                is_better=better,
            )
            for name in self.names
        ]

    def choose(self, *, settled: bool = True, better: bool = False) -> Sequence[Candidate]:
        candidates = self.candidates(settled=settled, better=better)
        self.chosen = choose(self.wanted, candidates, self.chosen)
        return candidates

    def start(self) -> None:
        """Start what has room, and end what is not chosen if enough others serve."""
        for name in self.names:
            most = min(self.chosen.get(name, 0), self.capacity[name]) if self.exists[name] else 0
            self.running[name] = max(self.running[name], most)
        if sum(min(self.running[name], self.chosen.get(name, 0)) for name in self.names) >= self.wanted:
            self.running = {name: min(self.running[name], self.chosen.get(name, 0)) for name in self.names}

    def change(self) -> None:
        """Change the cluster or the number of replicas."""
        name = self.random.choice(self.names)
        match self.random.randrange(4):
            case 0:
                self.capacity[name] = self.random.randint(0, 4)
                self.running[name] = min(self.running[name], self.capacity[name])
            case 1:
                self.exists[name] = not self.exists[name]
                self.running[name] = 0
            case 2:
                self.wanted = self.random.randint(0, 6)
            case _:
                self.refused ^= {name}


@pytest.mark.parametrize("seed", SEEDS)
def test_choice_keeps_its_promises_in_a_changing_cluster(seed: int) -> None:
    world = World(seed)
    for _ in range(20):
        world.change()
        before = dict(world.chosen)
        candidates = world.choose(settled=world.random.random() < 0.5)
        allowed = {candidate.accelerator for candidate in candidates if not candidate.refusal}
        assert sum(world.chosen.values()) == (world.wanted if allowed else 0)
        assert set(world.chosen) == allowed, "a refused pool never gets any"
        assert min(world.chosen.values(), default=0) >= 0
        assert choose(world.wanted, list(candidates), before) == world.chosen, "it is deterministic"
        if sum(before.get(name, 0) for name in allowed) <= world.wanted:
            assert all(world.chosen[name] >= min(world.running[name], before.get(name, 0)) for name in allowed), (
                "what runs stays"
            )
        world.start()


@pytest.mark.parametrize("seed", SEEDS)
def test_choice_comes_to_rest_once_nothing_changes(seed: int) -> None:
    world = World(seed)
    for _ in range(5):
        world.change()
        world.choose()
        world.start()
    is_better = world.random.random() < 0.5
    for _ in range(20):
        world.choose(better=is_better)
        world.start()
    chosen = dict(world.chosen)
    for settled in (True, False, True):
        world.choose(settled=settled, better=is_better)
        assert world.chosen == chosen, "nothing flaps between pools"
        world.start()
    room = [
        candidate
        for candidate in world.candidates(settled=True, better=False)
        if not candidate.refusal and candidate.room
    ]
    waits = any(world.chosen[pool] > world.running[pool] for pool in world.chosen)
    assert not (waits and room), "nothing waits while another pool has room"
