"""The memory of pods with devices, of every engine: two figures, which move with context, requests and devices."""

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import structs

from crds.serving import ServingOptions
from crds.weights_header import Layers, Layout
from fitness.memory import PodMemory, Workload, estimate, estimate_pod, find_largest_context, way_out
from runtimes.engine_estimate import EngineMemory
from runtimes.registry import RUNTIMES
from tests.unit.fitness.test_memory import LAYOUTS, OPTIONS, QWEN3_8B, add

GIB = 2**30
ON_DEVICES = sorted(name for name, runtime in RUNTIMES.items() if runtime.pod and name != "generic")
KNOWN = LAYOUTS.map(
    lambda layout: structs.replace(
        layout,
        layers=[
            structs.replace(layer, state_bytes=0, value_elements=max(1, layer.value_elements))
            for layer in layout.layers
        ],
    )
)
WORKLOADS = st.builds(
    Workload,
    layout=KNOWN,
    runtime=st.sampled_from(ON_DEVICES),
    draft=st.none() | KNOWN,
    further_bytes=st.integers(0, 2**32),
    stated_bytes=st.none() | st.integers(1, 2**42),
)
STATED = st.builds(
    Workload,
    layout=st.none() | KNOWN,
    runtime=st.sampled_from(ON_DEVICES),
    draft=st.none() | KNOWN,
    further_bytes=st.integers(0, 2**32),
    stated_bytes=st.integers(1, 2**42),
)
DEVICES = st.integers(1, 16)


def _pod(workload: Workload, options: ServingOptions, devices: int) -> PodMemory:
    memory = estimate_pod(workload, options, devices)
    assert memory
    return memory


def _each(workload: Workload, options: ServingOptions, devices: int) -> int:
    size = _pod(workload, options, devices).device_bytes_each
    assert size
    return size


@given(WORKLOADS, OPTIONS, DEVICES, st.integers(0, 2**20), st.integers(0, 8))
def test_device_memory_never_falls_with_context_requests_or_companions(
    workload: Workload, options: ServingOptions, devices: int, context: int, slots: int
) -> None:
    more = add(options, context, slots)
    larger = workload._replace(further_bytes=workload.further_bytes + 1)
    assert _each(workload, options, devices) <= _each(larger, more, devices)
    assert _pod(workload, options, devices).container_bytes <= _pod(larger, more, devices).container_bytes


@given(KNOWN, OPTIONS, DEVICES, st.integers(0, 2**20), st.integers(0, 2**24))
def test_memory_of_latents_and_states_never_falls_with_context_or_requests(
    known: Layout, options: ServingOptions, devices: int, context: int, state_bytes: int
) -> None:
    latent = [structs.replace(layer, value_elements=0, window=None) for layer in known.layers]
    recurrent = [
        Layers(count=7, key_elements=512, value_elements=512),
        *(Layers(count=layer.count, state_bytes=state_bytes) for layer in known.layers),
    ]
    more = add(options, context, slots=1)
    for layers in (latent, recurrent):
        workload = Workload(structs.replace(known, layers=layers), "vllm")
        assert workload.layout
        assert _each(workload, options, devices) <= _each(workload, more, devices)
        device = _pod(workload, options, devices).device
        assert device
        assert devices * device.parts.weights_bytes >= workload.layout.tensor_bytes
        if layers is latent:
            assert _each(workload, options, devices + 1) <= _each(workload, options, devices)


@given(WORKLOADS, OPTIONS, DEVICES, DEVICES)
def test_device_memory_never_rises_with_more_devices(
    workload: Workload, options: ServingOptions, devices: int, more: int
) -> None:
    assert _each(workload, options, devices + more) <= _each(workload, options, devices)


@given(WORKLOADS, OPTIONS, DEVICES)
def test_the_devices_hold_all_weights(workload: Workload, options: ServingOptions, devices: int) -> None:
    pod = _pod(workload, options, devices)
    assert workload.layout
    assert pod.device
    assert devices * pod.device.parts.weights_bytes >= workload.layout.tensor_bytes
    assert _each(workload, options, devices) > pod.device.total_bytes
    assert pod.container.parts.further_bytes == 0


@given(WORKLOADS, OPTIONS, DEVICES, st.floats(0, 1))
def test_the_largest_context_on_devices_fits_and_the_next_does_not(
    workload: Workload, options: ServingOptions, devices: int, share: float
) -> None:
    limit = int(_each(workload, options, devices) * share)
    context = find_largest_context(workload, options, limit, devices)
    shortest = structs.replace(options, context_length=512)
    if context is None:
        assert options.context_tokens <= 512 or _each(workload, shortest, devices) > limit
        return
    assert _each(workload, structs.replace(options, context_length=context), devices) <= limit
    if context + 256 < options.context_tokens:
        assert _each(workload, structs.replace(options, context_length=context + 256), devices) > limit


@given(WORKLOADS, OPTIONS, DEVICES, st.floats(0, 1))
@example(Workload(QWEN3_8B, "llama-cpp-python", stated_bytes=60 * GIB), ServingOptions(context_length=14337), 4, 0.25)
def test_a_number_of_devices_that_is_proposed_fits(
    workload: Workload, options: ServingOptions, devices: int, share: float
) -> None:
    """Beside stated memory, or after the statement is removed, whichever the message says."""
    limit = int(_each(workload, options, devices) * share)
    stated, _, removed = way_out(workload, options, limit, devices).partition("remove spec.memoryBytes")
    for text, meant in ((stated, workload), (removed, workload._replace(stated_bytes=None))):
        for proposed in re.findall(r"hardware\.count of (\d+)", text):
            assert int(proposed) > devices
            assert _each(meant, options, int(proposed)) <= limit


def test_a_container_of_llama_cpp_asks_for_the_embeddings_only() -> None:
    options = ServingOptions(context_length=8192)
    memory, whole = _pod(Workload(QWEN3_8B), options, 1), estimate(Workload(QWEN3_8B), options)
    assert whole
    assert memory.device
    assert memory.container.parts.weights_bytes == 151_936 * 4096 * 2
    assert memory.container.parts.cache_bytes == memory.container.parts.further_bytes == 0
    assert memory.device.parts.weights_bytes == QWEN3_8B.tensor_bytes
    assert memory.device.parts.cache_bytes == whole.parts.cache_bytes
    assert memory.container_bytes < 2 * GIB


def test_llama_cpp_splits_by_layers_and_one_device_has_the_output() -> None:
    memory = _pod(Workload(QWEN3_8B), ServingOptions(parallel=1), 4)
    assert memory.device
    assert memory.device.parts.weights_bytes == QWEN3_8B.tensor_bytes // 4 + 151_936 * 4096 * 2
    assert memory.device.parts.cache_bytes == 576 * 2**20 // 4
    alone = _pod(Workload(QWEN3_8B), ServingOptions(extra_args=["-sm", "none"]), 4)
    assert alone.device == _pod(Workload(QWEN3_8B), ServingOptions(), 1).device


def test_remembered_conversations_and_checkpoints_are_in_the_container_beside_devices() -> None:
    layout = structs.replace(QWEN3_8B, layers=[*QWEN3_8B.layers, Layers(count=30, state_bytes=2**20)])
    plain, remembering = (_pod(Workload(layout), ServingOptions(prompt_cache=size), 1) for size in (None, "2Gi"))
    assert remembering.device == plain.device
    assert plain.container.parts.checkpoints_bytes == 3 * 4 * 30 * 2**20
    assert remembering.container.parts.prompts_bytes == 2 * GIB
    assert remembering.container.parts.checkpoints_bytes == 4 * 4 * 30 * 2**20


def test_layers_that_stay_off_the_device_are_in_the_container() -> None:
    memory = _pod(Workload(QWEN3_8B), ServingOptions(parallel=1, extra_args=["-ngl", "20"]), 1)
    assert memory.container.parts.weights_bytes == QWEN3_8B.tensor_bytes
    assert memory.container.parts.cache_bytes == 576 * 2**20


def test_projector_and_adapters_are_on_the_device_and_a_draft_on_both() -> None:
    memory = _pod(Workload(QWEN3_8B, draft=QWEN3_8B, further_bytes=7), ServingOptions(), 1)
    assert memory.device
    assert memory.device.parts.further_bytes == 7
    assert memory.device.draft
    assert memory.container.draft
    assert memory.device.draft.engine_bytes == memory.container.draft.engine_bytes == 0
    assert "the draft" in memory.text()


def test_without_devices_a_pod_takes_what_a_process_takes() -> None:
    for runtime in ("llama.cpp", "mlx-lm", "vllm"):
        memory = _pod(Workload(QWEN3_8B, runtime), ServingOptions(), 0)
        assert memory.container == estimate(Workload(QWEN3_8B, runtime), ServingOptions())
        assert memory.text() == memory.container.text()


@given(STATED, OPTIONS, DEVICES)
def test_each_device_holds_its_share_of_the_stated_memory_or_the_estimate_if_that_is_more(
    workload: Workload, options: ServingOptions, devices: int
) -> None:
    pod = _pod(workload, options, devices)
    assert workload.stated_bytes
    share = -(-workload.stated_bytes // devices)
    estimated = estimate_pod(workload._replace(stated_bytes=None), options, devices)
    used_bytes = estimated.device.total_bytes if estimated and estimated.device else 0
    assert pod.stated_bytes_each == (share if share > used_bytes else None)
    assert pod.device_bytes_each
    assert pod.device_bytes_each >= max(share, used_bytes) + 450 * 2**20


@given(STATED, OPTIONS, DEVICES)
def test_stated_memory_does_not_change_a_container_whose_header_is_known(
    workload: Workload, options: ServingOptions, devices: int
) -> None:
    estimated = estimate_pod(workload._replace(stated_bytes=None), options, devices)
    if estimated:
        assert _pod(workload, options, devices).container == estimated.container


@given(STATED, OPTIONS, DEVICES, st.floats(0.1, 1))
def test_a_stated_memory_that_is_proposed_fits(
    workload: Workload, options: ServingOptions, devices: int, share: float
) -> None:
    limit = int(_each(workload, options, devices) * share)
    proposed = re.search(r"spec\.memoryBytes of at most (\d+) would fit", way_out(workload, options, limit, devices))
    if proposed:
        assert _each(workload._replace(stated_bytes=int(proposed[1])), options, devices) <= limit


@pytest.mark.parametrize(
    ("runtime", "devices", "gib"),
    [("ollama", 1, 3.4), ("ollama", 8, 3.4), ("vllm", 1, 4.6), ("vllm", 8, 18.6), ("tgi", 1, 4.6)],
)
def test_container_beside_devices_takes_what_the_engine_keeps_there_if_no_header_is_known(
    runtime: str, devices: int, gib: float
) -> None:
    """A vocabulary as large as any is assumed: llama.cpp reads its embeddings on the processor."""
    pod = _pod(Workload(None, runtime, stated_bytes=70 * GIB), ServingOptions(), devices)
    assert pod.container_bytes / GIB == pytest.approx(gib, abs=0.1)
    assert pod.device is None


def test_container_of_a_small_stated_model_is_small() -> None:
    memory = _pod(Workload(None, "ollama", stated_bytes=GIB // 2), ServingOptions(), 1)
    assert memory.container_bytes < 2 * GIB


def test_cache_that_cannot_be_computed_leaves_the_vocabulary_known() -> None:
    """The paged engines pad recurrent states."""
    layout = structs.replace(QWEN3_8B, layers=[structs.replace(QWEN3_8B.layers[0], state_bytes=5)])
    assert estimate_pod(Workload(layout, "vllm"), ServingOptions(), 2) is None
    memory = _pod(Workload(layout, "vllm", stated_bytes=40 * GIB), ServingOptions(), 2)
    assert memory.container == _pod(Workload(QWEN3_8B, "vllm"), ServingOptions(), 2).container
    assert memory.stated_bytes_each == 20 * GIB


def test_stated_memory_counts_for_the_one_device_that_is_used() -> None:
    alone = ServingOptions(extra_args=["-sm", "none"])
    assert _pod(Workload(QWEN3_8B, stated_bytes=70 * GIB), alone, 2).stated_bytes_each == 70 * GIB


@pytest.mark.parametrize(
    ("workload", "context", "limit_gib", "says"),
    [
        (Workload(None, "ollama", stated_bytes=70 * GIB), 4096, 24, "a hardware.count of 4 or a spec.memoryBytes of "),
        (Workload(None, "ollama", stated_bytes=900 * GIB), 4096, 24, "a spec.memoryBytes of at most 50"),
        (Workload(None, "ollama", stated_bytes=70 * GIB), 4096, 0.25, "use a smaller model, or more or larger devices"),
        (
            Workload(QWEN3_8B, stated_bytes=900 * GIB),
            4096,
            24,
            "remove spec.memoryBytes, because by the header 5.0 GiB of each device are enough",
        ),
        (
            Workload(QWEN3_8B, stated_bytes=70 * GIB),
            4096,
            24,
            "a hardware.count of 4 would fit; or remove spec.memoryBytes, because by",
        ),
        (
            Workload(QWEN3_8B, stated_bytes=900 * GIB),
            2_000_000,
            24,
            "remove spec.memoryBytes, which does not fit with any context; then a contextLength of ",
        ),
        (Workload(QWEN3_8B, stated_bytes=6 * GIB), 2_000_000, 24, "a contextLength of "),
    ],
)
def test_stated_memory_that_does_not_fit_is_answered_with_what_would(
    workload: Workload, context: int, limit_gib: float, says: str
) -> None:
    advice = way_out(workload, ServingOptions(context_length=context, parallel=1), int(limit_gib * GIB), 2)
    assert advice.startswith(says)


def test_unknown_layout_or_engine_has_no_estimate_on_devices() -> None:
    for workload in (Workload(None), Workload(QWEN3_8B, "of-tomorrow"), Workload(QWEN3_8B, "mlx-lm")):
        assert estimate_pod(workload, ServingOptions(), 1) is None
        assert way_out(workload, ServingOptions(), GIB, 1) == (
            "lower contextLength or parallel, or use a smaller quantization"
        )


def test_memory_of_every_engine_but_a_stated_container_is_estimated() -> None:
    assert [name for name, runtime in RUNTIMES.items() if type(runtime.memory) is EngineMemory] == ["generic"]
