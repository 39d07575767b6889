"""The decisions which models are loaded and unloaded, one by one and over simulated traces of requests."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from standalone.on_demand_plan import PATIENCE_SECONDS, LoadPlan, OnDemandModel, Stage, plan_loads
from tests.support.simulated_loads import SimulatedMachine, SimulatedModel

BOUND_SECONDS = 30.0
"""Time that requests of a few small models wait at most for a swap to begin: patience, and the turns of others."""


def model(
    name: str,
    stage: Stage = "loaded",
    *,
    size: int = 1,
    waiting: float | None = None,
    idle: float = 100.0,
    rank: int = 2,
    protected: bool = False,
    load: float = 2.0,
    loaded: float = 100.0,
    stuck: bool = False,
) -> OnDemandModel:
    """Return a model on demand that is loaded and unused, unless stated otherwise."""
    return OnDemandModel(
        name=name,
        stage=stage,
        needed_bytes=size,
        priority_rank=rank,
        is_protected=protected,
        idle_limit_seconds=300.0,
        load_seconds=load,
        is_wanted=waiting is not None,
        waiting_seconds=waiting or 0.0,
        idle_seconds=0.0 if waiting is not None else idle,
        loaded_seconds=loaded,
        is_stuck=stuck,
    )


def plan(*models: OnDemandModel, free: int = 0, ending: int = 0) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return what is loaded, and what is unloaded."""
    found = plan_loads(models, free, ending)
    assert not found.too_large
    return found.load, found.unload


def test_model_that_is_asked_for_is_loaded_beside_the_others_if_it_fits() -> None:
    asked, other = model("asked", "unloaded", waiting=0.1), model("other")
    assert plan(asked, other, free=1) == (("asked",), ())


def test_unused_model_makes_room_at_once() -> None:
    asked = model("asked", "unloaded", waiting=0.0)
    assert plan(asked, model("other")) == ((), ("other",))


@pytest.mark.parametrize("in_use", [model("other", idle=0.0), model("other", waiting=1.0), model("other", idle=1.5)])
def test_model_in_use_makes_room_once_the_others_have_lost_their_patience(in_use: OnDemandModel) -> None:
    found = plan_loads([model("asked", "unloaded", waiting=PATIENCE_SECONDS - 0.25), in_use], 0)
    assert not found.load + found.unload
    assert found.next_seconds == pytest.approx(0.25)
    assert plan(model("asked", "unloaded", waiting=PATIENCE_SECONDS), in_use) == ((), ("other",))


def test_model_that_was_just_loaded_serves_as_long_as_its_load_took() -> None:
    asked = model("asked", "unloaded", waiting=PATIENCE_SECONDS + 50)
    found = plan_loads([asked, model("other", waiting=3.0, loaded=0.5)], 0)
    assert not found.unload
    assert found.next_seconds == pytest.approx(1.5)


def test_patience_ends_early_enough_for_those_that_wait_behind_another() -> None:
    busy = [model("a", idle=0.0), model("b", idle=0.0)]

    def unloaded(first: float, second: float) -> tuple[str, ...]:
        """Return what makes room for two models whose requests have waited for so long."""
        line = [model("first", "unloaded", waiting=first, load=3.0), model("second", "unloaded", waiting=second)]
        return plan(*line, *busy)[1]

    assert unloaded(15.0, 13.5) == ()
    assert unloaded(15.0, 14.5) == ("a",)  # 6 s before its patience ends, so that the first one has a turn of 6 s


@pytest.mark.parametrize(
    ("cheap", "costly"),
    [
        (model("z", rank=3, idle=10.0), model("a", rank=2, idle=200.0)),
        (model("z", idle=200.0), model("a", idle=100.0)),
        (model("z", load=1.0), model("a", load=3.0)),
    ],
    ids=["priority", "idle", "load"],
)
def test_model_whose_loss_costs_least_makes_room(cheap: OnDemandModel, costly: OnDemandModel) -> None:
    assert plan(model("asked", "unloaded", waiting=0.0), costly, cheap) == ((), ("z",))


def test_no_more_is_unloaded_than_is_needed() -> None:
    asked = model("asked", "unloaded", size=4, waiting=0.0)
    small, large = model("small", size=1, idle=200.0), model("large", size=4, idle=100.0)
    assert plan(asked, small, large) == ((), ("large",))
    assert plan(asked, small, large, free=3) == ((), ("small",))


def test_protected_model_makes_room_for_nothing_and_is_named_as_lacking() -> None:
    asked = model("asked", "unloaded", size=2**30, waiting=PATIENCE_SECONDS + 1)
    found = plan_loads([asked, model("other", size=2**30, protected=True)], 0)
    assert not found.load + found.unload
    assert found.too_large["asked"].startswith("it needs 1.0 GiB, and no more than 0 B of the memory")


def test_protected_model_is_unloaded_when_nobody_asks_for_it() -> None:
    assert plan(model("other", idle=300.0, protected=True)) == ((), ("other",))


def test_room_that_is_made_for_one_model_is_taken_by_no_other() -> None:
    first = model("first", "unloaded", size=3, waiting=5.0)
    second = model("second", "unloaded", size=2, waiting=1.0)
    ending = model("ending", "unloading", size=1)
    assert plan(first, second, ending, free=2) == ((), ())
    assert plan(first, second, ending, free=4) == (("first",), ())
    small = model("small", "unloaded", size=1, waiting=0.5)
    assert plan(first, small, ending, free=3) == (("first",), ())
    assert plan(first, small, ending, model("more", "unloading", size=1), free=2) == (("small",), ())


def test_memory_that_others_free_soon_is_waited_for() -> None:
    assert plan(model("asked", "unloaded", size=2, waiting=5.0), model("unused"), free=1, ending=1) == ((), ())


def test_load_that_fails_or_waits_makes_room_unless_it_is_asked_for() -> None:
    asked = model("asked", "unloaded", waiting=0.0)
    assert plan(asked, model("other", "loading", idle=0.0, stuck=True)) == ((), ("other",))
    assert plan(asked, model("other", "loading", waiting=0.0, stuck=True)) == ((), ())
    assert plan(asked, model("other", "loading", idle=100.0)) == ((), ())


def test_requests_for_a_model_that_ends_wait_for_its_next_load() -> None:
    ending = model("ending", "unloading", waiting=1.0)
    assert plan(ending, model("unused")) == ((), ())


def test_idle_models_are_looked_at_when_the_first_of_them_expires() -> None:
    found = plan_loads([model("a", idle=100.0), model("b", idle=290.0)], 0)
    assert found == LoadPlan(next_seconds=10.0)
    assert plan(model("a", idle=100.0), model("b", "loading", idle=300.0)) == ((), ("b",))


# Traces

MODELS = st.lists(
    st.builds(
        SimulatedModel,
        name=st.just(""),
        needed_bytes=st.integers(1, 4),
        load_seconds=st.sampled_from([0.1, 0.5, 1.0, 2.0]),
        unload_seconds=st.sampled_from([0.05, 0.5]),
        request_seconds=st.sampled_from([0.05, 0.5, 2.0]),
        idle_limit_seconds=st.sampled_from([5.0, 60.0]),
        priority_rank=st.integers(0, 4),
    ),
    min_size=2,
    max_size=6,
)
ARRIVALS = st.lists(st.tuples(st.floats(0.0, 60.0), st.integers(0, 5)), min_size=1, max_size=80)


@given(models=MODELS, memory=st.integers(4, 8), arrivals=ARRIVALS)
def test_every_request_is_served_in_time_and_no_memory_is_used_twice(
    models: Sequence[SimulatedModel], memory: int, arrivals: Sequence[tuple[float, int]]
) -> None:
    for number, simulated in enumerate(models):
        simulated.name = f"m{number}"
    machine = SimulatedMachine(models, memory)  # it checks the memory, and that running requests end first
    machine.run([(at, f"m{number % len(models)}") for at, number in arrivals])

    assert len(machine.waits) == len(arrivals)
    assert not machine.too_large
    drain_seconds = max(simulated.request_seconds for simulated in models)
    swap_seconds = max(simulated.unload_seconds for simulated in models) + max(
        simulated.load_seconds for simulated in models
    )
    assert max(seconds for _, seconds in machine.waits) <= BOUND_SECONDS + drain_seconds + swap_seconds
    assert all(simulated.stage == "unloaded" for simulated in models), "idle ones are unloaded in the end"


@given(arrivals=ARRIVALS)
def test_protected_model_stays_until_it_was_idle_for_its_time(arrivals: Sequence[tuple[float, int]]) -> None:
    models = [SimulatedModel(f"m{number}", is_protected=number == 0) for number in range(4)]
    machine = SimulatedMachine(models, 2)
    machine.run([(at, f"m{number % 4}") for at, number in arrivals])
    assert len(machine.waits) == len(arrivals)
    assert all(sample.idle_seconds >= 300.0 for name, sample in machine.unloads if name == "m0")


def test_models_in_use_share_the_memory_by_turns_and_not_by_requests() -> None:
    arrivals = [(number * 0.05, f"m{number % 5}") for number in range(500)]
    machine = SimulatedMachine([SimulatedModel(f"m{number}", load_seconds=0.5) for number in range(5)], 2)
    machine.run(arrivals)
    assert len(machine.waits) == 500
    assert machine.swaps <= 30
