"""The sums of the ledger: only free memory is reserved, measured use counts, the system keeps its share."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from devices import pressure
from devices.facts import HostFacts
from devices.libsystem import MemoryUse
from metal_agent.memory.ledger import Ledger, budget_bytes, excess_bytes

GIB = 2**30


def test_refusal_names_the_missing_memory() -> None:
    ledger = Ledger(10 * GIB, others_bytes=2 * GIB)
    assert ledger.reserve("a", 5 * GIB) == ""
    assert ledger.reserve("a", 50 * GIB) == ""
    assert ledger.reserve("b", 4 * GIB) == (
        "it needs 4.0 GiB, 1.0 GiB more than the 3.0 GiB that are free of this host's budget of 10.0 GiB, 2.0 GiB of "
        "it in use by other programs"
    )
    assert ledger.reserved == {"a": 5 * GIB}


def test_larger_measured_use_raises_a_reservation() -> None:
    ledger = Ledger(10 * GIB, {"a": 4 * GIB})
    ledger.observe("a", 3 * GIB)
    ledger.observe("gone", 3 * GIB)
    assert ledger.reserved == {"a": 4 * GIB}
    ledger.observe("a", 12 * GIB)
    assert (ledger.reserved, ledger.available_bytes) == ({"a": 12 * GIB}, 0)


def test_freed_is_called_when_more_is_available() -> None:
    told: list[int] = []
    ledger = Ledger(10 * GIB, {"a": 4 * GIB})
    ledger.freed = lambda: told.append(ledger.available_bytes)
    ledger.release("unknown")
    ledger.observe_others(3 * GIB)
    ledger.observe_others(3 * GIB - 2**20)  # less than a step
    assert told == []
    ledger.release("a")
    ledger.observe_others(0)
    assert told == [7 * GIB, 10 * GIB]


def test_larger_budget_frees_memory_and_a_smaller_one_takes_none_back() -> None:
    told: list[int] = []
    ledger = Ledger(10 * GIB, {"a": 8 * GIB})
    ledger.freed = lambda: told.append(ledger.available_bytes)
    ledger.change_budget(6 * GIB)
    assert (ledger.available_bytes, ledger.reserved, told) == (0, {"a": 8 * GIB}, [])
    ledger.change_budget(12 * GIB)
    assert told == [4 * GIB]


def test_mac_of_64_gib_counts_the_weights_of_a_25_gib_file_once() -> None:
    # 64 GiB, of which Metal uses at most 48; its owner's programs take 8 GiB. A file of 25 GiB, with 2 GiB of KV cache.
    facts = HostFacts(memory_bytes=64 * GIB, working_set_bytes=48 * GIB, model_memory_bytes=48 * GIB)
    ledger = Ledger(budget_bytes(facts, None) or 0, memory_bytes=64 * GIB)
    assert ledger.available_bytes == 47 * GIB

    def observe(use: MemoryUse, own_gib: int) -> int:
        """Return the GiB that can still be reserved after a measurement."""
        available = pressure.available_bytes(64 * GIB, use)
        assert available is not None
        excess = excess_bytes(
            memory_bytes=64 * GIB,
            available_bytes=available,
            own_bytes=own_gib * GIB,
            budget_bytes=ledger.budget_bytes,
        )
        ledger.observe_others(excess)
        return ledger.available_bytes // GIB

    owners = MemoryUse(wired_bytes=2 * GIB, compressor_bytes=GIB, anonymous_bytes=6 * GIB, purgeable_bytes=GIB)
    assert observe(owners, 0) == 47
    assert ledger.reserve("chat", 27 * GIB) == ""
    # Read into memory: while the GPU works, weights and KV cache are wired; the cache of the file is no use.
    working = owners._replace(wired_bytes=owners.wired_bytes + 27 * GIB)
    assert observe(working, 27) == 20
    # Idle for longer than they stay wired, they are anonymous memory.
    idle = owners._replace(anonymous_bytes=owners.anonymous_bytes + 27 * GIB)
    assert observe(idle, 27) == 20
    # The owner starts something of 14 GiB: of 22 GiB of others, 17 are the share that the budget leaves them.
    assert observe(idle._replace(anonymous_bytes=idle.anonymous_bytes + 14 * GIB), 27) == 15


@pytest.mark.parametrize(
    ("facts", "owner", "expected"),
    [
        (HostFacts(), None, None),
        (HostFacts(memory_bytes=64 * GIB), None, None),
        (HostFacts(), 5 * GIB, 5 * GIB),
        # Metal's limit minus Metal's own use; the owner may set a lower budget, but no higher one.
        (HostFacts(memory_bytes=64 * GIB, working_set_bytes=48 * GIB, model_memory_bytes=48 * GIB), None, 47 * GIB),
        (HostFacts(memory_bytes=64 * GIB, working_set_bytes=48 * GIB, model_memory_bytes=48 * GIB), 9 * GIB, 9 * GIB),
        (HostFacts(memory_bytes=64 * GIB, working_set_bytes=48 * GIB, model_memory_bytes=48 * GIB), 60 * GIB, 47 * GIB),
        # A limit that the owner raised to the whole memory still leaves a share to the system.
        (
            HostFacts(memory_bytes=64 * GIB, working_set_bytes=64 * GIB, model_memory_bytes=64 * GIB),
            None,
            int(64 * GIB * 0.92),
        ),
        (HostFacts(memory_bytes=8 * GIB, working_set_bytes=8 * GIB, model_memory_bytes=8 * GIB), None, 6 * GIB),
        (HostFacts(memory_bytes=64 * GIB, model_memory_bytes=48 * GIB), None, 48 * GIB),
        (HostFacts(memory_bytes=64 * GIB, model_memory_bytes=48 * GIB), 90 * GIB, 90 * GIB),
    ],
)
def test_budget_is_limited_by_owner_metal_and_system(facts: HostFacts, owner: int | None, expected: int | None) -> None:
    assert budget_bytes(facts, owner) == expected


@pytest.mark.parametrize(
    ("available", "own", "expected"),
    [(50, 0, 0), (20, 30, 0), (10, 30, 8), (10, 0, 38), (64, 64, 0)],
)
def test_other_programs_count_beyond_their_share(available: int, own: int, expected: int) -> None:
    assert excess_bytes(memory_bytes=64, available_bytes=available, own_bytes=own, budget_bytes=48) == expected


@pytest.mark.parametrize(("loaded", "expected"), [(10, 0), (20, 4), (0, 0)])
def test_models_of_the_owner_count_even_if_reported_as_available(loaded: int, expected: int) -> None:
    excess = excess_bytes(memory_bytes=64, available_bytes=60, own_bytes=0, budget_bytes=48, loaded_bytes=loaded)
    assert excess == expected


UNIT = 2**26


class AnyOrder(RuleBasedStateMachine):
    """Calls in any order never reserve memory that is not free."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(100 * UNIT)
        self.told = 0
        self.ledger.freed = self._freed
        self.running: dict[str, int] = {}

    def _freed(self) -> None:
        self.told += 1

    @rule(uid=st.sampled_from("abcde"), size=st.integers(1, 120))
    def reserve(self, uid: str, size: int) -> None:
        free, is_reserved = self.ledger.available_bytes, uid in self.ledger.reserved
        problem = self.ledger.reserve(uid, size * UNIT)
        assert (problem == "") == (is_reserved or size * UNIT <= free)
        if not is_reserved and not problem:
            assert sum(self.ledger.reserved.values()) <= self.ledger.budget_bytes - self.ledger.others_bytes

    @precondition(lambda self: self.ledger.reserved)
    @rule(data=st.data(), size=st.integers(1, 150))
    def observe(self, data: st.DataObject, size: int) -> None:
        uid = data.draw(st.sampled_from(sorted(self.ledger.reserved)))
        before = self.ledger.reserved[uid]
        self.ledger.observe(uid, size * UNIT - 1)
        assert self.ledger.reserved[uid] == max(before, size * UNIT)

    @rule(excess=st.integers(0, 150))
    def others(self, excess: int) -> None:
        before, told = self.ledger.available_bytes, self.told
        self.ledger.observe_others(excess * UNIT)
        assert self.told > told or self.ledger.available_bytes <= before

    @rule(uid=st.sampled_from("abcde"))
    def release(self, uid: str) -> None:
        before, told = self.ledger.available_bytes, self.told
        self.ledger.release(uid)
        assert uid not in self.ledger.reserved
        assert self.told > told or self.ledger.available_bytes == before

    @rule()
    def crash_and_adopt(self) -> None:
        reserved = dict(self.ledger.reserved)
        self.ledger = Ledger(100 * UNIT, freed=self._freed)
        for uid, size in reserved.items():
            self.ledger.take_over(uid, size)
        assert self.ledger.reserved == reserved

    @invariant()
    def free_is_what_nobody_has(self) -> None:
        used = sum(self.ledger.reserved.values()) + self.ledger.others_bytes
        assert self.ledger.available_bytes == max(0, self.ledger.budget_bytes - used)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(stateful_step_count=30)


@given(st.integers(0, 2**40), st.integers(0, 2**40), st.integers(0, 2**40), st.integers(0, 2**40))
def test_the_excess_is_never_negative(memory: int, available: int, own: int, budget: int) -> None:
    excess = excess_bytes(memory_bytes=memory, available_bytes=available, own_bytes=own, budget_bytes=budget)
    assert 0 <= excess <= max(0, memory)
