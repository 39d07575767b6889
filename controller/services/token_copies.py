"""A Secret with copies of other Secrets' tokens: those in force, and those that were replaced and are still valid.

Hosts get one each (`controller.hosts.secrets`), and the gateway some for all services
(`controller.gateway.token_shards`). Copies are for readers that must not read the Secrets themselves.
"""

import base64
import binascii
from collections.abc import Collection, Mapping
from datetime import datetime
from typing import Final

import msgspec

from crds.meta import PREVIOUS_TOKENS_KEY, PreviousToken
from kube.client import Client, Obj
from kube.errors import NotFound
from kube.resources import SECRETS

MOST_TOKENS_BYTES: Final = 384 << 10
"""Most bytes of all base64 values in one Secret: with those that they replaced they fit into one object."""
OVERLAP_SECONDS: Final = 600
"""Time for which a service's token is still valid on hosts after it was replaced."""


def fit_tokens(tokens: Mapping[str, str]) -> dict[str, str]:
    """Return the tokens that fit into one Secret, the smallest first, so that no tenant crowds out the others."""
    fitting, left_bytes = dict[str, str](), MOST_TOKENS_BYTES
    for key in sorted(tokens, key=lambda key: (len(tokens[key]), key)):
        left_bytes -= len(tokens[key])
        if left_bytes < 0:
            break  # those that follow are no smaller
        fitting[key] = tokens[key]
    return fitting


def keep_previous_tokens(
    tokens: Mapping[str, str],
    service_keys: Collection[str],
    existing: Mapping[str, str],
    now: datetime,
    overlap_seconds: int = OVERLAP_SECONDS,
) -> dict[str, str]:
    """Return the data of a Secret with copies: the tokens, and those that were replaced and are still valid.

    The replaced ones are together under one key.

    Args:
        tokens: the base64 values of the tokens by data key.
        service_keys: the keys of tokens that clients of a service send: only these stay valid besides their successor.
        existing: the data that the Secret has.
        now: the wall clock.
        overlap_seconds: time for which a token is kept after it was replaced.
    """
    # 1. Those that were replaced earlier and are still valid.
    previous = {key: token for key, token in _read_previous(existing).items() if token.valid_until > now.timestamp()}

    # 2. Those that `tokens` replaces now.
    valid_until = int(now.timestamp()) + overlap_seconds
    for key in service_keys:
        if key in existing and key in tokens and existing[key] != tokens[key]:
            previous[key] = PreviousToken(existing[key], valid_until)

    # 3. Without those whose key is not needed any more, and those that are in force again.
    previous = {key: token for key, token in sorted(previous.items()) if key in tokens and token.token != tokens[key]}
    fitting = fit_tokens({key: token.token for key, token in previous.items()})
    previous = {key: token for key, token in previous.items() if key in fitting}
    if not previous:
        return dict(tokens)
    return {**tokens, PREVIOUS_TOKENS_KEY: base64.b64encode(msgspec.json.encode(previous)).decode()}


def _read_previous(existing: Mapping[str, str]) -> dict[str, PreviousToken]:
    """Return the replaced tokens in the data of such a Secret by key; empty: there are none, or none can be read."""
    try:
        return msgspec.json.decode(base64.b64decode(existing[PREVIOUS_TOKENS_KEY]), type=dict[str, PreviousToken])
    except (KeyError, binascii.Error, msgspec.DecodeError, UnicodeDecodeError):
        return {}


async def read_secret(client: Client, namespace: str, name: str) -> Obj | None:
    """Return a Secret, or None if it does not exist."""
    try:
        return await client.get(SECRETS, name, namespace)
    except NotFound:
        return None
