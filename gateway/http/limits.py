"""Limits of the HTTP server: sizes and times of one connection, and the number of connections by the open files."""

import math
from dataclasses import dataclass
from typing import Final

HEAD_BYTES: Final = 16 << 10
"""The longest head of a request or response, and the longest framing of a chunked body beside its chunks."""
HEADER_COUNT: Final = 128
SEND_AT_ONCE_BYTES: Final = 0
"""The high-water mark of a transport for streams: what the system does not take at once pauses the writer."""
SEND_TOGETHER_BYTES: Final = 64 << 10
"""The most bytes that wait for the end of the loop's pass, to be sent with those of other sockets, as
`joined_writes` says; also the high-water mark of transports for such answers."""

UNFINISHED_HEAD_BYTES: Final = 4 << 20
"""The most bytes of heads that have not come whole, of all connections; half of it from one address."""
TLS_COST: Final = 16
"""A connection with TLS takes 37 KiB, as much as so many without."""

_LARGEST_RESERVE: Final = 1024
_MOST_CONNECTIONS: Final = 1 << 15
_SOFT_TOTAL: Final = 1 << 12


@dataclass(frozen=True, slots=True)
class ConnectionTimes:
    """The seconds after which the server gives up on a client."""

    head_seconds: float = 10.0
    """From the first byte of a request, or from the begin of the connection, to the end of the request's head."""
    idle_seconds: float = 75.0
    """Without a request, longer than common load balancers keep idle connections; each costs a descriptor."""
    body_pause_seconds: float = 30.0
    """Between two pieces of a request body, while the handler waits for the body."""
    write_seconds: float = 30.0
    """Until a client has read what is buffered for it; afterwards the connection is aborted."""
    linger_seconds: float = 5.0
    """For a client to read a response that was sent before its request had ended."""
    request_seconds: float = math.inf
    """From the head of a request until the client has read the response, where that is whole and soon made."""
    sweep_seconds: float = 0.5
    """The pause between two looks at all connections, by which each of these times may be longer."""


@dataclass(frozen=True, slots=True)
class ConnectionCaps:
    """The most connections of clients: in all, and from one address."""

    total: int
    per_peer: int
    soft_total: int = 1 << 15
    """Beyond so many, a new connection takes the place of one without a request, if there is one: those cost memory."""
    buffered_bytes: int = 64 << 10
    """Bytes that may wait at each: of requests that a client pipelines, and of answers that it does not read."""


def connection_caps(descriptor_limit: int) -> ConnectionCaps:
    """Return the caps for a process that may have `descriptor_limit` files open.

    An eighth, at most 1024, is kept back for the control socket, the listeners and the logs. As each client may need
    one more for its connection to an engine, clients get half of the rest. One address gets half of all, because the
    clients of a cluster may share the address of a node.
    """
    reserve = min(_LARGEST_RESERVE, descriptor_limit // 8)
    total = max(2, min(_MOST_CONNECTIONS, (descriptor_limit - reserve) // 2))
    return ConnectionCaps(total=total, per_peer=total // 2, soft_total=_SOFT_TOTAL)
