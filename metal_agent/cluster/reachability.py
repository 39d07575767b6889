"""A listener by which the controller finds out whether the cluster reaches this host.

Nothing on a host knows whether a firewall or a route keeps the cluster away, and a host without services has no other
listener. So the agent answers on a spare port of its range with the name of this host, and the controller asks there. A
service that needs the port gets it.
The answer holds no secret, and is the same to all requests.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from typing import Final

import structlog

from gateway.http.limits import ConnectionCaps
from gateway.http.listener import HttpListener
from gateway.http.whole_answers import AnswerServer, AskedQuestion, WholeAnswer, create_listener, explain

_CAPS: Final = ConnectionCaps(total=32, per_peer=16)
_RETRY_SECONDS: Final = 60.0
"""Pause after no port could be bound."""

log = structlog.get_logger()


class ReachabilityListener:
    """The listener of host `host` at `address`.

    Args:
        host: the name of the host, which it answers.
        address: the address at which the cluster reaches this host.
        list_ports: returns the ports to try, in this order.
        on_change: called after `port` has changed.
    """

    def __init__(
        self, host: str, address: str, list_ports: Callable[[], Iterable[int]], on_change: Callable[[], None]
    ) -> None:
        """Listen nowhere so far; `run` binds a port."""
        self.port: int | None = None
        """The bound port; None if no port is bound."""
        self._host, self._address = host, address
        self._list_ports, self._on_change = list_ports, on_change
        self._listener: HttpListener | None = None
        self._must_rebind = asyncio.Event()
        """Set when `run` has to listen elsewhere: at another address, or on another port."""

    def move(self, address: str) -> None:
        """Listen at another address from now on."""
        self._address = address
        self._must_rebind.set()

    def give_up(self, port: int) -> None:
        """Stop listening on `port` before this returns, since a service gets it; `run` then tries another spare port.

        Another port than the one in use needs nothing.
        """
        if port == self.port and self._listener:
            self._listener.unbind()
            self._set_port(None)
            self._must_rebind.set()  # wakes `run`

    async def run(self) -> None:
        """Answer with the host's name on a spare port until cancelled; listen elsewhere when that has to change.

        If no port can be bound, all are tried again after a minute.
        """
        while True:
            self._must_rebind.clear()
            self._listener = listener = await self._bind()
            try:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(None if listener else _RETRY_SECONDS):
                        await self._must_rebind.wait()  # set by `move` and `give_up`
            finally:
                if listener:
                    listener.unbind()
                    self._set_port(None)

    async def _bind(self) -> HttpListener | None:
        """Listen on the first port that can be bound, and report it; return the listener, or None without a port."""
        refusal = "no port of --port-range is free"
        for port in self._list_ports():
            # Without routes: `_answer` answers every path, before any would be looked up.
            listener = create_listener(AnswerServer({}, check=self._answer), self._address, caps=_CAPS)
            try:
                await listener.bind(self._address, port)
            except OSError as error:
                refusal = str(error)
            else:
                self._set_port(port)
                return listener
        log.warning("reachability_not_served", address=self._address, error=refusal)
        return None

    def _set_port(self, port: int | None) -> None:
        """Note the bound port, and report a change of it."""
        if port != self.port:
            self.port = port
            self._on_change()

    def _answer(self, question: AskedQuestion) -> WholeAnswer:
        """Answer any request with the name of the host."""
        question.exchange.keep_alive = False
        return explain(200, self._host)
