"""Load and unload the models on demand of this machine, as `on_demand_plan` decides.

The proxy tells when a request waits for an engine that is not loaded, and the supervisor when a process has changed.
After each of both, and when a decision is due, one sample of all models is taken and decided. Nothing is kept on disk:
after a restart, the engines that still run are those that were wanted.
"""

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import structlog

from crds.inferenceservice import InferenceServiceSpec, is_on_demand
from crds.meta import PRIORITY_RANK
from crds.metalprocess import HOLDS_NO_MEMORY
from gateway.http.control_client import ControlRefusedError, ControlUnreachableError
from gateway.proxy.config import Demand, ServiceDemand
from kube.resources import ObjectKey
from metal_agent.assignments import Assignment
from metal_agent.lifecycle import ProcessState
from metal_agent.supervise.host_parts import RunnerContext
from metal_agent.supervise.runner import Runner
from metal_agent.traffic.proxy_process import Proxy
from standalone.manifests import Manifests
from standalone.on_demand_plan import PATIENCE_SECONDS, LoadPlan, OnDemandModel, Stage, plan_loads

if TYPE_CHECKING:
    from standalone.machine import Machine

_LONGEST_WAIT_SECONDS: Final = 60.0
_ASK_AGAIN_SECONDS: Final = 0.2
_DISK_BYTES_PER_SECOND: Final = 10**9
_START_SECONDS: Final = 1.0
"""Estimate of the time to load, until a model was loaded once: the start of its engine, and its bytes from a disk."""
_NO_DEMAND: Final = ServiceDemand("", waiting=0, waiting_seconds=0.0, in_flight=0, idle_seconds=None)

log = structlog.get_logger()


@dataclass(slots=True)
class _ModelTimes:
    """The times of one model on demand, by a monotonic clock."""

    asked_at: float | None = None
    """When it was asked for without a request; None: it was not, or is loaded."""
    load_began: float = 0.0
    load_seconds: float | None = None
    """Time that its last load has taken; None: it was not loaded yet."""
    is_loading: bool = False
    end_began: float = 0.0
    end_seconds: float = 0.0
    """Time that its last requests and its end have taken."""
    is_ending: bool = False


class OnDemandLoader:
    """The models on demand of `machine`, whose requests wait at `proxy`; `context` has the memory of its processes."""

    def __init__(self, machine: "Machine", context: RunnerContext, proxy: Proxy) -> None:
        """Want no model before `adopt`, and decide nothing before `run`."""
        self._machine, self._ledger, self._peaks, self._proxy = machine, context.ledger, context.peaks, proxy
        self._wanted: set[ObjectKey] = set()
        self._times: defaultdict[ObjectKey, _ModelTimes] = defaultdict(_ModelTimes)
        self._unknown_until = 0.0
        """The last time at which the demand was not known: until then, each model may have been used."""
        self.too_large: Mapping[str, str] = {}
        """By name, the reason why a model cannot be loaded, whatever is unloaded."""
        self.short_of_room: frozenset[str] = frozenset()
        """Names of the models that are asked for, and are loaded once others have made room."""

    def is_unwanted(self, key: ObjectKey) -> bool:
        """Return whether a service is on demand, and its model should not be loaded now."""
        return key not in self._wanted and self.has(key)

    def has(self, key: ObjectKey) -> bool:
        """Return whether a service is on demand."""
        service = self._machine.manifests.services.get(key)
        return service is not None and is_on_demand(service)

    def adopt(self) -> None:
        """Want the models whose engines an earlier run left."""
        self._wanted = {runner.assignment.service for runner in self._machine.runners.values() if runner.state.exists}
        for key in self._wanted:
            self._times[key].load_began = time.monotonic()

    def follow_manifests(self, manifests: Manifests) -> None:
        """Follow the files before they are served: a model that becomes one on demand stays loaded, if it is.

        One that was removed or suspended is forgotten, so that it is not loaded when it comes back.
        """
        served = {key: service for key, service in manifests.services.items() if not service.spec.suspend}
        running = {runner.assignment.service for runner in self._machine.runners.values() if not runner.state.leaving}
        begun = {key for key, service in served.items() if is_on_demand(service) and not self.has(key)}
        self._wanted = {key for key in self._wanted if key in served} | (begun & running)
        for key in [key for key in self._times if key not in served]:
            del self._times[key]

    def request_load(self, key: ObjectKey) -> None:
        """Ask for a model as a request does: it is loaded once there is room, and stays for its idle time."""
        self._times[key].asked_at = time.monotonic()
        self._machine.changes.note()

    def unload(self, key: ObjectKey) -> None:
        """Unload a model, once its running requests have ended; it is loaded again by the next request."""
        self._times[key].asked_at = None  # else it would be loaded at once
        self._note_unload(key)
        self._machine.run_wanted()

    def estimate_load_seconds(self, key: ObjectKey) -> float:
        """Return the time that a load takes: as the last one took or, before the first one, by the size."""
        if (load_seconds := self._times[key].load_seconds) is not None:
            return load_seconds
        size_bytes = sum(assignment.spec.memory_bytes for assignment in self._list_assignments(key))
        return _START_SECONDS + size_bytes / _DISK_BYTES_PER_SECOND

    def measure_idle(self, key: ObjectKey, reported_seconds: float | None, now: float) -> float:
        """Return the time without a request since the load of a model, of which the proxy has reported the former.

        What it reports may be of an earlier load; None: it has sent the engine no request.
        """
        runners = self._list_runners(key)
        ready_at = max((runner.state.ready_since or 0.0 for runner in runners), default=0.0)
        loaded_seconds = now - max(ready_at or self._times[key].load_began or now, self._unknown_until)
        return loaded_seconds if reported_seconds is None else min(reported_seconds, loaded_seconds)

    async def run(self) -> None:
        """Decide after each change, and when a decision is due, until cancelled."""
        demand: Demand | None = None
        while True:
            seen_changes = self._machine.changes.count
            try:
                demand = demand or await self._proxy.client.wait_demand(0, 0.0)
                due_seconds = self._try_decide(demand)
                demand = await self._wait_change(seen_changes, demand.changes, due_seconds)
            except (ControlUnreachableError, ControlRefusedError) as error:
                log.warning("demand_unknown", error=str(error))
                demand = None
                await asyncio.sleep(_ASK_AGAIN_SECONDS)
                if not self._proxy.answers:  # that it answers again is a change, too
                    await self._machine.changes.wait_past(seen_changes)
                self._unknown_until = time.monotonic()

    async def _wait_change(self, seen_changes: int, seen_demand: int, due_seconds: float | None) -> Demand | None:
        """Wait for a change of this machine, or of the demand, or until a decision is due; return the demand if known.

        Raises ControlUnreachableError and ControlRefusedError.
        """
        wait_seconds = min(_LONGEST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS if due_seconds is None else due_seconds)
        changed = asyncio.create_task(self._machine.changes.wait_past(seen_changes))
        asked = asyncio.create_task(self._proxy.client.wait_demand(seen_demand, wait_seconds))
        try:
            await asyncio.wait({changed, asked}, return_when=asyncio.FIRST_COMPLETED)
            return asked.result() if asked.done() else None
        finally:
            for task in (changed, asked):
                task.cancel()
            await asyncio.gather(changed, asked, return_exceptions=True)

    def _try_decide(self, demand: Demand) -> float | None:
        """Decide; a defect in that ends no engine, and is met again at the next change."""
        try:
            return self._decide({service.name: service for service in demand.services}, time.monotonic())
        except Exception:
            log.exception("on_demand_failed")
            return None

    def _decide(self, demand: Mapping[str, ServiceDemand], now: float) -> float | None:
        """Take a sample, decide, and carry the decision out; return the time after which the next one is due."""
        decisions = self._machine.decisions
        engines = self._group_engines()
        keys = {str(key): key for key in decisions if self.has(key) and (decisions[key].assignments or engines[key])}
        models = [self._sample(key, engines[key], demand.get(name, _NO_DEMAND), now) for name, key in keys.items()]
        ending_bytes = sum(self._ledger.reserved.get(uid, 0) for uid in self._list_leaving())
        plan = plan_loads([*models, *self._list_refused()], self._count_free_bytes(), ending_bytes)

        # One that was refused for lack of memory, and that nobody wants any more, is not loaded when some is freed.
        left = [
            model.name
            for model in models
            if model.stage == "unloaded" and not model.is_wanted and keys[model.name] in self._wanted
        ]
        loads = [name for name in plan.load if name in keys]  # those that were refused start by themselves
        for name in loads:
            self._note_load(keys[name])
        for name in (*plan.unload, *left):
            self._note_unload(keys[name])

        if loads or plan.unload or left or plan.too_large != self.too_large:
            self.too_large = plan.too_large
            self._machine.run_wanted()
        self._note_short_of_room(models, plan)
        return plan.next_seconds

    def _list_leaving(self) -> list[str]:
        """Return the uids of the engines that end, and are replaced by others or not wanted by any service now."""
        uids = {one.uid for decision in self._machine.decisions.values() for one in decision.assignments}
        runners = self._machine.runners.items()
        return [uid for uid, runner in runners if uid not in uids and runner.state.leaving and runner.state.exists]

    def _group_engines(self) -> defaultdict[ObjectKey, list[Runner]]:
        """Return the processes of each service, without those that end and are replaced."""
        leaving, grouped = set(self._list_leaving()), defaultdict[ObjectKey, list[Runner]](list)
        for uid, runner in self._machine.runners.items():
            if uid not in leaving and not runner.state.has_ended:
                grouped[runner.assignment.service].append(runner)
        return grouped

    def _list_refused(self) -> list[OnDemandModel]:
        """Return the processes of other services that lack memory, as models whose requests have lost their patience.

        They start once it is free.
        """
        return [
            OnDemandModel(
                name=uid,
                stage="unloaded",
                needed_bytes=runner.state.needed_bytes,
                priority_rank=runner.priority_rank,
                is_protected=True,
                idle_limit_seconds=math.inf,
                load_seconds=0.0,
                is_wanted=True,
                waiting_seconds=PATIENCE_SECONDS,
            )
            for uid, runner in self._machine.runners.items()
            if runner.state.needed_bytes is not None and not self.has(runner.assignment.service)
        ]

    def _note_short_of_room(self, models: Collection[OnDemandModel], plan: LoadPlan) -> None:
        """Note which models wait for room; that others do is a change for the output."""
        asked = {model.name for model in models if model.is_wanted and model.stage == "unloaded"}
        short = frozenset(asked.difference(plan.load, plan.too_large))
        if short != self.short_of_room:
            self.short_of_room = short
            self._machine.changes.note()

    def _list_assignments(self, key: ObjectKey) -> Collection[Assignment]:
        """Return the processes of a service; none if it cannot be served."""
        decision = self._machine.decisions.get(key)
        return decision.assignments if decision else ()

    def _list_runners(self, key: ObjectKey) -> list[Runner]:
        """Return the processes of a service that exist."""
        return [runner for runner in self._machine.runners.values() if runner.assignment.service == key]

    def _count_free_bytes(self) -> int:
        """Return the memory that is neither reserved nor about to be: a process that was just assigned reserves it."""
        pending = sum(
            self._peaks.needed_bytes(runner.assignment.spec)
            for uid, runner in self._machine.runners.items()
            if uid not in self._ledger.reserved and runner.state.phase not in HOLDS_NO_MEMORY
        )
        return max(0, self._ledger.available_bytes - pending)

    def _sample(self, key: ObjectKey, runners: Sequence[Runner], demand: ServiceDemand, now: float) -> OnDemandModel:
        """Return the facts about a model by which is decided, and note the times that its load and its end take."""
        service = self._machine.manifests.services[key]
        stage = self._find_stage(key, runners)
        is_stuck = stage == "loading" and any(_is_stuck(runner.state) for runner in runners)
        self._note_times(key, stage, now)
        assignments = self._list_assignments(key)
        needed_bytes = sum(self._peaks.needed_bytes(assignment.spec) for assignment in assignments)
        reserved_bytes = sum(self._ledger.reserved.get(runner.assignment.uid, 0) for runner in runners)
        refused_bytes = max((runner.state.needed_bytes or 0 for runner in runners), default=0)

        spec, times = service.spec, self._times[key]
        asked_seconds = 0.0 if times.asked_at is None else now - times.asked_at
        is_wanted = demand.waiting > 0 or times.asked_at is not None
        is_in_use = is_wanted or demand.in_flight > 0 or (stage == "loading" and not is_stuck)
        return OnDemandModel(
            name=str(key),
            stage=stage,
            needed_bytes=max(needed_bytes, reserved_bytes, refused_bytes),
            priority_rank=PRIORITY_RANK[spec.priority],
            is_protected=spec.eviction_protection or spec.priority == "critical",
            idle_limit_seconds=_find_idle_limit(spec, demand.keep_alive_seconds),
            load_seconds=self.estimate_load_seconds(key),
            end_seconds=times.end_seconds,
            is_wanted=is_wanted,
            waiting_seconds=max(demand.waiting_seconds, asked_seconds),
            idle_seconds=0.0 if is_in_use else self.measure_idle(key, demand.idle_seconds, now),
            loaded_seconds=self.measure_idle(key, None, now),
            is_stuck=is_stuck,
        )

    def _find_stage(self, key: ObjectKey, runners: Collection[Runner]) -> Stage:
        """Return the stage of a model by its processes. One that was refused for lack of memory is not loaded."""
        states = [runner.state for runner in runners]
        if any(state.exists and (state.leaving or key not in self._wanted) for state in states):
            return "unloading"
        if key not in self._wanted or any(state.needed_bytes is not None for state in states):
            return "unloaded"
        is_loaded = bool(states) and all(state.phase == "Ready" for state in states)
        return "loaded" if is_loaded else "loading"

    def _note_times(self, key: ObjectKey, stage: Stage, now: float) -> None:
        """Note the time that the load or the end of a model has taken, once it is over."""
        times = self._times[key]
        if stage == "loading" and any(runner.state.phase == "Failed" for runner in self._list_runners(key)):
            times.asked_at = None  # who asked without a request sees the failure; requests ask again
        if stage == "loaded":
            times.asked_at = None
            if times.is_loading:
                times.is_loading, times.load_seconds = False, now - times.load_began
        if stage == "unloaded" and times.is_ending:
            times.is_ending, times.end_seconds = False, now - times.end_began

    def _note_load(self, key: ObjectKey) -> None:
        """Want a model, and note when its load has begun."""
        log.info("model_loads", service=str(key))
        self._wanted.add(key)
        self._times[key].load_began, self._times[key].is_loading = time.monotonic(), True

    def _note_unload(self, key: ObjectKey) -> None:
        """Want a model no more, and note when its end has begun."""
        log.info("model_unloads", service=str(key))
        self._wanted.discard(key)
        self._times[key].end_began, self._times[key].is_ending = time.monotonic(), True


def _is_stuck(state: ProcessState) -> bool:
    """Return whether the load of a process does not go on well: it has failed before, or waits for something."""
    return state.failures > 0 or state.hold is not None or state.phase in {"Failed", "Fetching"}


def _find_idle_limit(spec: InferenceServiceSpec, keep_alive_seconds: float | None) -> float:
    """Return the time without a request after which a model is unloaded: as its last request stated, else its spec."""
    if keep_alive_seconds is not None:
        return math.inf if keep_alive_seconds < 0 else keep_alive_seconds
    return float(spec.scaling.idle_seconds if spec.scaling else 0)
