"""A connection that a client gives up on uvloop, as the controller runs, closes its own file and no other's."""

import asyncio
import contextlib
import gc
import os
import socket

import uvloop


def test_connection_that_is_given_up_closes_no_file_that_was_opened_since() -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            opened = socket.create_connection(server.getsockname())
            number = opened.fileno()
            # As an HTTP client does after a time-out, on a machine that did not run it meanwhile.
            loop = asyncio.get_running_loop()
            connecting = asyncio.ensure_future(loop.create_connection(asyncio.Protocol, sock=opened))
            await asyncio.sleep(0)
            connecting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await connecting
            assert opened.fileno() == -1, "the loop has closed it"
            # Another file gets the number that is free again.
            other = os.open(os.devnull, os.O_RDONLY)
            assert other == number
            del opened, connecting
            gc.collect()
            os.fstat(other)
            os.close(other)

    uvloop.run(main())
