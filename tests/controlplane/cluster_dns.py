"""Cluster DNS of a sandbox: the names of Services with a ClusterIP, over UDP; every other name does not exist."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable
from ipaddress import IPv4Address

ADDRESS = "10.0.0.10"
"""The server's address: one of the first addresses of the range, which the API server gives to no Service by itself."""
PORT = 53
DOMAIN = "cluster.local"
SECONDS = 5
"""Time for which a client may keep an answer."""
QUERY_BYTES = 512
HEADER = struct.Struct(">HHHHHH")
RESPONSE, WANTS_RECURSION, NOT_FOUND = 0x8480, 0x0100, 3
"""Flags of an authoritative response of a server that recurses, one that a client sends, and a status."""
A, INTERNET = 1, 1

FindService = Callable[[str, str], str | None]
"""Returns the ClusterIP of a Service by its name and namespace; None if it has none."""


def resolv_conf(namespace: str, server: str) -> str:
    """Return the resolv.conf of a pod in a namespace, as a kubelet writes it."""
    search = f"{namespace}.svc.{DOMAIN} svc.{DOMAIN} {DOMAIN}"
    return f"search {search}\nnameserver {server}\noptions ndots:5\n"


def answer(query: bytes, find: FindService) -> bytes:
    """Return the response to a query with one question."""
    number, flags, *_ = HEADER.unpack_from(query)
    labels, position = [], HEADER.size
    while length := query[position]:
        labels.append(query[position + 1 : position + 1 + length].decode().lower())
        position += 1 + length
    question = query[HEADER.size : position + 5]
    kind, _ = struct.unpack(">HH", question[-4:])
    name, _, rest = ".".join(labels).partition(".")
    namespace, _, domain = rest.partition(".")
    address = find(name, namespace) if domain == f"svc.{DOMAIN}" else None
    # An address is the only record of a name: a client that asks for another one is told that the name exists.
    records = b""
    if address and kind == A:
        name_of_question = 0xC000 | HEADER.size
        records = struct.pack(">HHHIH", name_of_question, A, INTERNET, SECONDS, 4) + IPv4Address(address).packed
    status = 0 if address else NOT_FOUND
    head = HEADER.pack(number, RESPONSE | flags & WANTS_RECURSION | status, 1, 1 if records else 0, 0, 0)
    return head + question + records


async def serve(find: FindService) -> None:
    """Answer for ever."""
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.setblocking(False)
        server.bind((ADDRESS, PORT))
        while True:
            query, client = await loop.sock_recvfrom(server, QUERY_BYTES)
            with contextlib.suppress(IndexError, UnicodeDecodeError, struct.error):  # no query
                await loop.sock_sendto(server, answer(query, find), client)
