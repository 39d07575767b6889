"""The rows of `llmfit serve`, for its clients: each model on its best node, or on one node."""

from typing import Any, Final, NamedTuple

from console.density_models import KnownModel
from console.density_queries import DensityQuery, Page, flag_matches
from console.density_snapshot import DensitySnapshot, MachineProfile, Visibility
from console.fit_table import RANKS, FitTable, PlaceFit
from console.machine_facts import MachineDevice, MachineFacts, describe_machine
from crds.size import GIB

_GIGA: Final = 1e9
_RUN_MODES: Final = {
    "accelerator": ("gpu", "GPU"),
    "cpu": ("cpu_only", "CPU"),
}
"""Name and label of each run mode in llmfit's words."""


class _BestPlace(NamedTuple):
    rank: tuple[int, float]
    node: str
    profile: MachineProfile


def list_llmfit_models(
    snapshot: DensitySnapshot, table: FitTable, visible: Visibility, query: DensityQuery, page: Page, *, node: str = ""
) -> dict[str, Any]:
    """Return the answer of /api/v1/models, the best fit first.

    Args:
        snapshot: the cluster.
        table: the fits.
        visible: what the caller may see.
        query: the models and the least level.
        page: the part that is answered.
        node: the only node or host; empty: the best one for each model.
    """
    flags, worst = flag_matches(snapshot, visible, query), RANKS[query.min_fit]
    best = dict[int, _BestPlace]()
    for profile in snapshot.profiles:
        if node and node not in profile.names:
            continue
        for each in table.rank_models(snapshot.models, profile):
            if each.level > worst or not flags[each.position]:
                continue
            found = _BestPlace((each.level, each.slowness), node or profile.names[0], profile)
            known = best.get(each.position)
            if known is None or (found.rank, found.node) < (known.rank, known.node):
                best[each.position] = found
    ordered = sorted(best.items(), key=lambda each: (each[1].rank, snapshot.models[each[0]].full_name))
    shown = page.cut(ordered)
    return {
        "node": {"name": node or "cluster", "os": "linux"},
        "system": describe_system(describe_machine(snapshot.machines[node])) if node in snapshot.machines else None,
        "total_models": len(ordered),
        "returned_models": len(shown),
        "filters": {
            "limit": page.limit,
            "min_fit": query.min_fit,
            "search": None if query.text == "*" else query.text,
            "use_case": query.use_case,
            "top_only": False,
            "max_context": table.options.context_length,
        },
        "models": [
            build_row(snapshot.models[position], place, name, table.options.context_length)
            for position, (_, name, profile) in shown
            if (place := table.find_place(snapshot.models[position], profile)) is not None
        ],
    }


def build_row(model: KnownModel, place: PlaceFit, node: str, context_length: int) -> dict[str, Any]:
    """Return a model on a node in llmfit's keys."""
    fit, speed = place.fit, place.fit.speed
    mode, mode_label = _RUN_MODES[fit.run_mode]
    billions = None if model.parameters is None else round(model.parameters / _GIGA, 2)
    is_measured = speed is not None and speed.method == "measured"
    expected = round(speed.generation.expected, 1) if speed else None
    return {
        "name": model.full_name,
        "node_name": node,
        "title": model.title,
        "source": model.source,
        "parameter_count": "" if billions is None else f"{billions:g}B",
        "params_b": billions,
        "is_moe": model.active_share is not None,
        "effective_context_length": context_length,
        "fit_level": fit.level,
        "fit_label": fit.level.replace("_", " ").capitalize(),
        "run_mode": mode,
        "run_mode_label": mode_label,
        "score": place.score,
        "runtime": place.runtime.replace(".", ""),
        "runtime_label": place.runtime,
        "best_quant": model.quantization or None,
        "memory_required_gb": round(fit.needed_bytes / GIB, 2),
        "memory_available_gb": round(fit.available_bytes / GIB, 2),
        "utilization_pct": round(100 * fit.utilization, 1) if fit.available_bytes else None,
        "estimated_tps": expected,
        "prefill_tps": round(speed.prompt.expected, 1) if speed and speed.prompt else None,
        "measured_tps": expected if is_measured else None,
        "estimate_confidence": "unsupported" if speed is None else "measured_local" if is_measured else "estimated",
        "notes": [each for each in (fit.shortfall, speed.basis if speed else "") if each],
    }


def describe_system(machine: MachineFacts) -> dict[str, Any]:
    """Return the hardware in llmfit's keys."""
    return {
        "total_ram_gb": machine.total_ram_gb,
        "available_ram_gb": machine.available_ram_gb,
        "cpu_cores": machine.cpu_cores,
        "cpu_name": machine.cpu_name,
        "has_gpu": machine.has_gpu,
        "gpu_vram_gb": machine.gpu_vram_gb,
        "gpu_available_gb": machine.available_ram_gb if machine.unified_memory else None,
        "gpu_name": machine.gpu_name,
        "gpu_count": machine.gpu_count,
        "unified_memory": machine.unified_memory,
        "backend": machine.backend,
        "gpus": [_describe_device(each) for each in machine.gpus],
    }


def _describe_device(device: MachineDevice) -> dict[str, Any]:
    return {
        "name": device.name,
        "vram_gb": device.vram_gb,
        "free_vram_gb": device.free_vram_gb,
        "backend": device.backend,
        "count": device.count,
        "unified_memory": device.unified_memory,
        "memory_bandwidth_gbps": device.memory_bandwidth_gbps,
    }
