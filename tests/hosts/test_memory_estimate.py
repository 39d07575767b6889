"""The estimate beside the memory of llama.cpp: a row for each kind of context memory. `benchmarks` has the table."""

from pathlib import Path

import pytest

from crds.serving import ServingOptions
from tests.support.resident_memory import Row, measure
from tests.support.tiny_models.hollow_gguf import Shape

MOST_ERROR = 0.1
MOST_BEYOND = 0.02
"""The engine takes at most so much more than is reserved for it: buffers of the sampler are not counted."""
LEAST_WEIGHTS_BYTES = 100 * 2**20
ROWS = {
    "grouped heads, two slots, small cache": Row(
        Shape(layers=2, heads_kv=8, vocabulary=64_000),
        ServingOptions(context_length=1024, parallel=2, cache_type_k="q8_0", cache_type_v="q8_0"),
    ),
    "sliding window": Row(
        Shape("gemma3", layers=6, vocabulary=128_000, window=256), ServingOptions(context_length=1024, parallel=1)
    ),
    "recurrent states beside attention": Row(
        Shape("lfm2", layers=4, vocabulary=64_000), ServingOptions(context_length=1024, parallel=1)
    ),
    "recurrent states only": Row(
        Shape("mamba2", layers=4, vocabulary=64_000, inner=2048, state=128),
        ServingOptions(context_length=512, parallel=1),
    ),
    "latent attention and experts": Row(
        Shape("deepseek2", layers=2, experts=32, feed_forward=512, vocabulary=32_000),
        ServingOptions(context_length=512, parallel=1),
    ),
    "long and short requests that share a context": Row(
        Shape(layers=4, heads_kv=8, vocabulary=64_000), ServingOptions(context_length=4096)
    ),
    "long and short requests that share a sliding window": Row(
        Shape("gemma3", layers=6, vocabulary=128_000, window=256), ServingOptions(context_length=4096)
    ),
    "long and short requests beside recurrent states": Row(
        Shape("lfm2", layers=4, vocabulary=64_000), ServingOptions(context_length=2048)
    ),
    "remembered conversations of requests that share a context": Row(
        Shape(layers=4, heads_kv=8, vocabulary=64_000), ServingOptions(context_length=1024, prompt_cache="48Mi")
    ),
    "remembered conversations with checkpoints": Row(
        Shape("gemma3", layers=6, vocabulary=128_000, window=256),
        ServingOptions(context_length=1024, prompt_cache="48Mi"),
    ),
}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_the_estimate_is_off_by_less_than_a_tenth(row: Row, tmp_path: Path) -> None:
    measurement = measure(row, tmp_path)
    assert measurement.estimated.parts.weights_bytes > LEAST_WEIGHTS_BYTES
    assert -MOST_BEYOND < measurement.error < MOST_ERROR, (
        f"{measurement.error:+.1%}: {measurement.estimated.text()}, {measurement.resident_bytes} bytes"
    )
