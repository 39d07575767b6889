"""The state of the agent's connection to the API server, by the last outcome of its calls, for `agent status`."""

import contextlib
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Final, Literal

from kube.client import Client
from kube.credentials import Credentials
from kube.errors import Unreachable
from kube.time import rfc3339
from kube.transport import AiohttpTransport, Request, Response, Stream
from metal_agent.cluster.host_identity import HostIdentity, advise_rejoin
from metal_agent.control.agent_status import ConnectionStatus, IdentityStatus

ConnectionState = Literal["connected", "unreachable", "refused"]
_LEASES: Final = "/leases/"
"""Part of the path of the host's Lease: a host that may not write it has been removed."""


class ApiConnection:
    """The last outcome of the calls to the API server.

    Attributes:
        server: base URL of the API server.
        host_identity: the token of a host that has joined by a code; None with a kubeconfig.
        status: the state of the connection, as `pomona agent status` shows it.
        is_away: True if the last call failed; False before the first one, too.
    """

    def __init__(self, credentials: Credentials) -> None:
        """Begin as unreachable, without an answer so far."""
        identity = credentials.identity
        self.server = credentials.server
        self.host_identity = identity if isinstance(identity, HostIdentity) else None
        self.status = ConnectionStatus("unreachable", rfc3339(datetime.now(UTC)), f"no answer from {self.server} yet")
        self.is_away = False  # unlike the status, which begins as unreachable: no call has failed yet
        # The way out of a refused token.
        self._advice = (
            advise_rejoin(self.host_identity.host)
            if self.host_identity
            else "write a new token into the kubeconfig: it is read again"
        )

    def note_answer(self, request: Request, status: int) -> None:
        """Update the state of the connection by the HTTP status of an answer.

        401: the token is refused. 403 for the host's own Lease: the host was removed. Both are the state `refused`,
        with the way out. Another 403 says nothing of the host: a policy may refuse a single write.
        """
        self.is_away = False
        if status == HTTPStatus.UNAUTHORIZED:
            self._enter_state("refused", f"the API server does not accept the token of this host (401): {self._advice}")
        elif status == HTTPStatus.FORBIDDEN and _LEASES in request.path:
            self._enter_state("refused", f"this host has no right to its Lease any more (403): {self._advice}")
        elif status != HTTPStatus.FORBIDDEN or self.status.state == "unreachable":
            # Any other 403 shows only that the server answers: it ends `unreachable`, but not `refused`.
            self._enter_state("connected", "")

    def note_failure(self, error: Unreachable) -> None:
        """Enter the state `unreachable` after a call without an answer."""
        self.is_away = True
        self._enter_state("unreachable", str(error))

    def _enter_state(self, state: ConnectionState, message: str) -> None:
        """Set state and message of the connection; `since` stays the same as long as the state does."""
        since = self.status.since if state == self.status.state else rfc3339(datetime.now(UTC))
        self.status = ConnectionStatus(state=state, since=since, message=message)


class ObservedTransport(AiohttpTransport):
    """A transport that tells an `ApiConnection` the outcome of each call."""

    def __init__(self, credentials: Credentials, connection: ApiConnection) -> None:
        super().__init__(credentials)
        self._connection = connection

    async def request(self, request: Request) -> Response:
        """Send and read the whole answer. Raises Unreachable."""
        with self._observe_failure():
            response = await super().request(request)
        self._connection.note_answer(request, response.status)
        return response

    @contextlib.asynccontextmanager
    async def stream(self, request: Request, *, idle_seconds: float) -> AsyncIterator[Stream]:
        """Send and read the body as it comes. Raises Unreachable, also after `idle_seconds` without a byte."""
        with self._observe_failure():
            async with super().stream(request, idle_seconds=idle_seconds) as stream:
                self._connection.note_answer(request, stream.status)
                yield stream

    @contextlib.contextmanager
    def _observe_failure(self) -> Iterator[None]:
        """Report a call in this context that gets no answer to the connection, and raise its error."""
        try:
            yield
        except Unreachable as error:
            self._connection.note_failure(error)  # which then is `unreachable`
            raise


@contextlib.asynccontextmanager
async def connect_observed(credentials: Credentials, connection: ApiConnection) -> AsyncIterator[Client]:
    """Open a client whose calls `connection` observes; its connections are closed on exit."""
    transport = ObservedTransport(credentials, connection)
    try:
        yield Client(transport)
    finally:
        await transport.close()


def describe_identity(connection: ApiConnection) -> IdentityStatus | None:
    """Return the token's times as `pomona agent status` shows them; None with a kubeconfig."""
    identity = connection.host_identity
    if identity is None:
        return None
    return IdentityStatus(identity.expires_at, rfc3339(identity.renews_at), identity.renewal_problem)
