"""The record of one measurement: the speed of a model on a device class, and the identity by which it is found again.

Records are kept by (model hash, device class) in ConfigMaps, one for each model hash with a key for each device class,
and by agents of hosts in their state folders; both encode this one struct.
"""

import hashlib
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from crds.model import Model
from crds.serving import ServingOptions

_HASH_CHARACTERS: Final = 16
_CONTEXT_BUCKETS: Final = (4096, 16384, 65536)
"""Measurements with contexts of one bucket count as alike: the cache that is allocated hardly changes the speed of a
short prompt."""

MOST_TOKENS_PER_SECOND: Final = 1e9
Tokens = Annotated[float, Meta(gt=0, lt=MOST_TOKENS_PER_SECOND)]
"""Tokens a second. A record that says anything else is damaged or forged, and is not read."""
Text = Annotated[str, Meta(max_length=512)]


class MeasuredPerformance(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """One measurement of a model on a device class."""

    tokens_per_second: Tokens
    """Generation of a single stream: the median of the runs."""
    runs: Annotated[list[Tokens], Meta(max_length=100)] = []
    """Generation of each run, in tokens/s."""
    prompt_tokens_per_second: Tokens | None = None
    time_to_first_token_ms: Annotated[float, Meta(ge=0, lt=1e9)] | None = None
    inter_token_latency_ms: Annotated[float, Meta(ge=0, lt=1e9)] | None = None
    load_seconds: Annotated[float, Meta(ge=0, lt=1e9)] | None = None
    """Time from the start of the engine to its first token."""
    concurrency: Annotated[dict[Annotated[str, Meta(pattern=r"^[1-9][0-9]{0,3}$")], Tokens], Meta(max_length=32)] = {}
    """Generation of all streams together in tokens/s, by their number: {"1": 52.1, "4": 160.0}."""
    micro_batch_tokens: Annotated[int, Meta(ge=1, le=1_000_000)] = 128
    warmup: Annotated[int, Meta(ge=0, le=1000)] = 0
    """Runs before the measured ones."""
    model: Text = ""
    """Name of the Model on which it was measured; Models of other names may share the hash."""
    runtime: Text = ""
    image: Text = ""
    node: Text = ""
    """Node or host on which it was measured."""
    measured_at: Text = ""
    """RFC 3339."""
    source: Literal["job", "host", "live"] = "job"
    accelerator: Text = ""
    """Vendor of the devices, as `devices/vendors.py` names it. The controller writes this and the next one."""
    estimated_tokens_per_second: Tokens | None = None
    """The estimate without corrections, beside which the measurement corrects those of other models; None: unknown."""


def hash_model(model: Model, runtime: str, options: ServingOptions) -> str:
    """Return the identity of what is measured: the same weights and engine, with a context of the same bucket.

    Args:
        model: the Model, of which source, revision or digest, and quantization count, and not its name.
        runtime: the engine.
        options: its settings.
    """
    status = model.status
    # The number of bounds below the context, such as 0 up to 4096.
    bucket = sum(options.context_tokens > bound for bound in _CONTEXT_BUCKETS)
    quantization = status.gguf.quantization if status.gguf else ""
    facts = [model.spec.source, status.revision or status.sha256, quantization, runtime, str(bucket)]
    return hashlib.sha256("|".join(facts).encode()).hexdigest()[:_HASH_CHARACTERS]
