"""The header fields about rate limits, as OpenAI's and Anthropic's clients read them."""

import time
from collections.abc import Callable, Sequence
from typing import Final

from gateway.cluster.rate_limits import MINUTE_US, REQUESTS, TOKENS, LimitScope
from gateway.proxy import paths

_OPENAI: Final = {
    REQUESTS: ("x-ratelimit-limit-requests", "x-ratelimit-remaining-requests", "x-ratelimit-reset-requests"),
    TOKENS: ("x-ratelimit-limit-tokens", "x-ratelimit-remaining-tokens", "x-ratelimit-reset-tokens"),
}
_ANTHROPIC: Final = {
    kind: tuple(f"anthropic-ratelimit-{name}-{field}" for field in ("limit", "remaining", "reset"))
    for kind, name in ((REQUESTS, "requests"), (TOKENS, "tokens"))
}
_SECOND_MS: Final = 1000
_MINUTE_MS: Final = 60_000


def render_rate_headers(
    scopes: Sequence[LimitScope], route: str, now_us: int, wall_clock: Callable[[], float]
) -> dict[str, str]:
    """Return the fields about requests and tokens a minute, in the form of the path whose name is `route`.

    Each is about the scope that admits least. Without a limit there are no fields.
    """
    headers: dict[str, str] = {}
    for kind in (REQUESTS, TOKENS):
        least: int | None = None
        least_limit = backlog_us = 0
        for scope in scopes:
            limit = scope.limits[kind]
            if limit is None:
                continue
            used_us = (scope.requests if kind == REQUESTS else scope.tokens).backlog_us(now_us)
            remaining = limit * (MINUTE_US - used_us) // MINUTE_US
            if least is None or remaining < least:
                least, least_limit, backlog_us = remaining, limit, used_us
        if least is None:
            continue
        is_anthropic = route in paths.ANTHROPIC_ROUTES
        limit_name, remaining_name, reset_name = (_ANTHROPIC if is_anthropic else _OPENAI)[kind]
        headers[limit_name] = str(least_limit)
        headers[remaining_name] = str(max(least, 0))  # it is negative in debt
        headers[reset_name] = (
            format_time(wall_clock() + backlog_us / 1e6) if is_anthropic else format_duration(backlog_us)
        )
    return headers


def format_duration(duration_us: int) -> str:
    """Return a duration in Go's form, rounded up to milliseconds: 0s, 120ms, 1.5s, 6m0s, 1h0m0s."""
    milliseconds = -(-duration_us // 1000)
    if 0 < milliseconds < _SECOND_MS:
        return f"{milliseconds}ms"
    minutes, milliseconds = divmod(milliseconds, _MINUTE_MS)
    seconds = f"{milliseconds / _SECOND_MS:g}s"
    if not minutes:
        return seconds
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{seconds}" if hours else f"{minutes}m{seconds}"


def format_time(unix_seconds: float) -> str:
    """Return a time by RFC 3339, in whole seconds, rounded up."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(-(-unix_seconds // 1)))
