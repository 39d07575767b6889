"""The limits of a key and of its namespace, and the count of what its requests have used.

A request is admitted before it reaches an endpoint, with a reservation of the tokens that it may use; when it has
ended, what it has really used takes the place of that, for the limits as for the counts of usage.
"""

from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING, Final

from gateway.cluster.limiter import AdmittedRequest, Limiter
from gateway.cluster.rate_limits import TOKENS, LimitScope
from gateway.cluster.token_estimate import estimate_prompt_tokens, estimate_tokens
from gateway.cluster.usage import KeyTotal, UsageTable
from gateway.proxy import paths
from gateway.proxy.service import Service
from gateway.proxy.token_counts import NO_TOKENS, TokenCount

if TYPE_CHECKING:
    from gateway.cluster.routed_service import RoutedService
    from gateway.proxy.inference_request import InferenceRequest

_MOST_OVERRUN: Final = 8
"""The most that a request is charged, as a multiple of its reservation: engines of tenants state what they like."""


class Admissions:
    """The admission of all requests of this replica: its limiter, and its table of usage."""

    def __init__(self, limiter: Limiter) -> None:
        self.limiter = limiter
        self.usage = UsageTable()

    def admit(
        self, request: "InferenceRequest", service: "RoutedService", total: KeyTotal, scopes: Sequence[LimitScope]
    ) -> "KeyAdmission | Awaitable[KeyAdmission]":
        """Admit a request to a service, at once or once a store of limits has answered. Raises RequestError.

        Args:
            request: the request.
            service: the service.
            total: what its key has used.
            scopes: the limits of the key and of its namespace; empty: it has none.
        """
        if not scopes:
            return KeyAdmission(total, self.usage, None, request)
        tokens = 0
        if any(scope.limits[TOKENS] is not None for scope in scopes):
            tokens = estimate_tokens(request.route, request.body, service.watched.context_length)
        admitted = self.limiter.admit_at_once(scopes, tokens, request.route)
        if admitted is None:
            return self._admit_later(request, total, scopes, tokens)
        return KeyAdmission(total, self.usage, admitted, request)

    async def _admit_later(
        self, request: "InferenceRequest", total: KeyTotal, scopes: Sequence[LimitScope], tokens: int
    ) -> "KeyAdmission":
        admitted = await self.limiter.admit(scopes, tokens, request.route)
        return KeyAdmission(total, self.usage, admitted, request)


class KeyAdmission:
    """An admitted request, whose tokens are reserved until it is settled.

    Args:
        total: what its key has used.
        usage: the table of usage.
        admitted: what it has reserved; None: neither its key nor its namespace has a limit.
        request: the request.
    """

    __slots__ = ("_admitted", "_prompt_tokens", "_route", "_streams", "_total", "_usage")

    def __init__(
        self,
        total: KeyTotal,
        usage: UsageTable,
        admitted: AdmittedRequest | None,
        request: "InferenceRequest",
    ) -> None:
        self._total = total
        self._usage = usage
        self._admitted = admitted
        self._prompt_tokens = estimate_prompt_tokens(request.body)  # for an engine that does not report them
        self._route = request.route
        self._streams = request.body.streams

    def settle(self, service: Service, tokens: TokenCount, *, was_served: bool, was_left: bool) -> None:
        """Count what was used of a service, and give back the rest of the reservation; unserved requests are free."""
        has_worked = (was_served or was_left) and self._route not in paths.TOKEN_COUNT_ROUTES
        prompt = self._prompt_tokens if tokens.prompt is None and has_worked else tokens.prompt or 0
        generated = tokens.generated or 0
        self._usage.count(self._total, service.config.name, prompt_tokens=prompt, generated_tokens=generated)
        if self._admitted and was_left and tokens == NO_TOKENS and not self._streams:
            self._admitted.settle(None)  # the engine may have made the whole answer
        elif self._admitted:
            self._admitted.settle(min(prompt + generated, _MOST_OVERRUN * self._admitted.tokens))

    def render_fields(self) -> bytes:
        """Return the lines of the header fields about what the limits still admit."""
        if self._admitted is None:
            return b""
        headers = self._admitted.headers(self._route)
        return "".join([f"{name}: {value}\r\n" for name, value in headers.items()]).encode()
