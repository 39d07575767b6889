"""Follows the address of this host: a laptop that changes its network is reached at the new one, and never at the old.

The right address is the one on the route to the API server. The kernel tells when something of the network changes;
only in case that it does not, a look is taken now and then. An address that the owner gave is not followed.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Final

import structlog

from devices import network
from metal_agent.start import Options, StartError, find_route

_CHECK_SECONDS: Final = 60.0
_SETTLE_SECONDS: Final = 0.2
"""Between a change and the look at what came of it: changes come in bursts, an address goes before the next comes."""

log = structlog.get_logger()


async def follow(options: Options, server: str, current: str, moved: Callable[[str], Awaitable[None]]) -> None:
    """Call `moved` with each new address of this host, for ever; `current` is the first. Returns if it is given."""
    if options.address:
        return
    problem = ""
    with contextlib.ExitStack() as stack:
        changed = asyncio.Event()
        try:
            changed = stack.enter_context(network.watch())
        except OSError as error:
            log.warning("changes of the network are not told, looking now and then", error=str(error))
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CHECK_SECONDS):
                    await changed.wait()
            await asyncio.sleep(_SETTLE_SECONDS)
            changed.clear()
            try:
                found = await asyncio.to_thread(find_route, options, server)
            except StartError as error:
                if str(error) != problem:
                    problem = str(error)
                    log.warning("no new address for this host", address=current, error=problem)
                continue
            problem = ""
            if found != current:
                log.info("address of this host changed", before=current, address=found)
                current = found
                await moved(found)
