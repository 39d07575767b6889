"""The memory estimate of `fitness/memory.py` beside llama.cpp's memory, over models, contexts, slots and cache types.

The figure is the estimate; the floor is the resident size of the server after prompts of the full context on every slot
(`tests/support/resident_memory.py` explains this choice). Every row is above 100 MiB; the goal is an error below 10 %.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from crds.serving import CacheType, ServingOptions
from crds.size import size_text
from tests.support.resident_memory import Row, measure
from tests.support.tiny_models.hollow_gguf import KINDS, Shape

GOAL: Final = 0.1
_SHAPES: Final = {
    "llama": Shape(layers=4, vocabulary=64_000),
    "gemma3": Shape("gemma3", layers=6, vocabulary=128_000),
    "qwen3moe": Shape("qwen3moe", layers=2, experts=64, feed_forward=256),
    "mamba2": Shape("mamba2", layers=8, inner=2048, state=128, vocabulary=64_000),
    "lfm2": Shape("lfm2", layers=8, vocabulary=64_000),
    "deepseek2": Shape("deepseek2", layers=2, experts=32, feed_forward=512),
    "falcon-h1": Shape("falcon-h1", layers=4, vocabulary=64_000),
    "gpt-oss": Shape("gpt-oss", layers=4, experts=32, feed_forward=512, window=128),
}


def rows() -> Iterator[Row]:
    """Yield every row of the table."""
    for kind in KINDS:
        for context in (1024, 8192):
            yield Row(_SHAPES[kind], ServingOptions(context_length=context, parallel=1))
        for parallel in (4, None):
            yield Row(_SHAPES[kind], ServingOptions(context_length=1024, parallel=parallel))
    attends = _SHAPES["llama"]
    types: tuple[tuple[CacheType, CacheType], ...] = (("q8_0", "q8_0"), ("q8_0", "f16"), ("q4_0", "q4_0"))
    for key, value in types:
        yield Row(attends, ServingOptions(context_length=8192, parallel=1, cache_type_k=key, cache_type_v=value))
    yield Row(attends, ServingOptions(context_length=2048, parallel=2, extra_args=["-fa", "off"]))
    yield Row(attends, ServingOptions(context_length=2048, prompt_cache="128Mi"))
    yield Row(_SHAPES["gemma3"], ServingOptions(context_length=8192, parallel=1, extra_args=["--swa-full"]))
    large = Shape(layers=8, embedding=1024, heads=16, heads_kv=4, feed_forward=4096, vocabulary=128_000)
    yield Row(large, ServingOptions(context_length=2048, parallel=1))
    quantized = Shape(layers=8, embedding=1024, vocabulary=128_000, tensor_type="Q8_0")
    yield Row(quantized, ServingOptions(context_length=2048, parallel=1))


def main() -> None:
    """Print a line for each row as it is measured, then the worst error."""
    print(
        f"{'model':<10} {'context':>7} {'slots':>5}  {'served with':<15} {'estimate':>10} {'resident':>10} {'error':>7}"
    )
    worst = 0.0
    with tempfile.TemporaryDirectory(prefix="pomona-benchmark-") as folder:
        for row in rows():
            measured = measure(row, Path(folder))
            worst = max(worst, measured.error, -measured.error)
            options = row.options
            types = f"{options.cache_type_k}/{options.cache_type_v}"
            print(
                f"{row.shape.kind:<10} {options.context_tokens:>7} {options.parallel or 'unset':>5}  "
                f"{' '.join(options.extra_args) or types:<15} {size_text(measured.estimated.total_bytes):>10} "
                f"{size_text(measured.resident_bytes):>10} {measured.error:>+7.1%}",
                flush=True,
            )
    print(f"worst error {worst:.1%}, goal below {GOAL:.0%}: {'held' if worst < GOAL else 'MISSED'}")


if __name__ == "__main__":
    main()
