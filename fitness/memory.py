"""How much memory serving an artifact takes, before it is loaded anywhere.

One estimator for the controller, a pod's request and the agent's admission, so that they agree. It counts what an
engine holds at most, after prompts of the full context on every slot: on a Mac Metal wires all of it, so that none can
be paged out, and on Linux it is the resident size. When a part is not known the estimate is unknown too, and the caller
must not place the model. It is held against llama.cpp itself: a few rows by `tests/hosts/test_memory_estimate.py`, a
whole table by `benchmarks/memory_estimate.py`.
"""

import math
from typing import Final, NamedTuple

from crds.inferenceservice import InferenceServiceSpec
from crds.metalprocess import MetalProcessSpec
from crds.model import Layout
from crds.serving import Role
from crds.size import size_text
from fitness import llama_cpp, mlx
from fitness.parts import PART_NAMES, Parts, Settings

_LLAMA_CPP: Final = frozenset({"llama.cpp", "llama-cpp-python", "ollama"})
_MLX: Final = frozenset({"mlx-lm", "omlx"})
_LEAST_CONTEXT: Final = 512
"""A smaller context is not worth proposing."""
_CONTEXT_STEP: Final = 256
"""llama.cpp pads to it, and MLX grows its cache by it."""

_LEAST_QUANTIZATION_SHARE: Final = 0.125
"""From 16 bits a weight to 2, the fewest that are in use."""


class Estimate(NamedTuple):
    """Bytes that one replica takes."""

    parts: Parts
    draft: Parts | None = None

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return sum(self.parts) + (sum(self.draft) if self.draft else 0)

    def text(self) -> str:
        """Name the parts for a person, the largest first."""
        named = list(zip(PART_NAMES, self.parts, strict=True))
        if self.draft:
            named.append(("the draft", sum(self.draft)))
        named.sort(key=lambda part: -part[1])
        return ", ".join(f"{size_text(size_bytes)} {name}" for name, size_bytes in named if size_bytes)


def settings_of(spec: InferenceServiceSpec | MetalProcessSpec, *, runtime: str, further_bytes: int = 0) -> Settings:
    """Read the settings of a service, or of one of its processes: they agree. `further_bytes` as in `Settings`."""
    return Settings(
        context_length=spec.context_length,
        parallel=spec.parallel,
        mode=spec.mode,
        cache_type_k=spec.cache_type_k,
        cache_type_v=spec.cache_type_v,
        runtime=runtime,
        extra=tuple(spec.extra_args),
        further_bytes=further_bytes,
    )


def estimate(layout: Layout | None, settings: Settings, draft: Layout | None = None) -> Estimate | None:
    """Compute what one replica takes, or None when it cannot be known.

    Args:
        layout: what the artifact's header tells; None when it does not tell all.
        settings: how it is served.
        draft: the same of the model that guesses ahead, where there is one. A caller that has one but does not know its
            layout has no estimate either.
    """
    if layout is None:
        return None
    if settings.runtime in _LLAMA_CPP:
        compute = llama_cpp.parts
    elif settings.runtime in _MLX:
        compute = mlx.parts
    else:
        return None
    own = compute(layout, settings)
    if draft is None:
        return Estimate(own)
    # It shares the engine's process, and loads nothing beside its own weights.
    beside = compute(draft, settings._replace(further_bytes=0))
    return Estimate(own, beside._replace(engine_bytes=0))


def further_bytes(role: Role, size_bytes: int | None) -> int | None:
    """Return what a projector or an adapter of this size takes beside the model; None when its size is not known.

    A projector's graph depends on what it sees, and no key of its header tells it: as much as its weights is assumed
    for the buffers of one image, and what is seen in use corrects that.
    """
    if size_bytes is None:
        return None
    return 2 * size_bytes if role == "projector" else size_bytes


def largest_context(
    layout: Layout | None, settings: Settings, limit_bytes: int, draft: Layout | None = None
) -> int | None:
    """Return the longest context, shorter than the settings', with which a replica fits into `limit_bytes`; None: none.

    The estimate never falls with a longer context (a property test holds that), so halving finds it.
    """

    def fits(steps: int) -> bool:
        found = estimate(layout, settings._replace(context_length=steps * _CONTEXT_STEP), draft)
        return found is not None and found.total_bytes <= limit_bytes

    low, high = _LEAST_CONTEXT // _CONTEXT_STEP, (settings.context_length - 1) // _CONTEXT_STEP
    if high < low or not fits(low):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low * _CONTEXT_STEP


def way_out(layout: Layout | None, settings: Settings, limit_bytes: int, draft: Layout | None = None) -> str:
    """Say what would fit into `limit_bytes`, for a person: a shorter context, else fewer requests or fewer bits."""
    context = largest_context(layout, settings, limit_bytes, draft)
    if context is not None:
        return f"a contextLength of {context} would fit"
    needed = estimate(layout, settings, draft)
    if layout is None or needed is None:
        return "lower contextLength or parallel, or use a smaller quantization"
    smaller = settings._replace(context_length=min(_LEAST_CONTEXT, settings.context_length), parallel=1)
    changes = [f"a contextLength of {_LEAST_CONTEXT}"] if smaller.context_length < settings.context_length else []
    changes += ["a parallel of 1"] if settings.parallel > 1 else []
    for found, more in ((needed, []), (estimate(layout, smaller, draft), changes)):
        rest_bytes = found.total_bytes - found.parts.weights_bytes if found else limit_bytes
        share = (limit_bytes - rest_bytes) / layout.tensor_bytes if layout.tensor_bytes else 0
        if share >= 1 and more:
            return f"{' and '.join(more)} would fit"
        if share >= _LEAST_QUANTIZATION_SHARE:
            fewer_bits = f"a quantization with weights of at most {min(99, math.floor(100 * share))}% of the size"
            return f"{' and '.join([fewer_bits, *more])} would fit"
    return "no quantization of this model would fit: use a smaller model or a larger host"
