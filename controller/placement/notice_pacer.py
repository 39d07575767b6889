"""The pace at which changed queue positions are reported to services.

With each admission the positions of all that wait behind it move: to write them all at once, again and again, would
keep controller and API server busy with numbers. So each service is told at most once a second. Of mere moves some are
told soon, and in a queue that moves all the time one in two seconds in all, those nearest to the head first. The others
are told when their service is reconciled for another reason, such as its token, which is read every ten minutes.
"""

import asyncio
import heapq
import operator
from collections.abc import Callable
from typing import Final

from kube.resources import ObjectKey

SERVICE_SECONDS: Final = 1.0
"""Least time between two notices about one service."""
MOVE_SECONDS: Final = 0.1
"""Least time between two notices about mere moves, of whatever service."""
STEADY_MOVE_SECONDS: Final = 2.0
"""Time between two of them in a queue that moves all the time: each costs a write and its echo, which is several
milliseconds of a processor."""
BURST: Final = 50
"""Moves that are told without that, after a time without any: a short queue is told at once."""


class NoticePacer:
    """Notices that are due, and a timer for the next one; runs in an event loop.

    Args:
        notify: gets each service to tell something.
    """

    def __init__(self, notify: Callable[[ObjectKey], None]) -> None:
        """Start without notices; see the class for the arguments.

        A place is the position of a service in the queue. A move is a change of that alone, which is not urgent.
        """
        self._notify = notify

        # Notices that are queued: `add` and `add_move` put them in, `flush` sends them.
        self._urgent: dict[ObjectKey, None] = {}
        """Services to tell something urgent, in this order."""
        self._moves: dict[ObjectKey, float] = {}
        """Other services to tell something, each with its place."""

        # The pace: times on the clock of the event loop.
        self._notified_at: dict[ObjectKey, float] = {}
        """When each service was notified, of those that were within the last second."""
        self._next_move_at = 0.0
        """When the next notice about a move may be sent."""
        self._steady_until = 0.0
        """The time by which as many moves as were told would have been told at the steady pace."""
        self._timer: asyncio.TimerHandle | None = None
        """Calls `flush` for the notices that it has left; None: it has left none."""

    def add(self, service: ObjectKey) -> None:
        """Queue an urgent notice for a service; `flush` sends it as soon as the pace allows."""
        self._moves.pop(service, None)
        self._urgent.setdefault(service)

    def add_move(self, service: ObjectKey, place: float) -> None:
        """Queue a notice about a mere move of a service, unless an urgent one is queued; the lowest place is next."""
        if service not in self._urgent:
            self._moves[service] = place

    def drop_move(self, service: ObjectKey) -> None:
        """Drop the queued notice about a move of a service: its place is being reported anyway."""
        self._moves.pop(service, None)

    def clear(self) -> None:
        """Forget all that is pending."""
        self._urgent.clear()
        self._moves.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def flush(self) -> None:
        """Send the notices that the pace allows now, at most one about a move, and set a timer for the rest."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        # Keep only the services that were notified within the last second: they get no further notice now.
        self._notified_at = {key: at for key, at in self._notified_at.items() if at + SERVICE_SECONDS > now}

        # 1. Send all urgent notices but those about services that were notified within the last second.
        for service in [key for key in self._urgent if key not in self._notified_at]:
            del self._urgent[service]
            self._notified_at[service] = now
            self._notify(service)

        # 2. Send one notice about a move, if one is due.
        if now >= self._next_move_at:
            self._report_move(now)

        # 3. Call this method again when the next notice may be sent.
        dues = [self._notified_at[service] + SERVICE_SECONDS for service in self._urgent]
        if self._moves:
            dues.append(self._find_next_move())
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_at(min(dues), self.flush) if dues else None

    def _report_move(self, now: float) -> None:
        """Send the notice about the queued move with the lowest place, and set the time of the next one.

        Services that were notified within the last second are passed over; if all were, nothing is sent. A move is due
        every STEADY_MOVE_SECONDS; after a quiet time, BURST of them may be sent faster, one every MOVE_SECONDS.
        """
        # 1. Pick the service. The items of `_moves` are (service, place). One candidate more than were notified is
        # enough: to sort a thousand services takes as long as a write.
        nearest = heapq.nsmallest(len(self._notified_at) + 1, self._moves.items(), key=operator.itemgetter(1))
        service = next((key for key, _place in nearest if key not in self._notified_at), None)
        if service is None:
            return
        del self._moves[service]

        # 2. Set the time of the next notice. `_steady_until` is when this move would have been sent at the steady pace;
        # BURST moves may be ahead of that.
        self._steady_until = max(now, self._steady_until) + STEADY_MOVE_SECONDS
        # After a quiet time the second time has passed already, so that only MOVE_SECONDS delays the next move.
        self._next_move_at = max(now + MOVE_SECONDS, self._steady_until - BURST * STEADY_MOVE_SECONDS)

        # 3. Send it.
        self._notified_at[service] = now
        self._notify(service)

    def _find_next_move(self) -> float:
        """Return when the next notice about a move may be sent; there must be one."""
        if any(service not in self._notified_at for service in self._moves):
            return self._next_move_at
        first_notified_at = min(self._notified_at[service] for service in self._moves)
        return max(self._next_move_at, first_notified_at + SERVICE_SECONDS)
