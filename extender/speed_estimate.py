"""The estimate of the speed of a served model, where it was not measured."""

from extender.subject import ServedModel
from fitness.corrections import CorrectionSource
from fitness.serving_devices import ServingDevices
from fitness.speed import estimate_speed, find_active_share


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
    share = find_active_share(served.model)
    estimate = estimate_speed(
        *(status.layout, served.service.spec, served.runtime, devices, corrections), active_share=share
    )
    return estimate.generation.expected if estimate is not None else None
