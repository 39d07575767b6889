"""How much memory serving an artifact takes, before it is loaded anywhere.

Computed from what the artifact's header says, so that a host is never over-committed by a guess: when a part is not
known, the estimate is unknown too, and the caller must not place the model.
"""

from typing import Final

OVERHEAD_BYTES: Final = 512 * 2**20
"""The engine itself and its compute buffers. The largest is one float for each token of the vocabulary and of the
batch: 512 x 150,000 x 4 bytes are 293 MiB."""


def serving_bytes(
    *, weights_bytes: int | None, kv_bytes_per_token: int | None, context_length: int, parallel: int
) -> int | None:
    """Return the bytes that one replica takes, or None when they cannot be known.

    Args:
        weights_bytes: size of the artifact, all of which is loaded.
        kv_bytes_per_token: bytes of KV cache for one token over all layers, from the artifact's real heads.
        context_length: tokens of context of each request.
        parallel: requests at the same time, each with its whole context.
    """
    if weights_bytes is None or kv_bytes_per_token is None:
        return None
    return weights_bytes + kv_bytes_per_token * context_length * parallel + OVERHEAD_BYTES
