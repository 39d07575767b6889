"""Trust in servers of the public web: the system's certificate authorities, which take 2 MiB once they are read."""

import functools
import ssl


@functools.cache
def read_public_trust() -> ssl.SSLContext:
    """Return the context that trusts the system's certificate authorities. Reads them once, and blocks meanwhile."""
    return ssl.create_default_context()


def import_aiohttp_without_trust() -> None:
    """Import aiohttp without the certificate authorities, which it reads at its import for its own default context.

    That default context trusts no server then: requests to the public web have to be made with `read_public_trust`.
    """
    original = ssl.SSLContext.load_default_certs
    ssl.SSLContext.load_default_certs = lambda *_: None  # type: ignore[method-assign]
    try:
        import aiohttp  # noqa: F401, PLC0415 - the purpose
    finally:
        ssl.SSLContext.load_default_certs = original  # type: ignore[method-assign]
