"""Connections to a port of a pod by way of the API server, as `kubectl port-forward` makes them.

Each connection is a WebSocket with the subprotocol `v4.channel.k8s.io`, which the API server passes on to the kubelet.
Each of its messages begins with the number of a channel: 0 has the bytes of the connection, 1 the kubelet's errors. The
first message of each channel has the port, as two bytes.

The package `kubernetes` forwards by a thread and a blocking socket for each connection, with the credentials of its own
client. This runs in the event loop, and a refused token is refreshed as in every other call.
"""

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator
from http import HTTPStatus
from pathlib import Path
from typing import Final

import aiohttp
import structlog

from kube.credentials import Credentials
from kube.errors import BY_STATUS, ApiError, Unreachable
from kube.kubeconfig import CredentialsError
from kube.resources import PODS

log = structlog.get_logger()

_PROTOCOL: Final = "v4.channel.k8s.io"
_DATA: Final = 0
_ERROR: Final = 1
_PORT_BYTES: Final = 2
_CHUNK_BYTES: Final = 1 << 16
_CONNECT_SECONDS: Final = 10.0


@contextlib.asynccontextmanager
async def forward_port(credentials: Credentials, namespace: str, pod: str, port: int) -> AsyncIterator[Path]:
    """Yield the path of a unix socket, each connection to which is one to a port of a pod.

    No other user of this machine can connect to the socket.

    Raises:
        ApiError: the API server refuses.
        Unreachable: the API server or the kubelet does not answer.
    """
    async with aiohttp.ClientSession() as session:
        forwarder = _PortForwarder(session, credentials, namespace, pod, port)
        # A first connection, so that a refusal is raised here; afterwards it would only be a closed connection.
        await (await forwarder.open()).close()
        with tempfile.TemporaryDirectory(prefix="pomona-") as folder:
            path = Path(folder) / "socket"
            server = await asyncio.start_unix_server(forwarder.serve, path)
            try:
                yield path
            finally:
                server.close()


class _PortForwarder:
    """The connections to one port of one pod."""

    def __init__(
        self, session: aiohttp.ClientSession, credentials: Credentials, namespace: str, pod: str, port: int
    ) -> None:
        self._session = session
        self._credentials = credentials
        self._url = f"{credentials.server}{PODS.path(namespace, pod, 'portforward')}"
        self._port = port
        self._call = f"port-forward pods {namespace}/{pod}"

    async def open(self) -> aiohttp.ClientWebSocketResponse:
        """Open a connection to the port; after a 401, try once more with new credentials if there are any.

        Raises ApiError and Unreachable.
        """
        credentials = self._credentials

        # A refused token is refreshed once: the second try is the last one.
        for is_last in (False, True):
            authorization = None
            try:
                authorization = await credentials.authorization()
                async with asyncio.timeout(_CONNECT_SECONDS):
                    return await self._session.ws_connect(
                        self._url,
                        params={"ports": str(self._port)},
                        protocols=(_PROTOCOL,),
                        headers={"Authorization": authorization} if authorization else {},
                        ssl=credentials.tls or True,
                        server_hostname=credentials.tls_server_name,
                        proxy=credentials.proxy,
                        max_msg_size=0,  # no limit
                    )
            except aiohttp.WSServerHandshakeError as error:
                is_refused = error.status == HTTPStatus.UNAUTHORIZED
                if is_refused and not is_last and await credentials.refresh(authorization):
                    continue
                raise BY_STATUS.get(error.status, ApiError)(
                    self._call, status=error.status, reason="UpgradeRefused", message=_explain(error)
                ) from error
            except (aiohttp.ClientError, OSError, TimeoutError, CredentialsError) as error:
                raise Unreachable(f"{self._call}: {str(error) or type(error).__name__}") from error
        raise AssertionError("the second try returns or raises")

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass the bytes of one connection on, in both directions, until either side closes it."""
        try:
            async with await self.open() as socket:
                sending = asyncio.create_task(_send(reader, socket))
                try:
                    await _receive(socket, writer)
                finally:
                    sending.cancel()
                    await asyncio.wait({sending})
        except (ApiError, Unreachable, OSError) as error:
            # The client of the socket sees that its connection ends, and reports that.
            log.info("forwarded_connection_lost", error=str(error))
        finally:
            writer.close()


def _explain(error: aiohttp.WSServerHandshakeError) -> str:
    """Return a message for a refusal, whose own text does not reach a client of WebSockets."""
    if error.status == HTTPStatus.FORBIDDEN:
        return "it takes the rights to get and create pods/portforward, which the cluster roles edit and admin have"
    return f"the API server or the kubelet answered {error.status}"


async def _send(reader: asyncio.StreamReader, socket: aiohttp.ClientWebSocketResponse) -> None:
    """Pass the client's bytes on to the pod, until the client closes its side."""
    with contextlib.suppress(OSError, aiohttp.ClientError):
        while data := await reader.read(_CHUNK_BYTES):
            await socket.send_bytes(bytes([_DATA]) + data)
        await socket.close()


async def _receive(socket: aiohttp.ClientWebSocketResponse, writer: asyncio.StreamWriter) -> None:
    """Pass the pod's bytes on to the client, until the pod's side closes or the kubelet reports an error.

    The first byte of a message is its channel: data or errors. The first message of each begins with the port, which
    is dropped.
    """
    awaits_port = {_DATA, _ERROR}  # channels whose first message has not come yet
    async for message in socket:
        if message.type is not aiohttp.WSMsgType.BINARY or not message.data:
            continue

        channel, data = message.data[0], message.data[1:]
        if channel in awaits_port:
            awaits_port.discard(channel)
            data = data[_PORT_BYTES:]

        if channel == _ERROR and data:
            return
        if channel == _DATA and data:
            writer.write(data)
            await writer.drain()
