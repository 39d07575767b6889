"""Estimator of the memory that serving an artifact takes, before it is loaded anywhere.

The controller, a pod's request and the agent's admission use this one estimator, so that they agree. It counts the
most that an engine holds, after prompts of the full context on every slot: on a Mac Metal wires all of it, so that none
can be paged out, and on Linux it is the resident size. In a pod with devices, the memory of the container and that of
each device are two figures. When a part is unknown the estimate is unknown too, and the caller must not place the
model. `tests/hosts/test_memory_estimate.py` compares a few rows with llama.cpp itself, and
`benchmarks/memory_estimate.py` a whole table.
"""

import math
from typing import Final, NamedTuple

from msgspec import structs

from crds.serving import Role, ServingOptions
from crds.size import MIB, divide_up, size_text
from crds.weights_header import Layout
from runtimes.engine_estimate import PART_NAMES, DeviceParts, Parts
from runtimes.registry import find_runtime

_UNUSABLE_DEVICE_BYTES: Final = 450 * 2**20
"""Memory of a device that labels count and programs do not get: 81,559 MiB are 79.22 GiB for a program on an H100 (vLLM
pull request 10511), and 24,576 MiB are 23.58 GiB on an RTX 3090 (vLLM issue 10517)."""
_UNKNOWN: Final = Layout(
    tensor_bytes=0,
    vocabulary_size=262_144,
    embedding_size=5376,
    attention_size=0,
    head_count=0,
    feed_forward_size=0,
    layers=[],
)
"""Stands for a header without a layout when the container beside devices is estimated, which keeps what depends on the
vocabulary: that of Gemma 3 27B, the largest in wide use. The stated memory takes the place of the tensors."""
_LEAST_CONTEXT: Final = 512
"""A smaller context is not worth proposing."""
_CONTEXT_STEP: Final = 256
"""llama.cpp pads the context to a multiple of it, and MLX grows its cache by it."""
_DEVICE_COUNTS: Final = (2, 4, 8, 16)
"""Numbers of devices that are worth proposing."""

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
    adapters_on_request: bool = False
    """True if requests choose adapters, which some settings exclude."""
    stated_bytes: int | None = None
    """Memory that the whole replica takes according to its user; None: nothing is stated. Only `estimate_pod` with
    devices reads it."""
    quantization: str = ""
    """Quantization of the weights, as a Model's status states it; empty: unknown. The memory does not depend on it, but
    the devices that can serve them do."""


class Estimate(NamedTuple):
    """Bytes that one replica takes."""

    parts: Parts
    draft: Parts | None = None

    @property
    def total_bytes(self) -> int:
        """Return the sum of all parts."""
        return sum(self.parts) + (sum(self.draft) if self.draft else 0)

    def text(self) -> str:
        """Return the sizes of the parts for a message, the largest first; parts of size 0 are left out."""
        sizes = dict(zip(PART_NAMES, self.parts, strict=True))
        if self.draft:
            sizes["the draft"] = sum(self.draft)
        largest_first = sorted(sizes, key=lambda name: sizes[name], reverse=True)
        return ", ".join(f"{size_text(sizes[name])} {name}" for name in largest_first if sizes[name])


def estimate(workload: Workload, options: ServingOptions) -> Estimate | None:
    """Return the memory of one replica that serves `workload` with `options`, on a host or in a pod without devices.

    A draft model, a small one that proposes tokens to the large one, is counted beside it.

    None: the layout, which is the sizes of the layers by the artifact's header, is unknown, or the engine has no
    formula for one of the layers.
    """
    if workload.layout is None:
        return None
    memory = find_runtime(workload.runtime).memory
    parts = memory.estimate_parts(workload.layout, options)
    if parts is None:
        return None

    draft = memory.estimate_parts(workload.draft, options) if workload.draft else None
    if draft is not None:
        # The draft runs in the same process: the engine itself, and what it remembers, are counted once.
        draft = draft._replace(engine_bytes=0, prompts_bytes=0)
    return Estimate(parts._replace(further_bytes=workload.further_bytes), draft)


class PodMemory(NamedTuple):
    """Memory of one replica in a pod: two figures, since container and devices have limits of their own."""

    container: Estimate
    device: Estimate | None = None
    """Memory that is used of each device by the header; None if the pod has none, or the header does not tell it."""
    device_bytes_each: int | None = None
    """Memory that each device must have, as node labels state it, so that the engine's share of it is enough; None if
    the pod has no devices."""
    stated_bytes_each: int | None = None
    """Share of the stated memory that each device holds, if that decides; None if the estimate does."""

    @property
    def container_bytes(self) -> int:
        """Memory that the container must request."""
        return self.container.total_bytes

    @property
    def cache_bytes(self) -> int:
        """KV cache in the container's memory, for an engine that takes its size as an argument; 0: devices have it."""
        draft = self.container.draft
        return self.container.parts.cache_bytes + (draft.cache_bytes if draft else 0)

    def text(self) -> str:
        """Return the parts of the scarcer memory for a message: those of each device, if there are devices."""
        if self.stated_bytes_each is not None:
            return f"{size_text(self.stated_bytes_each)} as the share of spec.memoryBytes"
        return f"{self.device.text()} on each device" if self.device else self.container.text()


def estimate_pod(workload: Workload, options: ServingOptions, devices: int) -> PodMemory | None:
    """Return the memory of one replica in a pod with `devices` devices.

    * Without devices all of it is the container's, as `estimate` computes it. None: there is no estimate.
    * With devices, weights and cache are in the devices. Each of them holds its part by the estimate, or its share of
      the memory that the user states for the replica (spec.memoryBytes), whichever is more. None: there is neither.
    """
    if not devices:
        estimated = estimate(workload, options)
        return PodMemory(estimated) if estimated else None

    # The engine's formulas for the model and its draft, which proposes tokens; None: the layout is unknown, or has no
    # formula.
    memory = find_runtime(workload.runtime).memory
    parts = memory.estimate_device_parts(workload.layout, options, devices) if workload.layout else None
    draft_parts = memory.estimate_device_parts(workload.draft, options, devices) if workload.draft else None

    # 1. The headers of the model and of its draft, if it has one, tell enough: estimate container and devices.
    if parts is not None and (draft_parts is not None or workload.draft is None):
        # The parts of the draft are counted beside those of the model, but those of the engine itself only once.
        container = Estimate(parts.container)
        device = Estimate(parts.device._replace(further_bytes=workload.further_bytes))
        if draft_parts is not None:
            container = container._replace(draft=draft_parts.container._replace(engine_bytes=0, prompts_bytes=0))
            device = device._replace(draft=draft_parts.device._replace(engine_bytes=0))
        return _size_devices(parts, container, device, workload.stated_bytes)

    # 2. Else the stated memory is that of the devices. What the engine keeps in the container does not depend on the
    # layers, so a layout without layers and with the stated size gives it.
    if workload.stated_bytes is None:
        return None
    # _UNKNOWN: a layout with the largest vocabulary in wide use.
    assumed = structs.replace(workload.layout or _UNKNOWN, tensor_bytes=workload.stated_bytes, layers=[])
    parts = memory.estimate_device_parts(assumed, options, devices)
    return _size_devices(parts, Estimate(parts.container), None, workload.stated_bytes) if parts else None


def _size_devices(
    parts: DeviceParts, container: Estimate, device: Estimate | None, stated_bytes: int | None
) -> PodMemory:
    """Return the memory of a pod, with the size that each device must have to hold its part of the model.

    A device must be larger than what it holds: the engine uses only a share of it (`used_permille`), and programs do
    not get all that a node's label states (`_UNUSABLE_DEVICE_BYTES`).

    Args:
        parts: the parts that the engine's formula gives; of them, the number of devices and the used share count here.
        container: the memory of the container.
        device: what each device holds by the estimate; None: unknown.
        stated_bytes: what the user states for the whole replica; its share of each device counts if it is more.
    """
    estimated_bytes = device.total_bytes if device else 0
    stated_share = divide_up(stated_bytes or 0, parts.devices)
    held_bytes = max(estimated_bytes, stated_share)

    # What is held must fit into the share that the engine uses. What no program gets is added.
    device_bytes_each = divide_up(held_bytes * 1000, parts.used_permille) + _UNUSABLE_DEVICE_BYTES
    # None: the estimate decides.
    stated_bytes_each = stated_share if stated_share > estimated_bytes else None
    return PodMemory(container, device, device_bytes_each, stated_bytes_each)


def is_understated(stated_bytes: int, needed_bytes: int) -> bool:
    """Return whether a stated memory is clearly less than what the estimate says, so that it must not be believed."""
    return stated_bytes < needed_bytes * _TOLERANCE


def further_bytes(role: Role, size_bytes: int | None) -> int | None:
    """Return the bytes that a projector or an adapter of this size adds to the model; None when its size is not known.

    A projector's graph depends on its input, and no key of its header describes it: the buffers of one image are
    assumed to be as large as the weights, and the memory measured in use corrects this estimate.
    """
    if size_bytes is None:
        return None
    return 2 * size_bytes if role == "projector" else size_bytes


def refuse_device_count(workload: Workload, devices: int) -> str | None:
    """Return why the engine cannot divide the model among `devices` devices, with what it can do; None if it can."""
    layout = workload.layout
    return find_runtime(workload.runtime).memory.refuse_devices(layout, devices) if layout else None


def least_free_bytes(workload: Workload, options: ServingOptions, memory_bytes: int) -> int:
    """Return the bytes of a device of `memory_bytes` that must be free at the start; 0: as many as are needed."""
    return find_runtime(workload.runtime).memory.least_free_bytes(options, memory_bytes)


class MemoryNeed(NamedTuple):
    """The memory that is compared with a limit: that of each device, or of the container or host without devices."""

    total_bytes: int
    weights_bytes: int
    """The part that a smaller quantization reduces."""


def compute_need(workload: Workload, options: ServingOptions, devices: int) -> MemoryNeed | None:
    """Return the memory that a replica needs of each device, or of the container if `devices` is 0; None: unknown."""
    memory = estimate_pod(workload, options, devices)
    if memory is None:
        return None
    # None: the pod has no devices.
    if memory.device_bytes_each is None:
        return MemoryNeed(memory.container_bytes, memory.container.parts.weights_bytes)
    if memory.device is None:
        # Only the stated memory is known, and not which part of it the weights are.
        return MemoryNeed(total_bytes=memory.device_bytes_each, weights_bytes=0)
    # A device must be larger than what it holds, by this factor: so do fewer weights make the needed device smaller.
    size_by_held = (memory.device_bytes_each - _UNUSABLE_DEVICE_BYTES) / max(1, memory.device.total_bytes)
    weights_bytes = math.ceil(memory.device.parts.weights_bytes * size_by_held)
    return MemoryNeed(memory.device_bytes_each, weights_bytes)


def find_largest_context(workload: Workload, options: ServingOptions, limit_bytes: int, devices: int = 0) -> int | None:
    """Return the longest context, shorter than that of `options`, that fits into `limit_bytes`.

    None: not even 512 tokens fit, or `options` has no more. With `devices` the limit is the memory of each of them. The
    estimate never falls with a longer context (a property test checks this), so a binary search finds it.
    """

    def fits(steps: int) -> bool:
        """Return whether a context of so many steps of 256 tokens fits."""
        needed = compute_need(workload, structs.replace(options, context_length=steps * _CONTEXT_STEP), devices)
        return needed is not None and needed.total_bytes <= limit_bytes

    fewest, most = _LEAST_CONTEXT // _CONTEXT_STEP, (options.context_tokens - 1) // _CONTEXT_STEP
    if most < fewest or not fits(fewest):
        return None

    # `fewest` fits; the longest context that does is between it and `most`.
    while fewest < most:
        middle = (fewest + most + 1) // 2
        fewest, most = (middle, most) if fits(middle) else (fewest, middle - 1)
    return fewest * _CONTEXT_STEP


def way_out(workload: Workload, options: ServingOptions, limit_bytes: int, devices: int = 0) -> str:
    """Return a message with a change by which the model would fit into `limit_bytes`, or that there is none.

    It is the first of these that is enough:

    1. Other stated memory, if what spec.memoryBytes states is itself too much.
    2. A shorter context, or more devices.
    3. A quantization with fewer bits for each weight.
    4. The least context and one request at a time, with fewer bits if needed.

    Args:
        workload: what the engine loads, which does not fit.
        options: serving options, with the context and the parallel requests that are wanted.
        limit_bytes: the memory of each device, or of the host or container without devices.
        devices: devices of the pod; 0: none.
    """
    # 1. The stated memory is too much.
    if (stated_way_out := _find_stated_way_out(workload, options, limit_bytes, devices)) is not None:
        return stated_way_out

    # 2. A shorter context, or more devices.
    context = find_largest_context(workload, options, limit_bytes, devices)
    count = _find_enough_devices(workload, options, limit_bytes, devices)
    more_devices = [f"a hardware.count of {count}"] if count else []
    if context is not None:
        return f"{' or '.join([f'a contextLength of {context}', *more_devices])} would fit"

    needed = compute_need(workload, options, devices)
    if workload.layout is None or needed is None:
        return "lower contextLength or parallel, or use a smaller quantization"
    if more_devices:
        return f"{more_devices[0]} would fit"

    # 3. and 4. Fewer bits for each weight; if that is not enough, also the least context and one request at a time.
    smaller = structs.replace(options, context_length=min(_LEAST_CONTEXT, options.context_tokens), parallel=1)
    changes = [f"a contextLength of {_LEAST_CONTEXT}"] if smaller.context_tokens < options.context_tokens else []
    changes += ["a parallel of 1"] if options.parallel != 1 else []
    # First with the wanted context and requests, then with the least of both.
    for need, added_changes in ((needed, []), (compute_need(workload, smaller, devices), changes)):
        if need is None or not need.weights_bytes:
            continue
        # Share of the weights that fits beside everything else; from 1 on, all of them do.
        share = (limit_bytes - (need.total_bytes - need.weights_bytes)) / need.weights_bytes
        if share >= 1 and added_changes:
            return f"{' and '.join(added_changes)} would fit"
        if share >= _LEAST_QUANTIZATION_SHARE:
            fewer_bits = f"a quantization with weights of at most {min(99, math.floor(100 * share))}% of the size"
            return f"{' and '.join([fewer_bits, *added_changes])} would fit"

    # None of this is enough.
    larger = ", or more or larger devices" if devices else " or a larger host"
    return f"no quantization of this model would fit: use a smaller model{larger}"


def _find_stated_way_out(workload: Workload, options: ServingOptions, limit_bytes: int, devices: int) -> str | None:
    """Return the way out if the memory that the Model states (spec.memoryBytes) is by itself too much for the devices.

    None: it is not too much, none is stated, or the pod has no devices, the only place where stated memory counts.

    1. If the header of the weights tells the memory as well, none has to be stated: advise to remove it, and what to
       do next if the model does not fit then either.
    2. Else advise the most that may be stated.

    More devices, among which the stated memory is divided, are the other way out of both.
    """
    if not devices or workload.stated_bytes is None:
        return None
    # Without layouts, only the stated memory counts.
    stated = estimate_pod(workload._replace(layout=None, draft=None), options, devices)
    if stated is None or stated.device_bytes_each is None or stated.device_bytes_each <= limit_bytes:
        return None

    count = _find_enough_devices(workload, options, limit_bytes, devices)
    more_devices = f"a hardware.count of {count}" if count else ""

    # 1. The header tells the memory.
    unstated = workload._replace(stated_bytes=None)
    by_header = estimate_pod(unstated, options, devices)
    if by_header is not None and by_header.device_bytes_each is not None:
        if by_header.device_bytes_each <= limit_bytes:
            size = size_text(by_header.device_bytes_each)
            remove = f"remove spec.memoryBytes, because by the header {size} of each device are enough"
        else:
            next_step = way_out(unstated, options, limit_bytes, devices)
            remove = f"remove spec.memoryBytes, which does not fit with any context; then {next_step}"
        return f"{more_devices} would fit; or {remove}" if more_devices else remove

    # 2. Else less memory has to be stated: in proportion to the devices, in whole MiB, because a person copies it.
    usable = limit_bytes - _UNUSABLE_DEVICE_BYTES
    needed = stated.device_bytes_each - _UNUSABLE_DEVICE_BYTES
    most_stated_bytes = usable * workload.stated_bytes // needed // MIB * MIB

    if most_stated_bytes <= 0:
        return "use a smaller model, or more or larger devices"
    fits = f"{more_devices} or " if more_devices else ""
    fits += f"a spec.memoryBytes of at most {most_stated_bytes} would fit"
    return f"{fits}: use a smaller quantization or a lower contextLength, and state what that takes"


def _find_enough_devices(workload: Workload, options: ServingOptions, limit_bytes: int, devices: int) -> int | None:
    """Return the least number of devices above `devices` that fits and that engines can divide a model among.

    None: no number up to 16 is enough, or the pod has no devices.
    """
    for count in _DEVICE_COUNTS if devices else ():
        if count > devices and refuse_device_count(workload, count) is None:
            needed = compute_need(workload, options, count)
            if needed and needed.total_bytes <= limit_bytes:
                return count
    return None
