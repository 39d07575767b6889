"""The estimate of the speed of a served model, where it was not measured."""

from extender.subject import ServedModel
from fitness.corrections import CorrectionSource
from fitness.serving_devices import ServingDevices
from fitness.speed import estimate_speed


def estimate_tokens_per_second(
    served: ServedModel, devices: ServingDevices, corrections: CorrectionSource
) -> float | None:
    """Return the expected tokens a second of one stream; None: layout or bandwidth are not known.

    Args:
        served: the model, and its service.
        devices: devices of one replica.
        corrections: what measurements of other models say, as far as they count in its namespace.
    """
    status = served.model.status
    if status.layout is None:
        return None
    total, active = status.total_parameters, status.active_parameters
    found = estimate_speed(
        *(status.layout, served.service.spec, served.runtime, devices, corrections),
        active_share=active / total if total and active else None,
    )
    return found.generation.expected if found is not None else None
