"""The client of the control socket of a running `pomona up`."""

import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Final
from urllib.parse import quote

import msgspec
from msgspec import structs

from gateway.http.control_client import ControlUnreachableError
from gateway.http.owned_control_client import OwnedControlClient
from gateway.proxy.model_control import AddedModel, AddRequest
from metal_agent.control.agent_status import StopAccepted
from standalone.control.up_status import (
    UP_SOCKET,
    LoadAnswer,
    PullRequest,
    PullUpdate,
    UpStatus,
    WeightsFacts,
    WeightsList,
)

_STATUS_SECONDS: Final = 5.0
"""The longest that a status waits for the proxy."""
_LOOKUP_SECONDS: Final = 120.0
"""The longest that the hub is asked what a name means."""
_PAUSE_SECONDS: Final = 30.0
"""The longest pause in a pull, which has an empty line every 5 s."""


class UpClient(OwnedControlClient):
    """The client of the `pomona up` whose state is in `folder`.

    Every call raises ControlUnreachableError or ControlRefusedError, and may be repeated.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / UP_SOCKET, "pomona-up")

    async def status(self) -> UpStatus:
        """Return the status of the process, with its pid as the kernel names it."""
        status = await self.call("GET", "/status", UpStatus, wait_seconds=_STATUS_SECONDS)
        return structs.replace(status, pid=self.peer_pid)

    async def load(self, name: str) -> LoadAnswer:
        """Begin to load the model of a service."""
        return await self.call("POST", f"/services/{quote(name, safe='')}/load", LoadAnswer)

    async def unload(self, name: str) -> LoadAnswer:
        """Begin to unload the model of a service, once its running requests have ended."""
        return await self.call("POST", f"/services/{quote(name, safe='')}/unload", LoadAnswer)

    async def add(self, model: str) -> AddedModel:
        """Serve the model that a name means on demand, as well as those that are served."""
        body = msgspec.json.encode(AddRequest(model))
        return await self.call("POST", "/models", AddedModel, body=body, wait_seconds=_LOOKUP_SECONDS)

    async def remove(self, name: str) -> None:
        """Serve a model that was added no more."""
        await self.call("DELETE", f"/models/{quote(name, safe='')}", AddedModel)

    async def stop(self, *, now: bool) -> int:
        """Stop everything, after which the process ends; with `now`, abort running requests. Return its pid at once."""
        await self.call("POST", f"/stop{'?now=true' if now else ''}", StopAccepted)
        return self.peer_pid

    async def pull(self, source: str) -> AsyncGenerator[PullUpdate, None]:
        """Fetch weights into the store, and yield the progress; the last update has the digest or the problem."""
        body = msgspec.json.encode(PullRequest(source))
        lines = self.stream_lines("POST", "/pull", body=body, pause_seconds=_PAUSE_SECONDS)
        async with contextlib.aclosing(lines):
            async for line in lines:
                update = self.decode(line, PullUpdate)
                yield update
                if update.digest or update.problem:
                    return
        raise ControlUnreachableError("`pomona up` has ended before the weights were fetched")

    async def list_weights(self) -> list[WeightsFacts]:
        """Return the stored weights."""
        return (await self.call("GET", "/weights", WeightsList)).weights

    async def delete_weights(self, digest: str) -> WeightsFacts:
        """Delete weights, and return what they were."""
        return await self.call("DELETE", f"/weights/{quote(digest, safe='')}", WeightsFacts)
