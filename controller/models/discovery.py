"""Discovery labels: what a Model or a service can do, derived from its spec and status, for `kubectl get -l`.

They are recomputed as a whole, so what no longer holds is removed. A label that says "at least" or "at most" is
cumulative: one label for each threshold that holds. So `-l inference.pomona.dev/vram-tier-20-g` finds everything that
needs 20 GiB or less, a model of 18 GiB too, and `-l inference.pomona.dev/context-64-k` all that take 64,000 tokens.
A dash parts each number from its unit: kubectl prints labels in no lasting order where one number begins like another
and a letter follows, as 8g and 80g, so that `kubectl diff` would report objects that nobody has changed.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from controller.models.served import default_runtime, format_of
from crds.inferenceservice import InferenceService
from crds.meta import GROUP
from crds.model import Model, ModelSpec
from crds.serving import RuntimeName, ServingOptions
from crds.size import GIB, count_text
from crds.weights_header import GGUF, Layout
from devices.vendors import Vendors
from fitness.memory import Workload, estimate

TRUE: Final = "true"

_CONTEXTS: Final = {
    **{f"{thousands}-k": thousands * 1000 for thousands in (32, 64, 128, 256, 512)},
    **{f"{millions}-m": millions * 1_000_000 for millions in (1, 2, 4, 10)},
}
"""Thresholds of the context length in tokens; a model of 32,000 and one of 32,768 tokens both have context-32-k."""
_TIERS_GIB: Final = (8, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 192, 256, 512)
"""Memory of devices in common use."""
_LONGEST_VALUE: Final = 63
_UNUSABLE: Final = re.compile(r"[^A-Za-z0-9._-]+")


def list_labels(
    spec: ModelSpec,
    *,
    context_length: int | None = None,
    memory_bytes: int | None = None,
    has_experts: bool | None = None,
    **values: str,
) -> dict[str, str]:
    """Return all discovery labels of an object; one whose value is not known is left out.

    Args:
        spec: that of the Model.
        context_length: tokens, the most that the model was trained for, or that the service serves.
        memory_bytes: memory that one replica takes.
        has_experts: whether it is a mixture of experts.
        values: further labels, whose names have a dash for each underscore; empty: it is not known.
    """
    # Labels whose value is "true".
    names = [
        *(f"domain-{domain}" for domain in spec.domains),
        *(f"language-{language}" for language in spec.languages),
        *(f"capability-{capability}" for capability in spec.capabilities),
        # One for each bound of a context that it reaches, and for each size of devices that is enough for it.
        *(f"context-{name}" for name, least in _CONTEXTS.items() if (context_length or 0) >= least),
        *(f"vram-tier-{tier}-g" for tier in _TIERS_GIB if memory_bytes is not None and memory_bytes <= tier * GIB),
    ]

    # Labels with a value of their own.
    values = {"model_type": describe_type(spec, has_experts=has_experts)} | values
    stated = {name.replace("_", "-"): label_value(value) for name, value in values.items()}
    labels = dict.fromkeys(names, TRUE) | {name: value for name, value in stated.items() if value}
    return {f"{GROUP}/{name}": value for name, value in labels.items()}


def describe_type(spec: ModelSpec, *, has_experts: bool | None) -> str:
    """Return Dense, MoE, DenseThinking or MoEThinking; empty if neither the spec nor the artifact says it."""
    if spec.model_type is not None:
        return spec.model_type
    if has_experts is None:
        return ""
    return f"{'MoE' if has_experts else 'Dense'}{'Thinking' if spec.thinking else ''}"


def label_value(text: str) -> str:
    """Return the text as a valid value of a label; other characters become `-`, and what is too long is cut off."""
    return _UNUSABLE.sub("-", text)[:_LONGEST_VALUE].strip("-_.")


def describe_parameters(spec: ModelSpec, inspected_total: int | None, inspected_active: int | None) -> str:
    """Return the numbers of parameters in readable form, stated or else inspected; empty if they are not known."""
    total, active = spec.total_parameters or inspected_total, spec.active_parameters or inspected_active
    if total is None:
        return ""
    return f"{count_text(total)} of which {count_text(active)} are active" if active else count_text(total)


def label_model(model: Model, status: Mapping[str, Any], vendors: Vendors) -> dict[str, str]:
    """Return the discovery labels of a Model whose status is about to be written.

    The memory is what the Model states, else what a service that states nothing but this Model would need.
    """
    # The header as `status`, which is about to be written, has it; model.status is the one before.
    gguf = msgspec.convert(status.get("gguf") or {}, GGUF)
    layout = msgspec.convert(status.get("layout"), Layout | None)

    memory_bytes = model.spec.stated_bytes
    if memory_bytes is None:  # not stated: it is estimated, and None if it cannot be
        needed = estimate(Workload(layout, default_runtime(model, vendors)), ServingOptions(parallel=1))
        memory_bytes = needed.total_bytes if needed else None
    return list_labels(
        model.spec,
        context_length=gguf.context_length,
        memory_bytes=memory_bytes,
        has_experts=layout.expert_outputs > 0 if layout else None,
        quantization=gguf.quantization,
        format=format_of(model) if status.get("file") or status.get("gguf") else "",
        accelerator_vendor=model.spec.hardware.accelerator,
    )


def label_service(
    service: InferenceService, model: Model, accelerator: str, engine: RuntimeName, memory_bytes: int | None
) -> dict[str, str]:
    """Return the discovery labels of a service: those of its Model, with its own context, memory, place and engine."""
    layout, gguf = model.status.layout, model.status.gguf or GGUF()
    return list_labels(
        model.spec,
        context_length=service.spec.context_tokens,
        memory_bytes=memory_bytes,
        has_experts=layout.expert_outputs > 0 if layout else None,
        quantization=gguf.quantization,
        format=format_of(model),
        accelerator_vendor=accelerator,
        engine=engine,
    )
