"""Short answers of pods over HTTP: their sender is not trusted, so that time and length are bounded."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Final

import aiohttp

TIMEOUT_SECONDS: Final = 5.0


def open_session() -> aiohttp.ClientSession:
    """Return a session that keeps no connection open: one pod of many is asked again only seconds later."""
    connector = aiohttp.TCPConnector(force_close=True, limit=0)
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)
    return aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=False, auto_decompress=False)


async def read_answer(
    session: aiohttp.ClientSession, url: str, most_bytes: int, headers: Mapping[str, str] | None = None
) -> bytes | None:
    """Return the body of the answer to a GET; None if there is none, or it is longer than `most_bytes`."""
    headers = {"Accept-Encoding": "identity", **(headers or {})}
    try:
        async with session.get(url, headers=headers, allow_redirects=False) as response:
            if response.status != HTTPStatus.OK:
                return None
            text = bytearray()
            async for chunk in response.content.iter_any():
                text += chunk
                if len(text) > most_bytes:
                    return None
            return bytes(text)
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
        return None
