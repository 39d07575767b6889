"""What llama.cpp really holds: its resident size after prompts of the full context, beside what was estimated.

Resident, because that is what a Mac cannot take back: there Metal wires weights, cache and buffers alike. Here the
weights are mapped from a file, whose pages count once they are touched (llama.cpp touches all when it loads), and so do
those of the buffers; hence the prompts. Zeros do not shrink any of it.
"""

import json
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from msgspec import structs

from artifacts.gguf import parse
from artifacts.gguf_facts import layout_of
from crds.serving import ServingOptions
from devices.footprint import footprint_bytes
from fitness.memory import Estimate, Workload, estimate
from runtimes.serving import build_serving
from tests.support import llama_server
from tests.support.tiny_models import hollow_gguf
from tests.support.tiny_models.hollow_gguf import Shape

_HEADER_BYTES = 8 << 20
_TIMEOUT_SECONDS = 600.0


class Row(NamedTuple):
    """A model and how it is served."""

    shape: Shape
    options: ServingOptions


class Measured(NamedTuple):
    """What one row takes."""

    row: Row
    estimated: Estimate
    resident_bytes: int

    @property
    def error(self) -> float:
        """How far the estimate is off; above 0 it is too high."""
        return self.estimated.total_bytes / self.resident_bytes - 1


def measure(row: Row, folder: Path) -> Measured:
    """Serve a row for real with one thread; the model is written to `folder` and removed again."""
    path = folder / "hollow.gguf"
    hollow_gguf.write(path, row.shape)
    try:
        with path.open("rb") as file:
            layout = layout_of(parse(file.read(_HEADER_BYTES), path.stat().st_size))
        estimated = estimate(Workload(layout), row.options)
        assert estimated, f"{row.shape.kind} is not understood"
        return Measured(row, estimated, _resident_bytes(path, row.options))
    finally:
        path.unlink()


def _resident_bytes(path: Path, options: ServingOptions) -> int:
    stated = structs.replace(options, extra_args=["-t", "2", *options.extra_args])
    with llama_server.serve_as(build_serving("hollow", str(path), stated)) as server:
        for slot in range(options.parallel):
            # A conversation that goes on: each turn leaves checkpoints, until there is no room for more.
            for share in (2, 1):
                _prompt(server.url, slot, range((options.context_length - 8) // share))
        found = footprint_bytes(server.process.pid)
        assert found
        return found


def _prompt(url: str, slot: int, tokens: Iterable[int]) -> None:
    prompt = [3 + token % 250 for token in tokens]
    question = {"prompt": prompt, "n_predict": 1, "id_slot": slot, "cache_prompt": True}
    request = urllib.request.Request(  # noqa: S310 - our own server on loopback
        f"{url}/completion", json.dumps(question).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as response:  # noqa: S310 - as above
        response.read()
