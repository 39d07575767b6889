"""The fit of models on cells, each computed once for all cells that are alike.

What a model needs of a device does not depend on what is free there: it is estimated once by model and class, which
takes a tenth of a millisecond and more. The level with what is free follows by arithmetic, unless not all of the model
fits into the devices. So a query over thousands of nodes and models estimates next to nothing.
"""

from collections.abc import Iterable
from typing import Final, NamedTuple, get_args

from msgspec import structs

from console.density_models import KnownModel
from console.density_snapshot import MachineProfile
from crds.serving import Mode, ServingOptions
from crds.size import divide_up, size_text
from fitness.fit import (
    FIT_LEVELS,
    GOOD_HEADROOM,
    PERFECT_HEADROOM,
    Fit,
    FitLevel,
    assess_fit,
    describe_shortfall,
    grade_fit,
    refuse_devices,
    regrade_fit,
)
from fitness.memory import Workload, least_free_bytes
from fitness.performance_store import PerformanceTable
from fitness.serving_devices import ServingDevices
from fitness.speed import RunMode, SpeedEstimate, build_measured_speed, correct_speed

MOST_KEPT: Final = 400_000
"""Fits that are kept; beyond it all are forgotten."""
MOST_RANKED: Final = 2_000_000
"""Models of all profiles that are kept in order: some 400 MB."""
_PERFECT, _GOOD, _MARGINAL, _TOO_TIGHT = range(len(FIT_LEVELS))
RANKS: Final[dict[FitLevel, int]] = {level: rank for rank, level in enumerate(FIT_LEVELS)}
_BAND: Final = 25.0
_VENDORS_BY_STATED_MEMORY: Final = frozenset({"cpu", "metal"})
"""Accelerators on which the memory that a user states counts in place of the estimate."""
_HALF_SPEED: Final = 50.0
"""Tokens a second that give half of the points for speed within a level."""

Key = tuple[str, str, str]


class PlaceFit(NamedTuple):
    """The fit of a model on a cell, with the fewest devices that are enough."""

    fit: Fit
    devices: ServingDevices
    runtime: str

    @property
    def tokens_per_second(self) -> float | None:
        """Measured or estimated speed of one request; None: unknown, or it does not fit."""
        return self.fit.speed.generation.expected if self.fit.speed else None

    @property
    def rank(self) -> tuple[int, float]:
        """A key that sorts the best level first, and there the fastest."""
        return RANKS[self.fit.level], -(self.tokens_per_second or 0.0)

    @property
    def score(self) -> float:
        """Points from 0 to 100, in the order of `rank`."""
        return compute_score(self.fit.level, self.tokens_per_second)


class RankedFit(NamedTuple):
    """A model on a profile, as the best come first."""

    level: int
    slowness: float
    """The negated speed in tokens a second, so that the fastest of a level sorts first."""
    name: str
    position: int
    """Place of the model among all of the snapshot."""


class _Need(NamedTuple):
    """The free memory of a device that a model needs for each level of fit."""

    least: float
    """Free bytes with which it fits."""
    good: float
    perfect: float
    rows: tuple[RankedFit, ...]
    """The model with each level."""


class _ClassNeeds(NamedTuple):
    """The needs of all models of one device class."""

    needs: list[_Need | None]
    """By position; None: nothing is known of the model there."""
    order: list[int]
    """Positions of the models, the fastest first, unknown ones last."""


def compute_score(level: FitLevel, tokens_per_second: float | None) -> float:
    """Return points from 0 to 100: 0, 25, 50 or 75 by the level, and up to 25 for speed, unless it is too tight.

    Each level is a band of `_BAND` points, 25; a speed of `_HALF_SPEED` tokens a second gives half of the next 25, and
    a higher one approaches all of them.
    """
    if level == "too_tight":
        return 0.0
    speed = tokens_per_second or 0.0
    return round(_BAND * (RANKS["too_tight"] - RANKS[level] + speed / (speed + _HALF_SPEED)), 1)


class _IdleFit(NamedTuple):
    """The fit of a model on devices that nothing else uses; its speed is measured, or without corrections."""

    fit: Fit | None
    least_bytes: int = 0
    """Bytes of a device that must be free at the start; 0: as many as are needed."""


class FitTable:
    """All fits that were computed, with one context length.

    Args:
        context_length: context of each request.
        measured: the stored measurements, which correct the estimates of others as well.
    """

    def __init__(
        self, context_length: int, measured: PerformanceTable | None = None, options: ServingOptions | None = None
    ) -> None:
        """Prepare empty caches for this context length, by the measurements, if there are some."""
        # The inputs of all fits: the options of each mode of serving (such as chat), and the stored measurements.
        self.options = options or ServingOptions(context_length=context_length, parallel=1)
        self._options_by_mode = {mode: structs.replace(self.options, mode=mode) for mode in get_args(Mode)}
        self._measured = measured or PerformanceTable()

        # Two caches of single fits. A `Key` is the namespace, name and version of a model.
        # Fits by devices that nothing else uses, and by model.
        self._idle_fits: dict[ServingDevices, dict[Key, _IdleFit]] = {}
        # The fit with the best number of devices, by accelerator and devices of a profile, and by model; None: unknown.
        self._best_fits: dict[tuple[str, tuple[ServingDevices, ...]], dict[Key, PlaceFit | None]] = {}
        # Fits that were put into these two since `clear`: beyond MOST_KEPT, all are forgotten.
        self._cached_fits = 0

        # Two caches of results for all models, each with the tuple of models for which it holds. That tuple is compared
        # by identity, since a snapshot keeps its tuple until a model changes.
        # The needs of the models, by accelerator and idle devices.
        self._needs: dict[tuple[str, ServingDevices], tuple[tuple[KnownModel, ...], _ClassNeeds]] = {}
        # The models in order, by accelerator and devices of a profile; the oldest entry first.
        self._ranked: dict[tuple[str, tuple[ServingDevices, ...]], tuple[tuple[KnownModel, ...], list[RankedFit]]] = {}

    def forget(self, keys: Iterable[Key]) -> None:
        """Forget the fits of some models, whose measurements have changed."""
        # These two caches have an inner dictionary by the key of a model.
        for key in keys:
            for cache in (*self._idle_fits.values(), *self._best_fits.values()):
                cache.pop(key, None)  # type: ignore[attr-defined] # both are dictionaries by key
        # The other two have lists of all models, so that a change of one model spoils each list.
        self._ranked.clear()
        self._needs.clear()

    def forget_corrected(self) -> None:
        """Forget what follows from corrections, which have changed; memory needs stay."""
        self._best_fits.clear()
        self._ranked.clear()
        self._needs.clear()

    def clear(self) -> None:
        """Forget all: too much is kept."""
        self._idle_fits.clear()
        self.forget_corrected()
        self._cached_fits = 0

    def with_options(self, options: ServingOptions) -> "FitTable":
        """Return an empty table with other serving options."""
        return FitTable(options.context_tokens, self._measured, options)

    def rank_models(self, models: tuple[KnownModel, ...], profile: MachineProfile) -> list[RankedFit]:
        """Return all models on a profile, the best first; cached until the models change.

        A profile stands for all nodes that are alike. When too many lists are kept, the oldest ones are dropped.
        """
        # The cache, `_ranked`, has for each profile the models that were ranked last, and their order. The same tuple
        # of models counts (`is`), not an equal one: a snapshot keeps its tuple until a model changes.
        key = profile.accelerator, profile.replicas
        last_models, ranked = self._ranked.get(key, (None, []))
        if last_models is models:
            return ranked

        ranked = self._compute_ranks(models, profile)

        # Make room: MOST_RANKED bounds the entries of all lists together, and each list has one for each model. The
        # oldest list goes first: those of profiles that exist no more are among the oldest ones.
        self._ranked.pop(key, None)
        while self._ranked and (len(self._ranked) + 1) * len(models) > MOST_RANKED:
            del self._ranked[next(iter(self._ranked))]
        self._ranked[key] = (models, ranked)
        return ranked

    def _compute_ranks(self, models: tuple[KnownModel, ...], profile: MachineProfile) -> list[RankedFit]:
        """Return all models on a profile, the best first; without those of which nothing is known there.

        1. Try replicas of one device, then of more. A model that fits well (good or perfect) is settled; the others
           wait for more devices, with the best level that they have reached.
        2. The level follows from comparing the free memory with what the model needs for each level, which is cached.
        3. Put the models of each level in order, the fastest first. Models are numbers here, positions in `models`.
        """
        settled: list[RankedFit] = []
        waiting: list[int] | range = range(len(models))  # the models that are not settled
        best_so_far = dict[int, RankedFit]()  # of each model that waits: its best level so far, if one is known

        for devices in profile.replicas:  # those of one replica: the smallest number first
            # None: how much is free is unknown, so all memory counts as free, or none if that is unknown, too.
            free_bytes = devices.free_bytes if devices.free_bytes is not None else (devices.memory_bytes or 0)
            needs, order = self._list_needs(models, profile.accelerator, devices)
            still_waiting = list[int]()

            # `order` has all positions, the fastest first. It is followed while all models wait, which makes the sort
            # at the end quick.
            for position in order if len(waiting) == len(models) else waiting:
                need = needs[position]
                if need is None:  # nothing is known with so many devices
                    still_waiting.append(position)
                    continue

                # The first three are free bytes that the model needs to fit at all, well, and perfectly; `rows` has its
                # entry for each level, by rank.
                least, good, perfect, rows = need
                if free_bytes >= good:
                    settled.append(rows[_PERFECT if free_bytes >= perfect else _GOOD])
                    continue

                # It fits badly or not at all, and waits for more devices. A lower level is better.
                still_waiting.append(position)
                fit = rows[_MARGINAL if free_bytes >= least else _TOO_TIGHT]
                if position not in best_so_far or fit.level < best_so_far[position].level:
                    best_so_far[position] = fit
            waiting = still_waiting

        # No more devices: what still waits keeps the best level that it has reached.
        return _sort_fits([*settled, *(best_so_far[position] for position in waiting if position in best_so_far)])

    def _list_needs(self, models: tuple[KnownModel, ...], accelerator: str, devices: ServingDevices) -> _ClassNeeds:
        """Return what each model needs of such devices, and the order of their speed; cached until the models change.

        Both hold whatever is free now, so they are computed for idle devices: once for all nodes with such ones.
        """
        # The cache, `_needs`, has what was computed last, and the models for which it holds. The same tuple of models
        # counts (`is`), not an equal one: a snapshot keeps its tuple until a model changes.
        key = accelerator, _as_idle(devices)
        last_models, class_needs = self._needs.get(key, (None, _ClassNeeds([], [])))
        if last_models is models:
            return class_needs

        needs = [self._find_need(model, position, accelerator, devices) for position, model in enumerate(models)]

        # A model has a row for each level, which sorts by level, then speed. So the rows of one level, here of the best
        # one, sort the models by speed alone. A row has the position of its model.
        fastest_first = [row.position for row in sorted(need.rows[_PERFECT] for need in needs if need is not None)]
        unknown = [position for position, need in enumerate(needs) if need is None]
        class_needs = _ClassNeeds(needs, order=fastest_first + unknown)
        self._needs[key] = models, class_needs
        return class_needs

    def _find_need(self, model: KnownModel, position: int, accelerator: str, devices: ServingDevices) -> _Need | None:
        """Return the free bytes of a device that a model needs on such devices for each level of fit.

        None: no engine takes the model there, or its memory or that of the devices is unknown. A level that it cannot
        reach even on idle devices needs infinitely many bytes.
        """
        workload = model.workloads.get(accelerator)
        if workload is None or devices.memory_bytes is None:
            return None
        idle = self._find_corrected_fit(model, workload, devices)  # the fit if nothing else uses the devices
        if idle.fit is None:
            return None

        # Too large even for idle devices: no level can be reached, whatever is free.
        fit, unreachable = idle.fit, float("inf")
        if fit.level == "too_tight":
            return _Need(
                least=unreachable, good=unreachable, perfect=unreachable, rows=_list_rows(model, position, 0.0)
            )

        # least_bytes: what the engine must find free when it starts. No level takes less than that. A better level
        # takes more than the model needs, by a factor.
        speed = fit.speed.generation.expected if fit.speed else 0.0
        least = max(idle.least_bytes, fit.needed_bytes)
        can_be_perfect = fit.run_mode == "accelerator"  # and not on the processor
        return _Need(
            least=least,
            good=max(least, fit.needed_bytes * GOOD_HEADROOM),
            perfect=max(least, fit.needed_bytes * PERFECT_HEADROOM) if can_be_perfect else unreachable,
            rows=_list_rows(model, position, speed),
        )

    def find_best_fit(self, model: KnownModel, profile: MachineProfile) -> PlaceFit | None:
        """Return the fit of a model on a profile with the best number of devices; cached.

        Of the numbers with the best level, it is the smallest one; none is tried beyond the first that fits well. None:
        no engine takes the model there, or its needs are unknown.
        """
        # A workload is what the engine of an accelerator loads of the model.
        workload = model.workloads.get(profile.accelerator)
        if workload is None:
            return None

        # Look into the cache. A cached None is a result, too, so a missing key is told apart by KeyError.
        if self._cached_fits > MOST_KEPT:
            self.clear()  # fits of models and devices that are gone may be among them
        fits_on_profile = self._best_fits.setdefault((profile.accelerator, profile.replicas), {})
        try:
            return fits_on_profile[model.key]
        except KeyError:
            self._cached_fits += 1  # by the result below

        # profile.replicas: the devices that one replica may have, for each number of them, the smallest first
        best: PlaceFit | None = None
        for devices in profile.replicas:
            fit = self._assess(model, workload, devices)
            if fit is None:
                continue
            if best is None or RANKS[fit.level] < RANKS[best.fit.level]:
                best = PlaceFit(fit, devices, workload.runtime)
            if RANKS[fit.level] <= _GOOD:
                break  # it is not tried with more devices

        fits_on_profile[model.key] = best
        return best

    def _find_corrected_fit(self, model: KnownModel, workload: Workload, devices: ServingDevices) -> _IdleFit:
        """Return the fit of a model on devices that nothing else uses, with what is known beyond the estimate.

        1. An estimated speed ("roofline": from bandwidth and compute) is corrected by measurements of other models.
        2. Memory that the user states counts where no estimate is known, and on processors and Metal in any case.
        """
        idle = self._find_idle_fit(model, workload, devices)

        # 1. Correct the speed. Whoever may see a model may see the measurements of its namespace.
        if idle.fit is not None and idle.fit.speed is not None and idle.fit.speed.method == "roofline":
            corrections = self._measured.corrections.select(model.namespace)
            correction = corrections.find(devices.vendor, devices.device_class, workload.runtime)
            idle = idle._replace(fit=idle.fit._replace(speed=correct_speed(idle.fit.speed, correction)))

        # 2. Take the stated memory. _VENDORS_BY_STATED_MEMORY: cpu and metal
        if workload.stated_bytes and (idle.fit is None or devices.vendor in _VENDORS_BY_STATED_MEMORY):
            speed = idle.fit.speed if idle.fit else None
            return _IdleFit(assess_stated(workload, workload.stated_bytes, _as_idle(devices), speed))
        return idle

    def _assess(self, model: KnownModel, workload: Workload, devices: ServingDevices) -> Fit | None:
        """Return the fit of a model on devices with what is free there; None: it is unknown.

        It follows from the fit on idle devices by arithmetic. A model that does not fit into what is free is too tight;
        the fit then says how much is missing.
        """
        # 1. The fit on idle devices, which nothing else uses; None if the memory or the needs are unknown.
        free = devices.free_bytes if devices.free_bytes is not None else devices.memory_bytes
        if free is None:
            return None
        idle = self._find_corrected_fit(model, workload, devices)
        if idle.fit is None:
            return None

        # 2. With the free memory only the level changes, and the utilization; None: the model does not fit into it.
        #    least_bytes: what the engine must find free when it starts
        fit = regrade_fit(idle.fit, free, idle.least_bytes)
        if fit is not None:
            return fit

        # 3. It does not fit. On processors and Metal (`_VENDORS_BY_STATED_MEMORY`), the memory that the user states
        #    counts, elsewhere what the model needs or the engine must find free.
        if workload.stated_bytes and devices.vendor in _VENDORS_BY_STATED_MEMORY:
            return assess_stated(workload, workload.stated_bytes, devices)
        needed = max(idle.fit.needed_bytes, idle.least_bytes)
        return idle.fit._replace(
            level="too_tight",
            needed_bytes=needed,
            available_bytes=free,
            utilization=needed / free if free else float("inf"),
            speed=None,
            shortfall=describe_shortfall(workload, self._options_by_mode[model.mode], devices, needed, free),
        )

    def _find_idle_fit(self, model: KnownModel, workload: Workload, devices: ServingDevices) -> _IdleFit:
        """Return the fit on devices that nothing else uses, with the measured speed if there is one; cached.

        With it goes the memory that the engine must find free when it starts, beyond what the model needs: some engines
        claim a fixed share of a device.
        """
        # The cache: by devices, then by model
        idle_devices = _as_idle(devices)
        fits = self._idle_fits.setdefault(idle_devices, {})
        cached = fits.get(model.key)
        if cached is not None:
            return cached

        # 1. Estimate the fit. If this model was measured on this class of devices, the measured speed counts.
        options = self._options_by_mode[model.mode]
        fit = assess_fit(workload, options, idle_devices, active_share=model.active_share)
        model_hash = model.hashes.get(workload.runtime)  # its identity among measurements with this engine
        if fit is not None and fit.level != "too_tight" and model_hash is not None:
            record = self._measured.find(model_hash, devices.device_class, model.namespace)
            if record is not None:
                fit = fit._replace(speed=build_measured_speed(record, fit.run_mode))

        # 2. Find the memory that must be free at the start. 0: as much as the model needs, which is so in any case on
        #    processors and Metal (`_VENDORS_BY_STATED_MEMORY`).
        least_bytes = 0
        if devices.memory_bytes and devices.vendor not in _VENDORS_BY_STATED_MEMORY:
            least_bytes = least_free_bytes(workload, options, devices.memory_bytes)

        idle_fit = fits[model.key] = _IdleFit(fit, least_bytes)
        self._cached_fits += 1
        return idle_fit


def _sort_fits(fits: Iterable[RankedFit]) -> list[RankedFit]:
    """Return fits in order: the best level first, there the fastest, then by name."""
    # A list for each level. The fastest mostly come first already, so each list is nearly sorted, and its sort quick.
    fits_by_level: tuple[list[RankedFit], ...] = ([], [], [], [])
    for fit in fits:
        fits_by_level[fit.level].append(fit)
    for level_fits in fits_by_level:
        level_fits.sort()
    return [fit for level_fits in fits_by_level for fit in level_fits]


def _list_rows(model: KnownModel, position: int, speed: float) -> tuple[RankedFit, ...]:
    """Return a row of a model for each level of fit, by rank; the free memory of a machine later says which one holds.

    The speed is negated, so that a sort puts the fastest first. The row for "too tight" has no speed.
    """
    name = model.full_name
    return tuple(
        RankedFit(level, -speed if level < _TOO_TIGHT else 0.0, name, position) for level in range(len(FIT_LEVELS))
    )


def _as_idle(devices: ServingDevices) -> ServingDevices:
    """Return devices that nothing else uses."""
    return devices._replace(free_bytes=None)


def assess_stated(
    workload: Workload | None, needed_bytes: int, devices: ServingDevices, speed: SpeedEstimate | None = None
) -> Fit | None:
    """Return the fit of a replica whose memory is stated instead of estimated; None: that of the devices is unknown.

    The stated memory is divided evenly among its devices, and each part is compared with what is free on each device.

    Args:
        workload: what the engine loads; None: no engine is known to take the model there.
        needed_bytes: the stated memory.
        devices: devices of the replica.
        speed: its speed; None: unknown.
    """
    # free_bytes: what is free now on each device; None: unknown, so all of its memory counts as free
    free = devices.free_bytes if devices.free_bytes is not None else devices.memory_bytes
    if free is None:
        return None

    # Compare the part of each device with what is free.
    # refused: why these devices can never serve the weights, however much memory they have; None: they can
    mode: RunMode = "cpu" if devices.vendor == "cpu" else "accelerator"
    device_bytes = divide_up(needed_bytes, devices.device_count)
    refused = refuse_devices(workload, devices) if workload is not None else None
    level = grade_fit(mode, device_bytes, free) if refused is None else "too_tight"
    short_text = f"needs {size_text(device_bytes)}, {size_text(free)} free: short {size_text(device_bytes - free)}"
    return Fit(
        level=level,
        run_mode=mode,
        needed_bytes=device_bytes,
        available_bytes=free,
        utilization=device_bytes / free if free else float("inf"),
        speed=speed if level != "too_tight" else None,
        shortfall=(refused or short_text) if level == "too_tight" else "",
        # As if all memory of a device were free.
        level_if_idle=grade_fit(mode, device_bytes, max(free, devices.memory_bytes or 0)) if refused is None else level,
    )
