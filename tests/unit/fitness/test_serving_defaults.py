"""Serving options that nobody states use the machines as an expert would, and fit into each that holds the context."""

from collections.abc import Sequence
from random import Random
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from crds.serving import ServingOptions
from crds.size import GIB, MIB
from crds.weights_header import Layers, Layout
from fitness.memory import Workload, estimate_pod
from fitness.serving_defaults import AllowedMachine, choose_options, count_contexts
from runtimes.registry import RUNTIMES
from tests.unit.fitness.test_memory import LAYOUTS
from tests.unit.fitness.test_paged_engines import LLAMA3_8B, LLAMA3_70B_AWQ

LLAMA_8B = structs.replace(LLAMA3_8B, tensor_bytes=4_912_898_304)
LLAMA_8B_BF16 = LLAMA3_8B
LLAMA_70B = structs.replace(LLAMA3_70B_AWQ, tensor_bytes=42_520_395_776)
GEMMA_27B = Layout(
    tensor_bytes=16_546_404_416,
    vocabulary_size=262_208,
    embedding_size=5376,
    attention_size=4096,
    head_count=32,
    feed_forward_size=21_504,
    layers=[
        Layers(count=52, key_elements=2048, value_elements=2048, window=1024),
        Layers(count=10, key_elements=2048, value_elements=2048),
    ],
)
QWEN_27B_HYBRID = Layout(
    tensor_bytes=16_965_120_000,
    vocabulary_size=248_320,
    embedding_size=5120,
    attention_size=6144,
    head_count=24,
    feed_forward_size=17_408,
    layers=[Layers(count=16, key_elements=1024, value_elements=1024), Layers(count=48, state_bytes=3_268_608)],
)
EMBEDDER = Layout(
    tensor_bytes=1_200_000_000,
    vocabulary_size=250_002,
    embedding_size=1024,
    attention_size=1024,
    head_count=16,
    feed_forward_size=4096,
    layers=[Layers(count=24, key_elements=1024, value_elements=1024)],
)
TRAINED: Final = 131_072


def host(layout: Layout | None, gib: float, runtime: str = "llama.cpp", draft: Layout | None = None) -> AllowedMachine:
    return AllowedMachine(Workload(layout, runtime, draft=draft), int(gib * GIB))


def processor(layout: Layout, gib: int, runtime: str = "llama.cpp") -> AllowedMachine:
    return AllowedMachine(Workload(layout, runtime), gib * GIB, node_bytes=gib * GIB)


def device(
    layout: Layout, gib: float, runtime: str = "llama.cpp", count: int = 1, node_gib: int = 256
) -> AllowedMachine:
    return AllowedMachine(Workload(layout, runtime), int(gib * GIB), count, node_gib * GIB)


CASES: Final[dict[str, tuple[list[AllowedMachine], int, int | None, str | None]]] = {
    # A Mac: the context before all, then short requests beside a long one; whole contexts never take all that is free.
    "8B, small host": ([host(LLAMA_8B, 6)], 4096, None, None),
    "8B, host of 16 GiB": ([host(LLAMA_8B, 11.8)], 32_768, None, None),
    "8B, host of 24 GiB": ([host(LLAMA_8B, 17)], 32_768, None, "1831Mi"),
    "8B, host of 64 GiB": ([host(LLAMA_8B, 48)], 65_536, None, "4096Mi"),
    "70B, host of 64 GiB": ([host(LLAMA_70B, 48)], 16_384, None, None),
    "70B, host of 128 GiB": ([host(LLAMA_70B, 96)], 65_536, None, "8192Mi"),
    "windows, host of 128 GiB": ([host(GEMMA_27B, 96)], 65_536, 4, "3808Mi"),
    "hybrid, tight host": ([host(QWEN_27B_HYBRID, 17)], 4096, 1, None),
    "hybrid, host of 64 GiB": ([host(QWEN_27B_HYBRID, 48)], 65_536, None, "2348Mi"),
    "8B in mlx-lm": ([host(LLAMA_8B, 48, "mlx-lm")], 65_536, None, "16384Mi"),
    "8B in mlx-lm, tight": ([host(LLAMA_8B, 11.8, "mlx-lm")], 16_384, None, "2048Mi"),
    "8B in oMLX": ([host(LLAMA_8B, 48, "omlx")], 65_536, None, None),
    # A processor is slow: the longest context is not for it.
    "8B, processor": ([processor(LLAMA_8B, 56)], 32_768, 4, "4096Mi"),
    "70B, processor": ([processor(LLAMA_70B, 56)], 32_768, None, None),
    # A device has no other users; earlier conversations are in the memory of its node.
    "8B, device of 8 GiB": ([device(LLAMA_8B, 8)], 8192, None, "2048Mi"),
    "8B, device of 24 GiB": ([device(LLAMA_8B, 24)], 32_768, 4, "4096Mi"),
    "8B, device on a small node": ([device(LLAMA_8B, 24, node_gib=12)], 32_768, 4, "2641Mi"),
    "8B, device on an unknown node": ([device(LLAMA_8B, 24, node_gib=0)], 32_768, 4, None),
    "8B, device of 48 GB": ([device(LLAMA_8B, 44.98)], 65_536, 4, "4096Mi"),
    "8B, device of 40 GB": ([device(LLAMA_8B, 39.4)], 32_768, 4, "4096Mi"),
    "8B, device of 80 GiB": ([device(LLAMA_8B, 79.6)], 65_536, 4, "4096Mi"),
    "70B, two devices": ([device(LLAMA_70B, 44.9, count=2)], 65_536, None, "8192Mi"),
    "windows, device of 24 GiB": ([device(GEMMA_27B, 24)], 32_768, None, "3808Mi"),
    "hybrid, device of 24 GiB": ([device(QWEN_27B_HYBRID, 24)], 32_768, None, "2348Mi"),
    # An engine with a paged cache chooses by itself, unless its buffers do not fit.
    "vLLM, device of 80 GiB": ([device(LLAMA_8B_BF16, 79.6, "vllm")], 65_536, None, None),
    "vLLM, device of 24 GiB": ([device(LLAMA_8B_BF16, 24, "vllm")], 32_768, 64, None),
    "vLLM, 70B, two devices": ([device(LLAMA_70B, 79.6, "vllm", 2)], 65_536, None, None),
    "vLLM, processor": ([processor(LLAMA_8B_BF16, 56, "vllm")], 32_768, None, None),
    "vLLM, hybrid": ([device(QWEN_27B_HYBRID, 79.6, "vllm")], 65_536, 128, None),
    "SGLang": ([device(LLAMA_8B_BF16, 79.6, "sglang")], 65_536, None, None),
    # Ollama has the memory of whole contexts only, and on a host its owner sets their number.
    "Ollama in a pod": ([device(LLAMA_8B, 24, "ollama")], 32_768, 4, "4096Mi"),
    "Ollama on a host": ([host(LLAMA_8B, 48, "ollama")], 65_536, 1, None),
    "llama-cpp-python": ([device(LLAMA_8B, 24, "llama-cpp-python")], 32_768, None, None),
    # mlx-lm serves one request at a time beside a draft, and refuses to be told more.
    "mlx-lm with a draft": ([host(LLAMA_8B, 400, "mlx-lm", draft=EMBEDDER)], 65_536, None, "32768Mi"),
    # Of several machines the largest context that one holds; what else is chosen suits each that holds it.
    "two hosts": ([host(LLAMA_8B, 11.8), host(LLAMA_8B, 48)], 65_536, None, "4096Mi"),
    "two devices of one context": ([device(LLAMA_8B, 24), device(LLAMA_8B, 13)], 32_768, None, "4096Mi"),
    "two hosts of one context": ([host(LLAMA_8B, 17), host(LLAMA_8B, 40)], 32_768, None, "1831Mi"),
    "vLLM, two devices of one context": (
        [device(LLAMA_8B_BF16, 40, "vllm"), device(LLAMA_8B_BF16, 24, "vllm")],
        32_768,
        64,
        None,
    ),
    "memory known on one": (
        [host(QWEN_27B_HYBRID, 96, "mlx-lm"), device(QWEN_27B_HYBRID, 79.6, "vllm")],
        65_536,
        128,
        None,
    ),
    # What is not known is not used: a user may have stated the memory for little more than this.
    "unknown layout": ([host(None, 48)], 4096, 1, None),
    "unknown layout in vLLM": ([host(None, 48, "vllm")], 4096, 32, None),
    "no machine": ([], 32_768, None, None),
}


@pytest.mark.parametrize("case", CASES)
def test_unset_options_are_chosen_by_model_and_machines(case: str) -> None:
    machines, context, parallel, prompt_cache = CASES[case]
    options, message = choose_options(ServingOptions(), TRAINED, machines)
    assert (options.context_length, options.parallel, options.prompt_cache) == (context, parallel, prompt_cache)
    assert message.startswith(f"contextLength {context}: ")


@pytest.mark.parametrize(
    ("trained", "machines", "context", "reason"),
    [
        (2048, [host(LLAMA_8B, 48)], 2048, "that of the model"),
        (40_960, [host(LLAMA_8B, 48)], 40_960, "that of the model"),
        (TRAINED, [host(LLAMA_8B, 48)], 65_536, "the most that is chosen of 131072"),
        (TRAINED, [host(LLAMA_8B, 6)], 4096, "the most that an allowed machine holds of 131072"),
        (TRAINED, [host(LLAMA_8B, 2)], 4096, "no allowed machine holds even that"),
        (None, [host(LLAMA_8B, 48)], 4096, "that of the model, or its memory, is not known"),
        (None, [], 4096, "that of the model, or its memory, is not known"),
        (64, [host(LLAMA_8B, 48)], 4096, "that of the model, or its memory, is not known"),
    ],
)
def test_context_is_that_of_the_model_as_far_as_a_machine_holds_it(
    trained: int | None, machines: list[AllowedMachine], context: int, reason: str
) -> None:
    options, message = choose_options(ServingOptions(), trained, machines)
    assert options.context_length == context
    assert message.split("; ")[0] == f"contextLength {context}: {reason}"


def test_texts_are_embedded_in_a_context_of_one_batch() -> None:
    for machine in (host(EMBEDDER, 96), device(EMBEDDER, 79.6, "vllm")):
        options, _ = choose_options(ServingOptions(mode="embeddings"), 32_768, [machine])
        assert (options.context_length, options.parallel, options.prompt_cache) == (8192, None, None)
    assert choose_options(ServingOptions(mode="rerank"), 512, [host(EMBEDDER, 96)])[0].context_length == 512


def test_no_conversations_are_kept_where_requests_choose_adapters() -> None:
    machine = host(LLAMA_8B, 48)
    for on_request, prompt_cache in ((False, "4096Mi"), (True, None)):
        chosen = machine._replace(workload=machine.workload._replace(adapters_on_request=on_request))
        options, _ = choose_options(ServingOptions(), TRAINED, [chosen])
        assert (options.context_length, options.prompt_cache) == (65_536, prompt_cache)


def test_message_says_how_many_requests_the_memory_is_for() -> None:
    def explain(machine: AllowedMachine) -> list[str]:
        options, message = choose_options(ServingOptions(), TRAINED, [machine])
        return [*message.split("; ")[1:], *filter(None, [count_contexts(options, [machine])])]

    assert explain(host(LLAMA_8B, 48)) == [
        "4 requests at once: one of any length, and short ones of 8192 tokens in all"
    ]
    assert explain(device(LLAMA_8B, 24)) == ["parallel 4: so many whole contexts fit"]
    assert explain(host(QWEN_27B_HYBRID, 17)) == ["parallel 1: there is no memory for more"]
    assert explain(host(None, 17)) == ["parallel 1: its memory is not known"]
    assert explain(device(LLAMA_8B_BF16, 79.6, "vllm")) == ["its cache holds 5 such contexts or more"]
    assert explain(processor(LLAMA_8B_BF16, 56, "vllm")) == ["its cache holds 1 such context or more"]
    assert explain(device(LLAMA_8B_BF16, 24, "vllm")) == [
        "parallel 64: buffers for more do not fit",
        "its cache holds 1 such context or more",
    ]


def test_whole_contexts_of_the_cache_fit_and_one_more_does_not() -> None:
    machine = device(LLAMA_8B_BF16, 79.6, "vllm")
    options, _ = choose_options(ServingOptions(context_length=32_768), TRAINED, [machine])
    contexts = int(count_contexts(options, [machine]).removeprefix("its cache holds ").split()[0])
    many, more = (structs.replace(options, context_length=32_768 * number) for number in (contexts, contexts + 1))
    assert machine.holds(many)
    assert not machine.holds(more)


LAYOUTS_IN_USE = st.sampled_from([LLAMA_8B, LLAMA_8B_BF16, LLAMA_70B, GEMMA_27B, QWEN_27B_HYBRID, EMBEDDER]) | LAYOUTS
SIZES = st.floats(0.5, 200).map(lambda gib: int(gib * GIB))
PLACES: Final = {
    "host": sorted(name for name, runtime in RUNTIMES.items() if runtime.on_hosts),
    "processor": ["llama.cpp", "vllm", "ollama"],
    "device": ["llama.cpp", "llama-cpp-python", "ollama", "sglang", "tgi", "vllm"],
}


@st.composite
def machines_of_one_engine(draw: st.DrawFn) -> list[AllowedMachine]:
    """Return one to four machines of one kind and engine, for one model, perhaps with a draft."""
    place = draw(st.sampled_from(sorted(PLACES)))
    layout, draft = draw(LAYOUTS_IN_USE), draw(st.none() | LAYOUTS_IN_USE)
    workload = Workload(layout, draw(st.sampled_from(PLACES[place])), draft=draft)
    made = []
    for size in draw(st.lists(SIZES, min_size=1, max_size=4)):
        devices = draw(st.sampled_from([1, 2, 8])) if place == "device" else 0
        node_bytes = {"host": 0, "processor": size, "device": draw(SIZES)}[place]
        made.append(AllowedMachine(workload, size, devices, node_bytes))
    return made


MACHINES = st.lists(machines_of_one_engine(), max_size=2).map(
    lambda groups: [each for group in groups for each in group]
)
CONTEXTS = st.integers(128, 2**20)
STATED = st.builds(
    ServingOptions,
    context_length=st.none() | CONTEXTS,
    parallel=st.none() | st.integers(1, 64),
    prompt_cache=st.none() | st.sampled_from(["0", 0, "3Gi"]),
    mode=st.sampled_from(["chat", "chat", "embeddings"]),
    cache_type_k=st.sampled_from(["f16", "q8_0"]),
)


@given(STATED, st.none() | CONTEXTS, MACHINES)
def test_stated_value_is_never_changed(
    stated: ServingOptions, trained: int | None, machines: Sequence[AllowedMachine]
) -> None:
    options, _ = choose_options(stated, trained, machines)
    for field in stated.__struct_fields__:
        if getattr(stated, field) is not None:
            assert getattr(options, field) == getattr(stated, field)


@given(STATED, st.none() | CONTEXTS, MACHINES)
def test_context_is_one_that_the_model_was_trained_for(
    stated: ServingOptions, trained: int | None, machines: Sequence[AllowedMachine]
) -> None:
    options, _ = choose_options(structs.replace(stated, context_length=None), trained, machines)
    assert options.context_length is not None
    assert options.context_length in {trained, 4096, 8192, 16_384, 32_768, 65_536}
    assert options.context_length <= (trained or 4096)


@given(STATED, st.none() | CONTEXTS, MACHINES)
def test_choice_fits_into_every_machine_that_holds_the_context(
    stated: ServingOptions, trained: int | None, machines: Sequence[AllowedMachine]
) -> None:
    options, _ = choose_options(stated, trained, machines)
    # The fewest requests at once that are tried.
    is_alone = options.parallel == 1 or any(machine.runtime.cache_sharing == "blocks" for machine in machines)
    fewest = stated.parallel or (1 if is_alone else None)
    lean = structs.replace(options, parallel=fewest, prompt_cache=stated.prompt_cache)
    for machine in machines:
        need = machine.find_need(options)
        if need is None or not machine.holds(lean):
            continue
        # The memory for conversations is in whole MiB.
        assert need <= machine.memory_bytes + MIB
        memory = estimate_pod(machine.workload, options, machine.devices)
        if memory is not None and machine.devices and stated.prompt_cache is None:
            assert memory.container.parts.prompts_bytes <= machine.node_bytes // 8 + MIB


@given(STATED, CONTEXTS, machines_of_one_engine(), st.floats(0, 1))
def test_context_never_gets_longer_with_less_memory(
    stated: ServingOptions, trained: int, machines: Sequence[AllowedMachine], share: float
) -> None:
    unset = structs.replace(stated, context_length=None)
    smaller = [machine._replace(memory_bytes=int(machine.memory_bytes * share)) for machine in machines]
    contexts = [choose_options(unset, trained, some)[0].context_tokens for some in (machines, smaller, machines[:1])]
    assert contexts[0] >= max(contexts)


@given(STATED, st.none() | CONTEXTS, MACHINES, st.randoms())
def test_choice_does_not_depend_on_the_order_of_machines(
    stated: ServingOptions, trained: int | None, machines: list[AllowedMachine], random: Random
) -> None:
    shuffled = [*machines, *machines[:1]]
    random.shuffle(shuffled)
    assert choose_options(stated, trained, shuffled) == choose_options(stated, trained, machines)
