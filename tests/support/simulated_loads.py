"""A simulated machine that follows `on_demand_plan`: models load and unload, requests come and are served."""

import heapq
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from standalone.on_demand_plan import LoadPlan, OnDemandModel, Stage, plan_loads


@dataclass(slots=True)
class SimulatedModel:
    """A model on demand; all its requests run at once."""

    name: str
    needed_bytes: int = 1
    load_seconds: float = 1.0
    unload_seconds: float = 0.1
    request_seconds: float = 0.1
    idle_limit_seconds: float = 300.0
    priority_rank: int = 2
    is_protected: bool = False
    stage: Stage = "unloaded"
    waiting: list[float] = field(default_factory=list)
    """The times at which its waiting requests came."""
    running: int = 0
    changed_at: float = 0.0
    """The time at which its stage, or the number of its requests, has changed last."""
    loaded_at: float = 0.0

    def sample(self, now: float) -> OnDemandModel:
        """Return the facts at `now` for a decision."""
        return OnDemandModel(
            name=self.name,
            stage=self.stage,
            needed_bytes=self.needed_bytes,
            priority_rank=self.priority_rank,
            is_protected=self.is_protected,
            idle_limit_seconds=self.idle_limit_seconds,
            load_seconds=self.load_seconds,
            end_seconds=self.request_seconds + self.unload_seconds,
            is_wanted=bool(self.waiting),
            waiting_seconds=now - self.waiting[0] if self.waiting else 0.0,
            idle_seconds=0.0 if self.running else now - self.changed_at,
            loaded_seconds=now - self.loaded_at,
        )


class SimulatedMachine:
    """Models that share `memory_bytes`, from time 0 on; `plan` decides.

    After each event the memory is checked: it is never over-committed.
    """

    def __init__(
        self,
        models: Iterable[SimulatedModel],
        memory_bytes: int,
        plan: Callable[[list[OnDemandModel], int], LoadPlan] = plan_loads,
    ) -> None:
        self.models = {model.name: model for model in models}
        self.now = 0.0
        self.waits: list[tuple[str, float]] = []
        """The model of each request that was served, and the time for which it waited."""
        self.swaps = 0
        """The number of loads."""
        self.unloads: list[tuple[str, OnDemandModel]] = []
        """The models that were unloaded, each as it was when that was decided."""
        self.too_large: dict[str, str] = {}
        self._memory_bytes, self._plan = memory_bytes, plan
        self._events: list[tuple[float, int, str, str]] = []
        self._numbers = itertools.count()

    def run(self, arrivals: Iterable[tuple[float, str]]) -> None:
        """Serve requests, given as their times and models, and go on until nothing happens any more."""
        for at, name in arrivals:
            self._add(at, "arrive", name)
        while self._events:
            self.now, _, kind, name = heapq.heappop(self._events)
            if kind != "look":
                self._happen(kind, self.models[name])
            self._decide()

    def _add(self, at: float, kind: str, name: str = "") -> None:
        heapq.heappush(self._events, (at, next(self._numbers), kind, name))

    def _happen(self, kind: str, model: SimulatedModel) -> None:
        """Apply one event."""
        match kind:
            case "arrive":
                model.waiting.append(self.now)
            case "loaded":
                model.stage, model.loaded_at, model.changed_at = "loaded", self.now, self.now
            case "served":
                model.running -= 1
                model.changed_at = self.now
                if model.stage == "unloading" and not model.running:
                    self._add(self.now + model.unload_seconds, "unloaded", model.name)
            case "unloaded":
                assert not model.running, f"{model.name} has ended with running requests"
                model.stage = "unloaded"
        if model.stage == "loaded":
            for came in model.waiting:
                self.waits.append((model.name, self.now - came))
                model.running += 1
                self._add(self.now + model.request_seconds, "served", model.name)
            model.waiting.clear()

    def _decide(self) -> None:
        """Decide, and begin what was decided."""
        samples = {model.name: model.sample(self.now) for model in self.models.values()}
        plan = self._plan(list(samples.values()), self._memory_bytes - self._used())
        self.too_large |= plan.too_large
        for name in plan.unload:
            model = self.models[name]
            assert model.stage in {"loaded", "loading"}
            self.unloads.append((name, samples[name]))
            model.stage = "unloading"
            if not model.running:
                self._add(self.now + model.unload_seconds, "unloaded", name)
        for name in plan.load:
            model = self.models[name]
            assert model.stage == "unloaded"
            model.stage, model.changed_at = "loading", self.now
            self.swaps += 1
            self._add(self.now + model.load_seconds, "loaded", name)
        assert self._used() <= self._memory_bytes, "over-committed"
        if plan.next_seconds is not None:
            self._add(self.now + plan.next_seconds + 1e-6, "look")

    def _used(self) -> int:
        """Return the memory of all models that have any."""
        return sum(model.needed_bytes for model in self.models.values() if model.stage != "unloaded")
