"""The requests and tokens of each key at each service, since this replica started.

Counts are kept for a bounded number of keys and services; what is beyond is counted together.
"""

from typing import Final

import msgspec

from gateway.proxy.metrics import family_lines

MOST_LABEL_SETS: Final = 1000
_PREFIX: Final = "pomona_gateway_key"
_OTHERS: Final = ("other", "other", "other")
_COUNTERS: Final = {
    "requests": "Requests of a key to a service that its limits admitted.",
    "prompt_tokens": "Tokens of prompts, as engines report them.",
    "generated_tokens": "Generated tokens, as engines report them.",
}
"""By field of `KeyUsage`: description."""


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

    def count(self, namespace: str, key: str, service: str, *, prompt_tokens: int, generated_tokens: int) -> None:
        """Count a request that has ended, with the tokens that its engine reported."""
        labels = (namespace, key, service)
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

    def list_usages(self) -> list[KeyUsage]:
        """Return all usages, in the order of their first requests."""
        return list(self._usages.values())

    def render_metrics(self) -> bytes:
        """Return the series in Prometheus' text form."""
        lines: list[str] = []
        for field, description in _COUNTERS.items():
            samples = [
                ({"namespace": usage.namespace, "key": usage.key, "service": usage.service}, getattr(usage, field))
                for usage in self._usages.values()
            ]
            lines += family_lines(f"{_PREFIX}_{field}_total", description, "counter", samples)
        return "".join(lines).encode()
