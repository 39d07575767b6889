"""The agent's side of its control socket, `agent.sock` in the state folder: GET /status, and POST /stop.

`stop` is a verb that no signal can be: SIGTERM ends the agent only, so that an update or a restart of it unloads no
model, and withdraws the endpoints if the machine shuts down.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Final

from gateway.http.awaited_exchange import AwaitedExchange
from gateway.http.control_calls import ControlError, respond
from gateway.http.control_listener import serve_calls
from gateway.http.named_socket import SocketError
from metal_agent.control.agent_status import AgentStatus, StopAccepted
from metal_agent.options import StartError

AGENT_SOCKET: Final = "agent.sock"


@contextlib.contextmanager
def serve_control(folder: Path, status: Callable[[], AgentStatus], stop: asyncio.Event) -> Iterator[None]:
    """Answer HTTP calls on the unix socket `agent.sock` in `folder` while the context lasts.

    GET /status answers what `status` returns; POST /stop sets `stop`. Raises StartError if the socket cannot be made.
    """

    async def answer(call: AwaitedExchange) -> None:
        """Answer one call, by the `status` and `stop` that `serve_control` was given."""
        match call.exchange.head.method, call.exchange.head.path:
            case "GET", "/status":
                respond(call, status())
            case "POST", "/stop":
                stop.set()
                respond(call, StopAccepted(os.getpid()))
            case method, path:
                raise ControlError(HTTPStatus.NOT_FOUND, f"{method} {path} is no call of this agent")

    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(serve_calls(folder / AGENT_SOCKET, answer))
        except SocketError as error:
            raise StartError(str(error)) from error
        yield
