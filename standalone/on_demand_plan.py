"""Decide which models on demand are loaded and unloaded, by the requests that wait and the memory that is free.

Models that do not fit beside each other share the memory by time. A model that is asked for gets room at once from
models that nobody uses. One that is in use keeps its memory as long as it serves its own requests, so that those for
one model are served together, but no longer than the patience of those that wait for another one. A swap costs the time
to load twice, so a model that was just loaded serves at least as long as its load took.

The decision is a pure function of one sample. It is repeated after each change, and is the same after a restart.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from crds.size import size_text

PATIENCE_SECONDS: Final = 20.0
"""Time for which requests wait while the models in their way serve others; swaps that come before add to it."""
_LEAST_LINGER_SECONDS: Final = 1.0
_MOST_LINGER_SECONDS: Final = 5.0
"""Limits of the time without a request in which the next one of the same conversation is probably near."""

Stage = Literal["unloaded", "loading", "loaded", "unloading"]


@dataclass(frozen=True, slots=True)
class OnDemandModel:
    """A model on demand at the time of the sample."""

    name: str
    stage: Stage
    needed_bytes: int
    """Memory that it takes once it is loaded, with its companions; what it has now, if that is more."""
    priority_rank: int
    """Its place in the order of importance; 0 is the most important."""
    is_protected: bool
    """It is never unloaded to make room for others."""
    idle_limit_seconds: float
    """Time without a request after which it is unloaded."""
    load_seconds: float
    """Time that its load takes, as it took last or by an estimate."""
    end_seconds: float = 0.0
    """Time that its last requests and its end take, as they took last."""
    is_wanted: bool = False
    """Requests wait for it, or for a free slot of it."""
    waiting_seconds: float = 0.0
    """Time for which the first of them has waited."""
    idle_seconds: float = 0.0
    """Time without a request, since its load began at most; 0 while it has one."""
    loaded_seconds: float = 0.0
    """Time since it was loaded."""
    is_stuck: bool = False
    """Its load has failed, and is tried again, or it waits for its weights: it keeps memory that others can use."""

    @property
    def linger_seconds(self) -> float:
        """Time without a request after which it counts as unused: to load it again takes as long."""
        return min(max(self.load_seconds, _LEAST_LINGER_SECONDS), _MOST_LINGER_SECONDS)

    @property
    def is_unused(self) -> bool:
        """True if it has had no request for some time, so that the next one is probably not near."""
        return not self.is_wanted and (self.is_stuck or self.idle_seconds >= self.linger_seconds)

    @property
    def can_end(self) -> bool:
        """True if it can be unloaded: a load that goes on well is not broken off."""
        return self.stage == "loaded" or (self.stage == "loading" and self.is_stuck)

    @property
    def has_had_turn(self) -> bool:
        """True if it has been loaded for as long as its load took, so that swaps take no more than half of the time."""
        return self.loaded_seconds >= self.load_seconds

    def cost_to_lose(self) -> tuple[int, float, str]:
        """Return the sort key of models that may be unloaded: first those whose loss costs least.

        Less important ones come first, and of equals those that were used long ago and are soon loaded again.
        """
        return -self.priority_rank, self.load_seconds / max(self.idle_seconds, 1e-3), self.name


class LoadPlan(NamedTuple):
    """The decision of one sample."""

    load: tuple[str, ...] = ()
    """Models to load now, in this order."""
    unload: tuple[str, ...] = ()
    """Models to unload, once their running requests have ended."""
    too_large: dict[str, str] = {}
    """Models that cannot be loaded whatever is unloaded, with the reason."""
    next_seconds: float | None = None
    """Time after which the decision may be another one without any change; None: it stays."""


def plan_loads(models: Sequence[OnDemandModel], free_bytes: int, ending_bytes: int = 0) -> LoadPlan:
    """Return which models are loaded and unloaded now, if `free_bytes` of memory are free.

    Others of `ending_bytes` will be, once engines that are none of these models have ended.

    1. Unload what nobody has used for its time.
    2. In the order of their first requests, find room for the models that are asked for: memory that is free or will
       be soon, then that of unused models and, once the requests have lost their patience, that of models in use.
    3. Load those that fit into the free memory. What was found for a model that does not fit yet is kept for it.
    """
    # 1. Unused models.
    running = [model for model in models if model.stage in {"loading", "loaded"}]
    expired = [model for model in running if not model.is_wanted and model.idle_seconds >= model.idle_limit_seconds]
    deadlines = [model.idle_limit_seconds - model.idle_seconds for model in running if not model.is_wanted]

    # 2. Room. `ending` will be free once everything that ends has ended; `patience` is that of the next model in line.
    unload, load = list(expired), list[str]()
    too_large = _find_too_large(models, free_bytes + ending_bytes)
    left_bytes = free_bytes
    ending_bytes += sum(model.needed_bytes for model in models if model.stage == "unloading" or model in expired)
    patience = PATIENCE_SECONDS
    for model in _list_line(models):
        missing_bytes = model.needed_bytes - left_bytes - ending_bytes
        if missing_bytes > 0:
            others = [other for other in running if other.can_end and other not in unload]
            victims = _pick_victims(others, missing_bytes, has_patience=model.waiting_seconds < patience)
            unload += victims
            ending_bytes += sum(victim.needed_bytes for victim in victims)
            deadlines += [] if victims else [patience - model.waiting_seconds, *_list_turn_ends(others)]
        patience -= 2 * model.load_seconds + model.end_seconds  # its load, at least as long a turn, and its end

        # 3. Load it, or keep the room for it.
        if model.stage == "unloaded" and model.needed_bytes <= left_bytes:
            load.append(model.name)
            left_bytes -= model.needed_bytes
        elif model.needed_bytes <= left_bytes + ending_bytes:
            kept_bytes = max(0, model.needed_bytes - ending_bytes)
            left_bytes, ending_bytes = left_bytes - kept_bytes, ending_bytes - (model.needed_bytes - kept_bytes)

    future = [seconds for seconds in deadlines if seconds > 0]
    return LoadPlan(
        load=tuple(load),
        unload=tuple(model.name for model in unload),
        too_large=too_large,
        next_seconds=min(future, default=None),
    )


def _list_line(models: Iterable[OnDemandModel]) -> list[OnDemandModel]:
    """Return the models that are asked for and not loaded, in the order of their first requests."""
    line = [model for model in models if model.is_wanted and model.stage in {"unloaded", "unloading"}]
    return sorted(line, key=lambda model: (-model.waiting_seconds, model.name))


def _pick_victims(loaded: Iterable[OnDemandModel], missing_bytes: int, *, has_patience: bool) -> list[OnDemandModel]:
    """Return the models to unload so that so much memory becomes free; none if they do not suffice.

    Only models that are not in use are unloaded while the requests that need the room have patience.
    """
    unprotected = [model for model in loaded if not model.is_protected]
    unused = _pick_cheapest([model for model in unprotected if model.is_unused], missing_bytes)
    if unused or has_patience:
        return unused
    return _pick_cheapest([model for model in unprotected if model.is_unused or model.has_had_turn], missing_bytes)


def _pick_cheapest(candidates: Iterable[OnDemandModel], missing_bytes: int) -> list[OnDemandModel]:
    """Return the candidates whose loss costs least, as few as free so much memory; none if all of them do not."""
    picked: list[OnDemandModel] = []
    for candidate in sorted(candidates, key=OnDemandModel.cost_to_lose):
        if missing_bytes <= 0:
            break
        picked.append(candidate)
        missing_bytes -= candidate.needed_bytes
    if missing_bytes > 0:
        return []

    # The last ones may be so large that some of the first are not needed. The most costly ones are spared first.
    for candidate in reversed(picked):
        if missing_bytes + candidate.needed_bytes <= 0:
            picked.remove(candidate)
            missing_bytes += candidate.needed_bytes
    return picked


def _list_turn_ends(loaded: Iterable[OnDemandModel]) -> Iterator[float]:
    """Yield the times after which models may be unloaded that may not be now: they linger, or have begun to serve."""
    for model in loaded:
        yield model.linger_seconds - model.idle_seconds
        yield model.load_seconds - model.loaded_seconds


def _find_too_large(models: Sequence[OnDemandModel], free_bytes: int) -> dict[str, str]:
    """Return the models that do not fit even if all others on demand are unloaded, each with the reason."""
    present = [model for model in models if model.stage != "unloaded" and not model.is_protected]
    most_bytes = free_bytes + sum(model.needed_bytes for model in present)
    return {
        model.name: f"it needs {size_text(model.needed_bytes)}, and no more than {size_text(most_bytes)} of the memory "
        "for models can be made free: lower spec.contextLength, serve a smaller quantization, or load fewer models"
        for model in models
        if model.stage == "unloaded" and model.needed_bytes > most_bytes
    }
