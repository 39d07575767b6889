"""The real memory of llama.cpp: its resident size after prompts of the full context, beside the estimate.

The resident size is measured because a Mac cannot reclaim it: Metal wires weights, cache and buffers alike. Here the
weights are mapped from a file. Pages of the file and of the buffers count once they are touched: llama.cpp touches all
weights when it loads, and the prompts touch the buffers. Pages of zeros count as any other.
"""

import json
import urllib.request
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from msgspec import structs

from artifacts.formats.gguf import parse
from artifacts.formats.gguf_facts import find_layout
from crds.serving import ServingOptions
from crds.weights_header import Layout
from devices.footprint import footprint_bytes
from fitness.memory import Estimate, Workload, estimate
from runtimes.serving import SHARED_REQUESTS, Serving, count_shared_tokens
from tests.support import llama_server
from tests.support.tiny_models import hollow_gguf
from tests.support.tiny_models.hollow_gguf import Shape

_HEADER_BYTES = 8 << 20
_TIMEOUT_SECONDS = 600.0


class Row(NamedTuple):
    """A model and its serving options."""

    shape: Shape
    options: ServingOptions


class Measured(NamedTuple):
    """The estimated and the measured memory of one row."""

    row: Row
    estimated: Estimate
    resident_bytes: int

    @property
    def error(self) -> float:
        """The relative error of the estimate; above 0 the estimate is too high."""
        return self.estimated.total_bytes / self.resident_bytes - 1


def measure(row: Row, folder: Path) -> Measured:
    """Serve a row with the real server and two threads; the model is written to `folder` and removed again."""
    path = folder / "hollow.gguf"
    hollow_gguf.write(path, row.shape)
    try:
        with path.open("rb") as file:
            layout = find_layout(parse(file.read(_HEADER_BYTES), path.stat().st_size))
        estimated = estimate(Workload(layout), row.options)
        assert estimated, f"{row.shape.kind} is not understood"
        return Measured(row, estimated, _resident_bytes(path, row.options, layout))
    finally:
        path.unlink()


def _resident_bytes(path: Path, options: ServingOptions, layout: Layout | None) -> int:
    stated = structs.replace(options, extra_args=["-t", "2", *options.extra_args])
    lengths = _list_lengths(options)
    with llama_server.serve_as(Serving("hollow", str(path), stated, layout=layout)) as server:
        # All slots work at once, and then further conversations replace theirs, which are remembered up to the limit.
        with ThreadPoolExecutor(len(lengths)) as pool:
            for conversation in [pool.submit(_converse, server.url, *item) for item in enumerate(lengths)]:
                conversation.result()
        for number in range(_count_further(options, layout)):
            _converse(server.url, None, lengths[0], first=10 + number)
        footprint = footprint_bytes(server.process.pid)
        assert footprint
        return footprint


def _list_lengths(options: ServingOptions) -> list[int]:
    """Return the tokens of the conversations that the server holds at once: a long one and short ones if they share."""
    shared_tokens, beside = count_shared_tokens(options), SHARED_REQUESTS - 1
    longest = options.context_tokens - 8
    if shared_tokens is None:
        return [longest] * (options.parallel or 1)
    return [longest, *[shared_tokens // beside - 8] * beside]


def _count_further(options: ServingOptions, layout: Layout | None) -> int:
    """Return so many conversations that those which are remembered would take twice the memory for them."""
    alone = estimate(Workload(layout), structs.replace(options, parallel=1))
    assert alone
    return 2 * options.prompt_cache_bytes // alone.parts.cache_bytes


def _converse(url: str, slot: int | None, tokens: int, first: int = 0) -> None:
    """Send a conversation of two turns: each turn leaves checkpoints, up to their limit."""
    for share in (2, 1):
        _prompt(url, slot, range(first, first + tokens // share))


def _prompt(url: str, slot: int | None, tokens: Iterable[int]) -> None:
    prompt = [3 + token % 250 for token in tokens]
    question = {"prompt": prompt, "n_predict": 1, "id_slot": -1 if slot is None else slot, "cache_prompt": True}
    request = urllib.request.Request(  # noqa: S310 - our own server on loopback
        f"{url}/completion", json.dumps(question).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as response:  # noqa: S310 - as above
        response.read()
