"""Estimator of the memory that serving an artifact takes, before it is loaded anywhere.

The controller, a pod's request and the agent's admission use this one estimator, so that they agree. It counts the
most that an engine holds, after prompts of the full context on every slot: on a Mac Metal wires all of it, so that none
can be paged out, and on Linux it is the resident size. When a part is unknown the estimate is unknown too, and the
caller must not place the model. `tests/hosts/test_memory_estimate.py` compares a few rows with llama.cpp itself, and
`benchmarks/memory_estimate.py` a whole table.
"""

import math
from typing import Final, NamedTuple

from msgspec import structs

from crds.model import Layout
from crds.serving import Role, ServingOptions
from crds.size import size_text
from fitness import llama_cpp, mlx
from fitness.parts import PART_NAMES, Parts

_LLAMA_CPP: Final = frozenset({"llama.cpp", "llama-cpp-python", "ollama"})
_MLX: Final = frozenset({"mlx-lm", "omlx"})
_LEAST_CONTEXT: Final = 512
"""A smaller context is not worth proposing."""
_CONTEXT_STEP: Final = 256
"""llama.cpp pads the context to a multiple of it, and MLX grows its cache by it."""

_TOLERANCE: Final = 0.9
"""Another version of Pomona may estimate a little less."""
_LEAST_QUANTIZATION_SHARE: Final = 0.125
"""2 bits a weight, the fewest in use, instead of 16."""


class Workload(NamedTuple):
    """The artifacts that one engine loads, as far as memory depends on them."""

    layout: Layout | None
    """Layout of the model, from the artifact's header; None if the header lacks a part of it."""
    runtime: str = "llama.cpp"
    draft: Layout | None = None
    """Layout of the draft model. The caller must not estimate with a draft of unknown layout."""
    further_bytes: int = 0
    """Bytes of projector and adapters, as `further_bytes` returns them."""


class Estimate(NamedTuple):
    """Bytes that one replica takes."""

    parts: Parts
    draft: Parts | None = None

    @property
    def total_bytes(self) -> int:
        """Return the sum of all parts."""
        return sum(self.parts) + (sum(self.draft) if self.draft else 0)

    def text(self) -> str:
        """Return the parts for a message, the largest first."""
        named = list(zip(PART_NAMES, self.parts, strict=True))
        if self.draft:
            named.append(("the draft", sum(self.draft)))
        named.sort(key=lambda part: -part[1])
        return ", ".join(f"{size_text(size_bytes)} {name}" for name, size_bytes in named if size_bytes)


def estimate(workload: Workload, options: ServingOptions) -> Estimate | None:
    """Compute the memory of one replica that serves `workload` with `options`; None when it cannot be known."""
    if workload.layout is None:
        return None
    own = _estimate_parts(workload.layout, options, workload.runtime)
    if own is None:
        return None
    own = own._replace(further_bytes=workload.further_bytes)
    if workload.draft is None:
        return Estimate(own)
    # A draft shares the engine's process, so the engine is counted once.
    draft = _estimate_parts(workload.draft, options, workload.runtime)
    return Estimate(own, draft and draft._replace(engine_bytes=0))


def is_understated(stated_bytes: int, needed_bytes: int) -> bool:
    """Return whether a stated memory is clearly less than what the estimate says, so that it must not be believed."""
    return stated_bytes < needed_bytes * _TOLERANCE


def _estimate_parts(layout: Layout, options: ServingOptions, runtime: str) -> Parts | None:
    if runtime in _LLAMA_CPP:
        return llama_cpp.estimate_parts(layout, options, runtime)
    return mlx.estimate_parts(layout, options) if runtime in _MLX else None


def further_bytes(role: Role, size_bytes: int | None) -> int | None:
    """Return the bytes that a projector or an adapter of this size adds to the model; None when its size is not known.

    A projector's graph depends on its input, and no key of its header describes it: the buffers of one image are
    assumed to be as large as the weights, and the memory measured in use corrects this estimate.
    """
    if size_bytes is None:
        return None
    return 2 * size_bytes if role == "projector" else size_bytes


def largest_context(workload: Workload, options: ServingOptions, limit_bytes: int) -> int | None:
    """Return the longest context, shorter than that of `options`, that fits into `limit_bytes`, or None.

    The estimate never falls with a longer context (a property test checks this), so a binary search finds it.
    """

    def fits(steps: int) -> bool:
        found = estimate(workload, structs.replace(options, context_length=steps * _CONTEXT_STEP))
        return found is not None and found.total_bytes <= limit_bytes

    low, high = _LEAST_CONTEXT // _CONTEXT_STEP, (options.context_length - 1) // _CONTEXT_STEP
    if high < low or not fits(low):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low * _CONTEXT_STEP


def way_out(workload: Workload, options: ServingOptions, limit_bytes: int) -> str:
    """Return a message with a change to fit into `limit_bytes`: a shorter context, else fewer requests or bits."""
    layout, context = workload.layout, largest_context(workload, options, limit_bytes)
    if context is not None:
        return f"a contextLength of {context} would fit"
    needed = estimate(workload, options)
    if layout is None or needed is None:
        return "lower contextLength or parallel, or use a smaller quantization"
    smaller = structs.replace(options, context_length=min(_LEAST_CONTEXT, options.context_length), parallel=1)
    changes = [f"a contextLength of {_LEAST_CONTEXT}"] if smaller.context_length < options.context_length else []
    changes += ["a parallel of 1"] if options.parallel > 1 else []
    for found, more in ((needed, []), (estimate(workload, smaller), changes)):
        rest_bytes = found.total_bytes - found.parts.weights_bytes if found else limit_bytes
        share = (limit_bytes - rest_bytes) / layout.tensor_bytes if layout.tensor_bytes else 0
        if share >= 1 and more:
            return f"{' and '.join(more)} would fit"
        if share >= _LEAST_QUANTIZATION_SHARE:
            fewer_bits = f"a quantization with weights of at most {min(99, math.floor(100 * share))}% of the size"
            return f"{' and '.join([fewer_bits, *more])} would fit"
    return "no quantization of this model would fit: use a smaller model or a larger host"
