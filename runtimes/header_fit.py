"""The refusal of what the headers of the weights show that an engine cannot serve, or would serve without meaning.

An engine finds the same only after it has loaded the weights, and says it in its log; a model that is ranked with
without a head that scores answers numbers that mean nothing. What a header does not state is left to the engine.
"""

from typing import Final

from crds.serving import CacheType, Mode
from runtimes.llama_estimate import find_last_value
from runtimes.runtime import Runtime, RuntimeDemand

_WHOLE_TYPES: Final[frozenset[CacheType]] = frozenset({"f32", "f16", "bf16"})
"""Types of a cache without blocks."""
_PROJECTOR: Final = "clip"
"""Architecture of a file that turns pictures or sound into embeddings of a model."""
_TEXT_POOLING: Final = ("mean", "cls", "last")
_OFF: Final = ("off", "0", "false", "disabled")
_MODES: Final[tuple[Mode, ...]] = ("chat", "embeddings", "rerank")


def refuse_header(runtime: Runtime, demand: RuntimeDemand) -> str | None:
    """Return why the headers of the weights rule `demand` out, with the field and the remedy; None if they do not."""
    checks = (_refuse_mode, _refuse_cache_types, _refuse_companions)
    reasons = (check(runtime, demand) for check in checks)
    return next((reason for reason in reasons if reason is not None), None)


def _refuse_mode(runtime: Runtime, demand: RuntimeDemand) -> str | None:
    """Return why the weights are not made for the mode of the service, or None if they are or that is unknown.

    A model makes embeddings if it pools: its vectors of the tokens become one of the text. The header states how, or
    the user does in extraArgs. A model ranks texts if it has a head that scores them.
    """
    # `made_for`: modes that the header shows; empty: unknown.
    mode, made_for = demand.options.mode, demand.header.modes
    pooling = find_last_value(demand.options.extra_args, {"--pooling"})
    if mode == "rerank" and pooling not in {None, "rank"}:
        return f"--pooling {pooling} in extraArgs turns mode rerank off: remove it"

    # _TEXT_POOLING: mean, cls and last, each of which makes one vector of a text.
    is_pooling_stated = mode == "embeddings" and pooling in _TEXT_POOLING
    if not made_for or mode in made_for or is_pooling_stated:
        return None

    # The weights are not made for this mode: name those for which they are, and that the engine has.
    modes = " or ".join(fitting for fitting in _MODES if fitting in made_for and fitting in runtime.modes)
    way_out = f"set mode to {modes}, or name a Model for {mode}" if modes else f"name a Model for {mode}"
    if mode == "chat":
        return f"the header of the weights shows a model that generates no text: {way_out}"
    if mode == "rerank":
        return (
            "the header of the weights has no head that scores (such as the tensors cls.weight or cls.output.weight of "
            f"a GGUF file), so mode rerank would answer numbers without meaning: {way_out}"
        )
    # This engine takes no --pooling, so the user cannot state one.
    if "--pooling" not in runtime.tuning:
        return f"the header of the weights states no pooling, which mode embeddings takes: {way_out}"
    return (
        f"the header of the weights states no pooling, which mode embeddings takes: set extraArgs to [--pooling, mean] "
        f"(or cls or last, as the model was trained), or {way_out}"
    )


def _refuse_cache_types(runtime: Runtime, demand: RuntimeDemand) -> str | None:
    """Return why the model cannot have this type of cache, or None.

    A quantized cache keeps whole blocks of elements, so that the blocks must divide the elements of an attention head.
    Quantized values need flash attention as well.
    """
    options, block = demand.options, runtime.cache_block_size
    if block == 1:  # the engine itself says which heads it can cache
        return None

    # 1. Quantized values need flash attention.
    is_flash_off = find_last_value(options.extra_args, {"-fa", "--flash-attn"}) in _OFF
    # _WHOLE_TYPES: f32, f16 and bf16, which have no blocks.
    if is_flash_off and options.cache_type_v not in _WHOLE_TYPES:
        return (
            f"cacheTypeV {options.cache_type_v} needs flash attention, which extraArgs turn off: set cacheTypeV to "
            "f16, or remove -fa off"
        )

    # 2. Blocks must divide the heads of the model, and of a draft, which speculates for it with a cache of the same
    # types.
    drafts = [("the draft", header) for role, header in demand.companion_headers if role == "draft"]
    for owner, header in [("the model", demand.header), *drafts]:
        heads = (
            # Without flash attention, llama.cpp takes keys of any size.
            ("cacheTypeK", options.cache_type_k, None if is_flash_off else header.key_head_size),
            ("cacheTypeV", options.cache_type_v, header.value_head_size),
        )
        for field, cache_type, size in heads:
            if cache_type not in _WHOLE_TYPES and size and size % block:
                return (
                    f"{field} {cache_type} keeps blocks of {block} elements, which do not divide the heads of {owner} "
                    f"with {size} elements: set {field} to f16"
                )
    return None


def _refuse_companions(_runtime: Runtime, demand: RuntimeDemand) -> str | None:
    """Return why a GGUF file is not the model, projector, draft or adapter that the service takes it for, or None.

    The companions of a model are the further files that its engine loads: a projector for pictures or sound, a draft
    that proposes tokens, and adapters.
    """
    if demand.format != "gguf":
        return None

    # The model itself.
    architecture = demand.header.architecture
    # _PROJECTOR (clip): a file that turns pictures or sound into embeddings of a model.
    if architecture == _PROJECTOR:
        return "the weights are a projector, not a model: name them in projectorModelRef of a service of their model"

    # An empty architecture is not known.
    for role, header in demand.companion_headers:
        if role == "projector" and header.architecture not in {"", _PROJECTOR}:
            return (
                f"projectorModelRef names a model of architecture {header.architecture}, not a projector: name a Model "
                "whose source is the mmproj file that belongs to the model"
            )
        if role == "draft" and header.architecture == _PROJECTOR:
            return "speculative.draftModelRef names a projector: name a smaller model of the same tokenizer"
        if role == "adapter" and architecture and header.architecture not in {"", architecture}:
            return (
                f"adapters has an adapter for architecture {header.architecture}, and the model is of architecture "
                f"{architecture}: name an adapter that was trained for this model"
            )
    return None
