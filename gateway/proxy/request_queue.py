"""A bounded FIFO queue per service: requests take the free slots of its backends, and the others wait here.

They wait in the proxy and not in the engine, so that a client that hangs up leaves the queue at once, that the queue
has a limit, and that a refused client learns when to try again.
"""

import math
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from gateway.proxy.config import Backend
from gateway.proxy.token_lanes import UNKNOWN

if TYPE_CHECKING:
    from gateway.proxy.inference_request import InferenceRequest

_LONGEST_RETRY_SECONDS = 60
_NEWEST_WEIGHT = 0.2


class RequestQueue:
    """The requests of one service that hold a slot, and those that wait for one; first come, first served.

    Args:
        take_slot: takes a free slot; returns None when there is none. Whoever gives a slot back calls `admit_waiting`
            of the queue that may use it, which need not be this one: a backend may have moved to another service.
        limit: how many requests may wait.
    """

    def __init__(self, take_slot: Callable[["InferenceRequest"], Backend | None], limit: int) -> None:
        self.limit = limit
        self.in_flight = 0
        """The requests that hold a slot of a backend: the right to be one of those that it works on."""
        self._take_slot = take_slot  # takes a free slot of one of the backends; None: there is none
        self._waiting: deque[InferenceRequest] = deque()
        self._mean_seconds = 0.0
        """The mean time for which requests held their slots, the latest ones counting most; 0: none has ended."""

    @property
    def queued(self) -> int:
        """The number of requests that wait."""
        return len(self._waiting)

    def take_free_slot(self, request: "InferenceRequest") -> Backend | None:
        """Take a free slot for a request that has not waited; None if none is free, or others wait for it.

        Those that wait for another adapter do not wait for its slot: perhaps another backend has that.
        """
        if self.limit < 0 or any(waiting.adapter in ("", request.adapter) for waiting in self._waiting):
            return None
        slot = self._take_slot(request)
        if slot is not None:
            self.in_flight += 1
        return slot

    @property
    def is_full(self) -> bool:
        """True if no more requests may wait."""
        return len(self._waiting) >= self.limit

    @property
    def body_bytes(self) -> int:
        """Memory that the bodies of the waiting requests take."""
        return sum(request.body_bytes for request in self._waiting)

    def waiting_seconds(self, now: float) -> float:
        """Return the time for which the first request has waited at `now` of the monotonic clock; 0 if none waits."""
        return now - self._waiting[0].phase_began if self._waiting else 0.0

    def enqueue(self, request: "InferenceRequest") -> None:
        """Append a request, which gets the next free slot after those that wait already."""
        self._waiting.append(request)

    def estimate_retry_seconds(self) -> int:
        """Estimate in how many seconds a slot will be free, from how long requests took lately."""
        seconds = math.ceil(self._mean_seconds / max(1, self.in_flight))
        return max(1, min(seconds, _LONGEST_RETRY_SECONDS))

    def leave(self, request: "InferenceRequest") -> None:
        """Forget a request that waits, because its client has hung up."""
        with suppress(ValueError):
            self._waiting.remove(request)
            self.admit_waiting()  # smaller ones may have waited behind it

    def finish_request(self, seconds: float) -> None:
        """Count a request as ended, which held its slot for `seconds`, and update the mean of these times."""
        self.in_flight -= 1
        weight = _NEWEST_WEIGHT if self._mean_seconds else 1  # the first time is the mean
        self._mean_seconds += weight * (seconds - self._mean_seconds)

    def admit_waiting(self) -> None:
        """Give the free slots to waiting requests; those for the short lane overtake those for the long one."""
        position = 0
        while position < len(self._waiting):
            request = self._waiting[position]
            if slot := self._take_slot(request):
                del self._waiting[position]
                self.in_flight += 1
                request.take_slot(slot)  # this may admit others
                position = -1
            elif request.demand != UNKNOWN and not request.adapter:
                break
            position += 1

    def refuse_waiting(self, is_served: Callable[["InferenceRequest"], bool]) -> None:
        """Refuse the waiting requests that no backend is left to serve."""
        for request in [request for request in self._waiting if not is_served(request)]:
            self._waiting.remove(request)
            request.refuse_slot()
