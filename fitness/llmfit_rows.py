"""The hardware of a machine, and the fit of a model on it, in the keys of `llmfit serve`, for its clients."""

from collections.abc import Mapping
from typing import Any, Final

from msgspec import structs

from crds.size import GIB
from fitness.fit import Fit
from fitness.machine_facts import MachineFacts
from fitness.speed import RunMode

_GIGA: Final = 1e9
_RUN_MODES: Final[Mapping[RunMode, tuple[str, str]]] = {"accelerator": ("gpu", "GPU"), "cpu": ("cpu_only", "CPU")}
"""Name and label of each run mode in llmfit's words."""


def describe_system(machine: MachineFacts) -> dict[str, Any]:
    """Return the hardware of a machine in the keys of `llmfit serve`: sizes in GiB, one entry for devices alike."""
    return {
        **structs.asdict(machine),
        # With unified memory, as on a Mac, the GPU uses the RAM; else the free memory is that of each entry below.
        "gpu_available_gb": machine.available_ram_gb if machine.unified_memory else None,
        "gpus": [structs.asdict(device) for device in machine.gpus],
    }


def build_row(
    fit: Fit, runtime: str, context_length: int, parameters: int | None, *, is_moe: bool, **names: str
) -> dict[str, Any]:
    """Return a model with its fit on one machine, as a row of llmfit, a peer program.

    Args:
        fit: the fit.
        runtime: the engine that serves it.
        context_length: context of each request.
        parameters: its number of parameters; None: unknown.
        is_moe: it has experts.
        names: name, title and source of the model, and other names that the row has.
    """
    # llmfit's name and label of the run mode.
    mode, mode_label = _RUN_MODES[fit.run_mode]
    billions = None if parameters is None else round(parameters / _GIGA, 2)

    # How fast, and whether that was measured here; None: unknown.
    speed = fit.speed
    is_measured = speed is not None and speed.method == "measured"
    confidence = "measured_local" if is_measured else "estimated"
    expected = round(speed.generation.expected, 1) if speed else None

    return {
        **names,
        "parameter_count": "" if billions is None else f"{billions:g}B",
        "params_b": billions,
        "is_moe": is_moe,
        "effective_context_length": context_length,
        "fit_level": fit.level,
        "fit_label": fit.level.replace("_", " ").capitalize(),
        "run_mode": mode,
        "run_mode_label": mode_label,
        # llmfit writes names of runtimes without dots: llamacpp.
        "runtime": runtime.replace(".", ""),
        "runtime_label": runtime,
        "memory_required_gb": round(fit.needed_bytes / GIB, 2),
        "memory_available_gb": round(fit.available_bytes / GIB, 2),
        "utilization_pct": round(100 * fit.utilization, 1) if fit.available_bytes else None,
        "estimated_tps": expected,
        "prefill_tps": round(speed.prompt.expected, 1) if speed and speed.prompt else None,
        "measured_tps": expected if is_measured else None,
        "estimate_confidence": confidence if speed is not None else "unsupported",
        "notes": [note for note in (fit.shortfall, speed.basis if speed else "") if note],
    }
