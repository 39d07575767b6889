"""The effect of placing a model: each node and host before and after it."""

import itertools
from difflib import get_close_matches
from typing import Final

from msgspec import structs

from console.density_answers import NodeState, SimulateAnswer, SimulatedNode, SimulateRequest
from console.density_models import QUANTIZATIONS, KnownModel, change_quantization, choose_for_machine
from console.density_queries import list_excluded
from console.density_snapshot import DensitySnapshot, MachineProfile, Visibility
from console.fit_table import RANKS, FitTable, PlaceFit, assess_stated
from controller.placement.machines import ViewedMachine, compute_remaining_bytes
from crds.size import GIB

LEAST_CONTEXT: Final = 128
MOST_CONTEXT: Final = 2_097_152
MOST_MEMORY_GB: Final = 1 << 20
_MOST_NAMED: Final = 5
_MOST_QUOTED: Final = 100


class SimulationRefused(ValueError):  # noqa: N818 - it is the answer to a request
    """Nothing can be simulated; the message has the field and the way out."""


class ModelNotFound(SimulationRefused):
    """No model that the caller may see has this name."""


def check_request(request: SimulateRequest) -> SimulateRequest:
    """Return a request whose values are in range, with its texts in one form, and None for 0 and for empty texts.

    Raises:
        SimulationRefused: a value is impossible.
    """
    quantization = request.quantization.upper() if request.quantization else None
    if not request.model.strip():
        raise SimulationRefused("model is empty: give the name of a model, such as qwen3-8b")
    if quantization is not None and quantization not in QUANTIZATIONS:
        raise SimulationRefused(f"quantization is one of {', '.join(QUANTIZATIONS)}")

    # 0 stands for what is not stated.
    context = request.context or None
    if context is not None and not LEAST_CONTEXT <= context <= MOST_CONTEXT:
        raise SimulationRefused(f"context is a number of tokens from {LEAST_CONTEXT} to {MOST_CONTEXT}")
    memory = request.memory_gb or None
    if memory is not None and not 0 < memory <= MOST_MEMORY_GB:
        raise SimulationRefused(f"memoryGb is a number of GiB above 0, at most {MOST_MEMORY_GB}")

    return SimulateRequest(model=request.model.strip(), quantization=quantization, context=context, memory_gb=memory)


def find_model(snapshot: DensitySnapshot, visible: Visibility, text: str) -> KnownModel:
    """Return the model with this name, else the only model whose name contains the text.

    Raises:
        ModelNotFound: there is none.
        SimulationRefused: several have it.
    """
    # flag_models has 1 for each model that the caller may see.
    visible_models = list(itertools.compress(snapshot.models, snapshot.flag_models(visible)))
    folded = text.casefold()

    # An exact name goes before all that contain the text. full_name is NAMESPACE/NAME of a Model, or the name in the
    # catalog. "*" and "" would match all models, so they name none.
    exact = [model for model in visible_models if folded in {model.full_name.casefold(), model.name.casefold()}]
    matches = exact or [model for model in visible_models if folded not in {"*", ""} and model.matches(folded)]
    if len(matches) == 1:
        return matches[0]

    # None or several: explain that, with a part of the text and of the names.
    quoted = repr(text[:_MOST_QUOTED])
    if not matches:
        similar = get_close_matches(folded[:_MOST_QUOTED], [model.full_name for model in visible_models], n=1)
        raise ModelNotFound(f"no model has {quoted} in its name" + (f": did you mean {similar[0]}?" if similar else ""))
    names = sorted(model.full_name for model in matches)
    more = ", ..." if len(names) > _MOST_NAMED else ""
    raise SimulationRefused(f"model {quoted} may be {', '.join(names[:_MOST_NAMED])}{more}: name one of them")


def find_asked_model(snapshot: DensitySnapshot, visible: Visibility, request: SimulateRequest) -> KnownModel:
    """Return the model of a checked request, in its quantization.

    Raises:
        ModelNotFound: there is no such model.
        SimulationRefused: several are meant, or it has no other quantizations.
    """
    model = find_model(snapshot, visible, request.model)
    if request.quantization is None:
        return model
    changed = change_quantization(model, request.quantization)
    if changed is None:
        raise SimulationRefused(f"quantization is of GGUF files, and {model.full_name} is none or states no parameters")
    return changed


def simulate_model(
    snapshot: DensitySnapshot, table: FitTable, visible: Visibility, request: SimulateRequest
) -> SimulateAnswer:
    """Return each node and host with the model on it, the best first.

    Raises:
        ModelNotFound: there is no such model.
        SimulationRefused: a value is impossible.
    """
    asked = check_request(request)
    model = find_asked_model(snapshot, visible, asked)
    if asked.context is not None and asked.context != table.options.context_tokens:
        # A new table: cached fits hold for one context length.
        table = table.with_options(structs.replace(table.options, context_length=asked.context))

    # A profile stands for nodes and hosts that are alike: the fit is computed once for all of them.
    changes = []
    for profile in snapshot.profiles:
        chosen = choose_for_machine(model, profile.replicas) if asked.context is None else None
        profile_table = table.with_options(chosen) if chosen is not None else table
        place = _assess_on_profile(profile_table, model, profile, asked.memory_gb)
        if place is not None:
            context = profile_table.options.context_tokens
            changes += [_describe_change(name, snapshot.machines[name], place, context) for name in profile.names]

    # The key: the best level first, then the fastest, then by name.
    changes.sort(key=lambda node: (RANKS[node.fit_level], -(node.estimated_tps or 0.0), node.node_name))
    return SimulateAnswer(
        model=model.name,
        namespace=model.namespace,
        quantization=model.quantization,
        context=table.options.context_tokens,
        ranked_nodes=changes,
        can_fit_anywhere=any(node.fit_level != "too_tight" for node in changes),
        excluded_nodes=list_excluded(snapshot),
    )


def _assess_on_profile(
    table: FitTable, model: KnownModel, profile: MachineProfile, memory_gb: float | None
) -> PlaceFit | None:
    """Return the fit of a model on the machines of a profile; None: nothing is known of it there.

    If the request states a memory, the model is assumed to need that much, instead of what is estimated; its speed
    stays the estimated one. Of the possible numbers of devices, the smallest with the best level counts.
    """
    # Without a stated memory, the estimate counts.
    place = table.find_best_fit(model, profile)
    if memory_gb is None:
        return place

    # Speed and engine are those of the estimate. Where no engine is known to take the model, the engine of another
    # accelerator is named.
    speed = place.fit.speed if place else None
    workload = model.workloads.get(profile.accelerator)
    runtimes = [known.runtime for known in model.workloads.values()]
    runtime = place.runtime if place else next(iter(runtimes), "")

    # profile.replicas: the devices that one replica may have, for each possible number of them, the smallest first
    best: PlaceFit | None = None
    for devices in profile.replicas:
        fit = assess_stated(workload, round(memory_gb * GIB), devices, speed)
        if fit is not None and (best is None or RANKS[fit.level] < RANKS[best.fit.level]):
            best = PlaceFit(fit, devices, runtime)
    return best


def _describe_change(name: str, machine: ViewedMachine, place: PlaceFit, context: int) -> SimulatedNode:
    """Return a node or host with the model on it: its fit, and the free memory before and after, if it fits."""
    fit = place.fit
    fits = fit.level != "too_tight"

    # Bytes are those of each device, here in GiB. machine.free_bytes: the free memory of each device that no pod holds;
    # of a host or processor, its own.
    return SimulatedNode(
        node_name=name,
        current_score=place.score,
        fit_level=fit.level,
        run_mode=fit.run_mode,
        device_count=place.devices.device_count,
        context=context,
        estimated_tps=round(fit.speed.generation.expected, 1) if fit.speed else None,
        available_memory_gb=round(fit.available_bytes / GIB, 2),
        required_memory_gb=round(fit.needed_bytes / GIB, 2),
        remaining_memory_gb=round((fit.available_bytes - fit.needed_bytes) / GIB, 2),
        utilization_pct=round(100 * fit.utilization, 1) if fit.available_bytes else None,
        shortfall=fit.shortfall,
        before=_describe_state(machine.free_bytes),
        after=_describe_state(compute_remaining_bytes(machine, place.devices.device_count, fit.needed_bytes))
        if fits
        else None,
    )


def _describe_state(free_bytes: tuple[int, ...]) -> NodeState:
    return NodeState(free_gb=round(max(free_bytes, default=0) / GIB, 2), free_devices=len(free_bytes))
