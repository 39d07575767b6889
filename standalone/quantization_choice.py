"""The choice among the quantizations of a model, for the memory of this machine; pure functions."""

from collections.abc import Sequence
from typing import Final

from msgspec import structs

from artifacts.inspect import Inspection
from artifacts.quantized_models import QuantizedModel
from crds.serving import LEAST_CONTEXT, ServingOptions
from crds.size import size_text
from fitness.memory import Workload, estimate

_USEFUL_CONTEXT: Final = 16_384
"""A quantization with room for so many tokens is preferred to a better one with room for fewer."""
_ENGINE: Final = "llama.cpp"


def choose_quantization(
    models: Sequence[QuantizedModel], header: Inspection, budget_bytes: int
) -> tuple[QuantizedModel, str]:
    """Return the best model that fits into the memory, and the reason in words; the smallest if none fits.

    Of quantized weights the largest are the best; weights of 16 bits, twice as large as Q8_0, answer no better.

    Args:
        models: the models to choose from, the largest first; at least one.
        header: what the header of one of them states: the layers of all are the same.
        budget_bytes: the memory.
    """
    quantized = [model for model in models if model.is_quantized] or list(models)
    room = size_text(budget_bytes).replace(".0 ", " ")
    for context in (_USEFUL_CONTEXT, LEAST_CONTEXT):
        for model in quantized:
            layout = header.layout and structs.replace(header.layout, tensor_bytes=model.size_bytes)
            sized = structs.replace(header, layout=layout, size_bytes=model.size_bytes)
            if is_held(sized, budget_bytes, context):
                return model, f"the best that fits {room}"
    return quantized[-1], f"the smallest, as none fits {room}"


def is_held(inspection: Inspection, budget_bytes: int, context: int) -> bool:
    """Return whether the memory holds a GGUF model with so many tokens of context, or all that it was trained for.

    A model whose layout is not known is taken to need a quarter more than its weights.
    """
    options = ServingOptions(context_length=min(context, inspection.gguf.context_length or context), parallel=1)
    estimated = estimate(Workload(inspection.layout, _ENGINE), options)
    needed = inspection.size_bytes * 5 // 4 if estimated is None else estimated.total_bytes
    return needed <= budget_bytes
