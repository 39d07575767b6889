"""The requests and tokens of each key at each service, since this replica started.

Counts by service are kept for a bounded number of keys and services; what is beyond is counted together. Besides, each
GatewayKey has a total of its own as long as it exists: the controller reads these totals for the status of the keys.
"""

import secrets
from collections.abc import Iterable, Iterator
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from gateway.proxy.metrics import list_family

MOST_LABEL_SETS: Final = 1000
_PREFIX: Final = "pomona_gateway_key"
_OTHERS: Final = ("other", "other", "other")
_COUNTERS: Final = {
    "requests": "Requests of a key to a service that its limits admitted.",
    "prompt_tokens": "Tokens of prompts, as engines report them.",
    "generated_tokens": "Generated tokens, as engines report them.",
}
"""By field of `KeyUsage`: description."""
USAGE_PATH: Final = "/usage"
"""Path of the totals of all keys, beside the metrics."""
REPLICA: Final = secrets.token_hex(8)
"""Identifier of this process, whose totals begin at 0."""
_MOST_COUNTED: Final = 1 << 53
"""The most that a total has: engines of tenants state what they like."""
_Counted = Annotated[int, Meta(ge=0, le=_MOST_COUNTED)]


class KeyTotal(msgspec.Struct):
    """The use of one GatewayKey, of all services together."""

    namespace: str
    name: str
    requests: int = 0
    tokens: int = 0
    """Those of prompts and answers together."""


class KeyCount(msgspec.Struct, frozen=True, array_like=True):
    """The total of one key in the answer of `USAGE_PATH`."""

    requests: _Counted
    tokens: _Counted


class ReplicaUsage(msgspec.Struct, frozen=True):
    """The answer of `USAGE_PATH`: the totals of one replica."""

    replica: Annotated[str, Meta(pattern="^[0-9a-f]{16}$")]
    keys: dict[str, KeyCount]
    """The keys that were used, by uid of the GatewayKey."""


class KeyUsage(msgspec.Struct):
    """The use that one key, of a namespace, made of one service."""

    namespace: str
    key: str
    service: str
    requests: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0


class UsageTable:
    """The usage of all keys."""

    def __init__(self) -> None:
        self._usages: dict[tuple[str, str, str], KeyUsage] = {}

    def count(self, total: KeyTotal, service: str, *, prompt_tokens: int, generated_tokens: int) -> None:
        """Count a request that has ended for its key, with the tokens that its engine reported."""
        total.requests += 1
        total.tokens = min(total.tokens + prompt_tokens + generated_tokens, _MOST_COUNTED)

        labels = (total.namespace, total.name, service)
        usage = self._usages.get(labels)
        if usage is None:
            if len(self._usages) >= MOST_LABEL_SETS:
                labels = _OTHERS
            usage = self._usages.setdefault(labels, KeyUsage(*labels))
        usage.requests += 1
        usage.prompt_tokens += prompt_tokens
        usage.generated_tokens += generated_tokens

    def forget_key(self, namespace: str, key: str) -> None:
        """Forget a key that is gone, so that others have its places."""
        for labels in [labels for labels in self._usages if labels[:2] == (namespace, key)]:
            del self._usages[labels]

    def forget_service(self, service: str) -> None:
        """Forget a service that is gone, named <namespace>/<name>."""
        for labels in [labels for labels in self._usages if labels[2] == service]:
            del self._usages[labels]

    def list_usages(self) -> list[KeyUsage]:
        """Return all usages, in the order of their first requests."""
        return list(self._usages.values())

    def list_series(self) -> Iterator[str]:
        """Yield the series in Prometheus' text form, in pieces."""
        usages = self.list_usages()
        for field, description in _COUNTERS.items():
            samples = [
                ({"namespace": usage.namespace, "key": usage.key, "service": usage.service}, getattr(usage, field))
                for usage in usages
            ]
            yield from list_family(f"{_PREFIX}_{field}_total", description, "counter", samples)


def render_usage(totals: Iterable[tuple[str, KeyTotal]]) -> bytes:
    """Return the answer of `USAGE_PATH`, from the total of each key and the uid of its GatewayKey."""
    counts = {uid: KeyCount(total.requests, total.tokens) for uid, total in totals if total.requests}
    return msgspec.json.encode(ReplicaUsage(REPLICA, counts))
