"""The serving options of a service that does not state them, chosen from the model and the machines that it may use.

`docs/defaults.md` has the rules: first the context, then the requests at once, then memory for earlier conversations.
What is reserved beyond that context, and the short requests beside it, fits into every machine that holds these.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from msgspec import structs

from crds.serving import LEAST_CONTEXT, ServingOptions
from crds.size import GIB, MIB, divide_up
from fitness.memory import Workload, compute_need, estimate_pod
from runtimes.registry import find_runtime
from runtimes.runtime import Runtime, RuntimeDemand
from runtimes.serving import SHARED_REQUESTS

_CONTEXTS: Final = (65_536, 32_768, 16_384, 8_192, LEAST_CONTEXT)
"""The first is for large machines. Ollama's documentation asks at least 64,000 tokens for agents."""
_LARGE_BYTES: Final = 44 * GIB
"""Memory of devices or of a host from which the largest context is chosen: what programs get of 48 GB (46,068 MiB of an
L40S, whose memory corrects errors)."""
_SHORTEST_CONTEXT: Final = 128
"""The least that a service may state."""
_LONGEST_TEXT: Final = 8_192
"""Context of embeddings and rankings: each text is one batch, whose buffers grow with the context."""
_WHOLE_CONTEXTS: Final = 4
_SEQUENCES: Final = (256, 128, 64, 32, 16, 8, 4, 2, 1)
"""Limits that are tried if the buffers of the engine's own choice do not fit."""
_SEQUENCES_OF_UNKNOWN: Final = 32
"""The limit if memory is not known: vLLM needs a state for each (a hybrid model of 35B had 95 of them in 48 GiB)."""


class AllowedMachine(NamedTuple):
    """A device, host or node that a service may use, with what an engine loads there."""

    workload: Workload
    memory_bytes: int
    """Memory of each device, of the host for models, or of the node."""
    devices: int = 0
    """Devices of a replica; 0: it runs on a host or a processor."""
    node_bytes: int = 0
    """Memory of the node of a pod, beside devices the part for these; 0: unknown, or it is a host."""

    @property
    def runtime(self) -> Runtime:
        """The engine."""
        return find_runtime(self.workload.runtime)

    @property
    def is_large(self) -> bool:
        """True if devices or host have so much memory that the largest context is chosen."""
        is_processor = not self.devices and self.node_bytes > 0
        return not is_processor and self.memory_bytes * max(1, self.devices) >= _LARGE_BYTES

    def find_need(self, options: ServingOptions) -> int | None:
        """Return the bytes that a replica takes of `memory_bytes`; None: unknown."""
        need = compute_need(self.workload, options, self.devices)
        return None if need is None else need.total_bytes

    def holds(self, options: ServingOptions) -> bool:
        """Return whether it has the memory; a replica of unknown memory is held."""
        need = self.find_need(options)
        return need is None or need <= self.memory_bytes

    def accepts(self, options: ServingOptions) -> bool:
        """Return whether its engine takes these options there, for example parallel beside a draft."""
        chosen, has_draft = self.workload.adapters_on_request, self.workload.draft is not None
        demand = RuntimeDemand("gguf", "", self.node_bytes > 0, options, draft=has_draft, adapters_on_request=chosen)
        return self.runtime.refusal(demand) is None

    def count_free_in_node(self, options: ServingOptions) -> int:
        """Return the bytes that a replica with devices leaves of the node's memory for them; below 0: it lacks some."""
        memory = estimate_pod(self.workload, options, self.devices) if self.node_bytes else None
        return self.node_bytes - (memory.container_bytes if memory is not None else 0)

    def affords(self, whole: ServingOptions, options: ServingOptions) -> bool:
        """Return whether its engine takes whole contexts in place of these options, and it has memory for them.

        A device has no other users. On a host or node, they take at most a quarter of what is free.
        """
        need, whole_need = self.find_need(options) or 0, self.find_need(whole) or 0
        share, is_in_node = (1, self.count_free_in_node(whole) >= 0) if self.devices else (4, True)
        return self.accepts(whole) and is_in_node and share * (whole_need - need) <= self.memory_bytes - need


def choose_options(
    stated: ServingOptions, trained_context: int | None, machines: Sequence[AllowedMachine]
) -> tuple[ServingOptions, str]:
    """Return the options with those chosen that are not stated, and the reasons in words.

    Args:
        stated: the options of the service.
        trained_context: the longest context that the model was trained for, in tokens; None: unknown.
        machines: those of each size that the service may use; none: unknown.
    """
    # One on which the memory of a replica is not known counts only if all are such.
    machines = [machine for machine in machines if machine.find_need(stated) is not None] or machines
    if trained_context is not None and trained_context < _SHORTEST_CONTEXT:
        trained_context = None  # no header of a model that serves

    # 1. The context, with the requests at once that take the least memory.
    shares_blocks = any(machine.runtime.cache_sharing == "blocks" for machine in machines)
    fewest = 1 if shares_blocks and stated.parallel is None else stated.parallel
    options, reason = _choose_context(structs.replace(stated, parallel=fewest), trained_context, machines)
    holding = [machine for machine in machines if machine.holds(options)]
    if not holding:
        return options, reason
    reasons = [reason]

    # 2. The requests at once.
    if stated.parallel is None:
        options, reason = _choose_parallel(options, holding, shares_blocks=shares_blocks)
        reasons.append(reason)

    # 3. The memory for earlier conversations.
    if options.prompt_cache is None:
        size_mib = divide_up(min(_propose_prompt_cache(options, machine) for machine in holding), MIB)
        options = structs.replace(options, prompt_cache=f"{size_mib}Mi" if size_mib else None)
    return options, "; ".join(reason for reason in reasons if reason)


def count_contexts(options: ServingOptions, machines: Sequence[AllowedMachine]) -> str:
    """Return how many whole contexts the cache of a paged engine holds on any of the machines, in words."""
    paged = [one for one in machines if one.runtime.cache_sharing == "blocks" and one.holds(options)]
    contexts = min((_count_whole_contexts(options, machine) for machine in paged), default=0)
    return f"its cache holds {contexts} such context{'s' if contexts > 1 else ''} or more" if contexts else ""


def _choose_context(
    stated: ServingOptions, trained_context: int | None, machines: Sequence[AllowedMachine]
) -> tuple[ServingOptions, str]:
    """Return the options with a context, and the reason for it; one request at a time is the last that is tried."""
    # The contexts that are tried, and why it is the first of them.
    if stated.context_length is not None:
        contexts, cause = [stated.context_length], "as stated"
    elif trained_context is None or (machines and machines[0].find_need(stated) is None):
        contexts = [min(LEAST_CONTEXT, trained_context or LEAST_CONTEXT)]
        cause = "that of the model, or its memory, is not known"
    else:
        is_large = any(machine.is_large for machine in machines)
        most = _LONGEST_TEXT if stated.mode != "chat" else _CONTEXTS[0] if is_large else _CONTEXTS[1]
        wanted = min(most, trained_context)
        contexts = [wanted, *(context for context in _CONTEXTS if context < wanted)]
        cause = "that of the model" if wanted == trained_context else f"the most that is chosen of {trained_context}"

    tried = [structs.replace(stated, context_length=context) for context in contexts]
    for options in (*tried, structs.replace(tried[-1], parallel=stated.parallel or 1)):
        if not machines or any(machine.holds(options) for machine in machines):
            return options, f"contextLength {options.context_length}: {cause}"
        cause = f"the most that an allowed machine holds of {trained_context}" if len(tried) > 1 else cause
    return options, f"contextLength {options.context_length}: no allowed machine holds even that"


def _choose_parallel(
    options: ServingOptions, machines: Sequence[AllowedMachine], *, shares_blocks: bool
) -> tuple[ServingOptions, str]:
    """Return the options with the requests at once that fit on every one of these machines, and the reason."""
    if machines[0].find_need(options) is None:  # then that on the others is not known, either
        parallel = _SEQUENCES_OF_UNKNOWN if shares_blocks else 1
        return structs.replace(options, parallel=parallel), f"parallel {parallel}: its memory is not known"

    # 1. A paged cache: the engine's own choice, or the largest limit whose buffers fit.
    if shares_blocks:
        limits = (structs.replace(options, parallel=parallel) for parallel in (None, *_SEQUENCES))
        limited = next(limit for limit in limits if all(machine.holds(limit) for machine in machines))
        return limited, f"parallel {limited.parallel}: buffers for more do not fit" if limited.parallel else ""

    # 2. Whole contexts, where they fit.
    if options.mode != "chat" or any("parallel" not in machine.runtime.settings for machine in machines):
        return options, ""
    whole = structs.replace(options, parallel=_WHOLE_CONTEXTS)
    if all(machine.affords(whole, options) for machine in machines):
        return whole, f"parallel {_WHOLE_CONTEXTS}: so many whole contexts fit"

    # 3. One of any length, and short ones beside it.
    shared_tokens = {machine.runtime.count_shared_tokens(options) for machine in machines}
    if None in shared_tokens:
        return structs.replace(options, parallel=1), "parallel 1: there is no memory for more"
    tokens = f"one of any length, and short ones of {shared_tokens.pop()} tokens in all"
    return options, f"{SHARED_REQUESTS} requests at once: {tokens}"


def _propose_prompt_cache(options: ServingOptions, machine: AllowedMachine) -> int:
    """Return the bytes for earlier conversations on a machine; beside devices the memory of the node counts."""
    need, layout, runtime = machine.find_need(options), machine.workload.layout, machine.runtime
    is_taken = "prompt cache" in runtime.settings and machine.accepts(structs.replace(options, prompt_cache="1Mi"))
    if layout is None or need is None or options.mode != "chat" or not is_taken:
        return 0
    free_bytes = machine.count_free_in_node(options) if machine.devices else machine.memory_bytes - need
    return runtime.memory.propose_prompt_cache(layout, options, max(0, free_bytes))


def _count_whole_contexts(options: ServingOptions, machine: AllowedMachine) -> int:
    """Return how many whole contexts the cache of a paged engine holds at least: on a processor, it is made for one."""
    memory = estimate_pod(machine.workload, options, machine.devices)
    if memory is None or memory.device is None or memory.device_bytes_each is None:
        return 1
    # Each has its cache, of the share of the device that the engine uses.
    each_bytes = memory.device.parts.cache_bytes * memory.device_bytes_each // memory.device.total_bytes
    # One less than by the estimate: on a large device, engines have larger buffers.
    return max(1, (machine.memory_bytes - memory.device_bytes_each) // max(1, each_bytes))
