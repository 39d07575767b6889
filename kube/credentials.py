"""Where the API server is and who we are: kubeconfig, in-cluster files, tokens that rotate, exec plugins.

Importing `kubernetes` costs 21 to 24 MiB of resident memory and 0.8 s, a quarter of what a Mac's agent may use.
So entries that are plain data (token, token file, client certificate, in-cluster files) are read here, and the
library is imported only for those that run something: exec plugins and auth providers (OIDC and others).
"""

import ssl
from pathlib import Path


class CredentialsError(Exception):
    """The configuration cannot be used; the message names file, entry and the way out."""


class Credentials:
    """One server and one identity; its repr shows no secret.

    Attributes:
        server: base URL without a trailing slash.
        tls: the context of all connections, built once; None for a plain http server.
        tls_server_name: name to check in the server's certificate, where it is not the URL's.
        proxy: URL of an HTTP proxy to use.
    """

    server: str
    tls: ssl.SSLContext | None
    tls_server_name: str | None
    proxy: str | None

    async def authorization(self) -> str | None:
        """The value of the Authorization header as of now."""
        raise NotImplementedError

    async def refresh(self) -> bool:
        """Get new credentials after a 401; returns whether it is worth sending the request again."""
        raise NotImplementedError


def load(kubeconfig: Path | None, token_file: Path | None = None) -> Credentials:
    """Read the configuration of the current context.

    Without `kubeconfig`: the files in $KUBECONFIG, else the ServiceAccount of the pod, else ~/.kube/config.
    `token_file` takes the place of the user's own token, and is read again when it changes on disk.

    Raises:
        CredentialsError: no configuration, or one that cannot be used.
    """
    raise NotImplementedError
