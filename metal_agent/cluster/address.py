"""Find and follow the address of this host: after a change of network the host is reached only at the new address.

The address is the one on the route to the API server. The kernel reports changes of the network; in case it misses one,
the address is also checked at intervals. An address that the owner gave is not followed.
"""

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Awaitable, Callable
from typing import Final
from urllib.parse import urlsplit

import structlog

from artifacts import durable
from devices import network
from metal_agent.options import AgentOptions, OptionsError, StartError

_ADDRESS_FILE: Final = "address.json"
_CHECK_SECONDS: Final = 60.0
_SETTLE_SECONDS: Final = 0.2
"""Pause between a change and the check: changes come in bursts, and an address disappears before the next appears."""

log = structlog.get_logger()


async def follow_address(
    options: AgentOptions, server: str, current: str, on_moved: Callable[[str], Awaitable[None]]
) -> None:
    """Call `on_moved` with each new address after `current` until cancelled; return if the owner gave the address.

    The address is looked up after each change that the kernel reports, and at intervals.
    """
    if options.address:
        return
    problem = ""  # the last one that was logged; empty: the address is known
    with contextlib.ExitStack() as stack:
        changed = asyncio.Event()  # never set if the kernel cannot be watched: then the interval alone counts
        try:
            changed = stack.enter_context(network.watch_network())
        except OSError as error:
            log.warning("network_watch_unavailable", error=str(error))

        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CHECK_SECONDS):
                    await changed.wait()
            await asyncio.sleep(_SETTLE_SECONDS)  # changes come in bursts
            changed.clear()

            try:
                address = await asyncio.to_thread(find_current_address, options, server)
            except StartError as error:
                if str(error) != problem:
                    problem = str(error)
                    log.warning("address_unknown", address=current, error=problem)
                continue
            problem = ""

            if address != current:
                log.info("address_changed", before=current, address=address)
                current = address
                await on_moved(address)


def find_route_address(server: str) -> str:
    """Return the address of this host on the route to the API server; no packet is sent. Raises StartError."""
    parts = urlsplit(server)
    try:
        family, kind, *_, target = socket.getaddrinfo(parts.hostname, parts.port or 443, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as route:
            route.connect(target)
            return str(route.getsockname()[0])
    except OSError as error:
        raise StartError(f"no route to the API server {server} ({error}): give --address") from error


def find_address(options: AgentOptions, server: str) -> str:
    """Return the address of this host, or the last known one if the route to `server` cannot be found now.

    Raises:
        StartError: there is none, or the cluster cannot use it.
        OSError: the last known address cannot be read.
    """
    if options.address:
        return check_address(options.address)
    try:
        return find_current_address(options, server)
    except StartError as error:
        last = durable.read(options.folder / _ADDRESS_FILE, str)
        if last is None:
            raise
        log.warning("last_known_address_used", address=last, error=str(error))
        return check_address(last)


def find_current_address(options: AgentOptions, server: str) -> str:
    """Return the address of this host on the route to `server`, and save it. Blocks while a name is resolved.

    Raises:
        StartError: there is no route now, or the cluster cannot use its address.
    """
    address = check_address(find_route_address(server))
    path = options.folder / _ADDRESS_FILE
    try:
        if durable.read(path, str) != address:
            durable.write(path, address)
    except OSError as error:
        log.warning("address_not_saved", address=address, error=str(error))
    return address


def check_address(text: str) -> str:
    """Return the address `text` if the cluster can use it and this host has it; else raises StartError."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError as error:
        raise OptionsError(f"--address {text!r} is no IP address: give one of this host, such as 10.0.0.7") from error

    unreachable = f"the cluster cannot reach address {text}: give the one of this host's network with --address"
    if address.is_loopback or address.is_unspecified or address.is_multicast:
        raise OptionsError(unreachable)
    if address.is_link_local:  # as long as a network that has just been joined has given none
        raise StartError(unreachable)

    # A socket can be bound to an address of this host only.
    try:
        with socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET) as probe:  # noqa: PLR2004 - IPv6
            probe.bind((text, 0))
    except OSError as error:
        raise StartError(f"address {text} is not one of this host ({error}): give --address") from error
    return text
