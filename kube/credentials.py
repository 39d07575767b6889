"""Address of the API server and our identity: kubeconfig, in-cluster files, tokens that rotate, exec plugins.

Importing `kubernetes` costs 21 to 24 MiB of resident memory and 0.8 s, a quarter of what a Mac's agent may use.
So entries that are plain data (token, token file, client certificate, in-cluster files) are read here, and the
library is imported only for those that run something: exec plugins and auth providers (OIDC and others).
"""

import asyncio
import base64
import importlib
import os
import ssl
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import structlog

from kube.kubeconfig import CredentialsError, KubeconfigEntry, read_kubeconfig

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
PLUGIN_SECONDS = 60.0
"""Time-out of one run of an exec plugin, and the least time between two runs unless a request is refused."""
_EXPIRY_MARGIN_SECONDS = 60.0
_UNSUPPORTED = ("as", "as-groups", "as-uid", "username")

log = structlog.get_logger()


class ClientIdentity(Protocol):
    """The proof of our identity on each request."""

    async def authorization(self) -> str | None:
        """Return the value of the Authorization header as of now. Raises CredentialsError."""

    async def refresh(self, refused: str | None, /) -> bool:
        """Get new credentials after a 401, unless others than `refused` are there by now; return whether there are any.

        `refused` is the value of the header that was sent. Raises CredentialsError.
        """


@dataclass(frozen=True, slots=True)
class Credentials:
    """One server and one identity; its repr shows no secret.

    Attributes:
        server: base URL without a trailing slash.
        identity: our proof of identity.
        tls: the context of all connections, built once; None for a plain http server.
        tls_server_name: name to check in the server's certificate, if it is not the URL's.
        proxy: URL of an HTTP proxy to use.
        authority: PEM certificates that the server's certificate is checked against; None: those of the system.
        namespace: namespace of the context or of the pod; empty if none is stated.
        context: name of the context of the kubeconfig; empty in a pod.
    """

    server: str
    identity: ClientIdentity = field(repr=False)
    tls: ssl.SSLContext | None = None
    tls_server_name: str | None = None
    proxy: str | None = field(default=None, repr=False)
    authority: bytes | None = field(default=None, repr=False)
    namespace: str = ""
    context: str = ""

    async def authorization(self) -> str | None:
        """Return the value of the Authorization header as of now. Raises CredentialsError."""
        return await self.identity.authorization()

    async def refresh(self, refused: str | None) -> bool:
        """Get new credentials after a 401 to `refused`; return whether the request should be sent again."""
        return await self.identity.refresh(refused)


@dataclass(frozen=True, slots=True)
class StaticToken:
    """A token that never changes, or none (client certificate, anonymous)."""

    token: str | None = field(repr=False)

    async def authorization(self) -> str | None:
        """Return the header's value."""
        return f"Bearer {self.token}" if self.token else None

    async def refresh(self, _refused: str | None, /) -> bool:
        """Return False, as there is never a new token."""
        return False


class KubeconfigToken:
    """A token that a kubeconfig contains; after a 401 the files are read again.

    Args:
        source: the kubeconfig and its context, for messages.
        paths: the files.
        token: the token that they contain now.
        context_name: the context whose user has the token; None: the current one.
    """

    def __init__(self, source: str, paths: Sequence[Path], token: str, context_name: str | None = None) -> None:
        self._source = source
        self._paths = paths
        self._context_name = context_name
        self._header = f"Bearer {token}"
        self._reported_header = ""
        """The last header whose refusal was logged."""
        self._lock = asyncio.Lock()  # one refresh at a time

    async def authorization(self) -> str | None:
        """Return the header's value."""
        return self._header

    async def refresh(self, refused: str | None) -> bool:
        """Read the files again; return whether they contain another token than the one refused."""
        async with self._lock:
            if self._header == refused:  # else another request has found a new token already
                user = (await asyncio.to_thread(read_kubeconfig, self._paths, self._context_name)).user
                if not user.get("token"):
                    raise CredentialsError(f"{self._source}: the user has no token any more: write one, or start again")
                self._header = f"Bearer {user['token']}"
        # The files have no other token: logged once for each.
        if self._header == refused and self._reported_header != refused:
            self._reported_header = self._header
            log.error("token_refused", source=self._source, advice="write a new token into this file: it is read again")
        return self._header != refused


class TokenFile:
    """A token file that another program rotates, as kubelet does; while it is missing, its last token is used."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last_stamp: tuple[int, int] | None = None
        self._token = ""

    async def authorization(self) -> str | None:
        """Return the header's value; the file is read again when it changed.

        Raises CredentialsError if there has been no token yet.
        """
        try:
            stat = self._path.stat()
            # _last_stamp: inode and time of change of the file that was read last
            if self._last_stamp != (stat.st_ino, stat.st_mtime_ns):  # it was replaced or written
                text = self._path.read_text(encoding="ascii").strip()
                self._token = text or self._token  # a file that is empty, as while it is written, changes nothing
                self._last_stamp = (stat.st_ino, stat.st_mtime_ns)
        except (OSError, UnicodeError) as error:
            if not self._token:  # else the last token stays in use
                raise CredentialsError(f"token file {self._path}: {error}") from error
        if not self._token:
            raise CredentialsError(f"token file {self._path}: is empty: write a token into it")
        return f"Bearer {self._token}"

    async def refresh(self, refused: str | None) -> bool:
        """Read the file again; return whether it holds another token than the one refused."""
        self._last_stamp = None
        return await self.authorization() != refused


class Plugin:
    """A kubeconfig user that the `kubernetes` library logs in: exec plugin or auth provider."""

    def __init__(self, entry: KubeconfigEntry, tls: ssl.SSLContext | None) -> None:
        self._entry = entry
        self._tls = tls
        self._lock = asyncio.Lock()
        self._header: str | None = None
        """The value of the header Authorization; None: none yet, or the plugin gives a certificate only."""
        self._valid_until = 0.0
        """The time at which the plugin is run again; 0: it was not run yet."""
        # The kubeconfig for the library that runs the plugin: the user and the cluster alone. The library stores the
        # tokens that an auth provider returned (OIDC) in this dict, so it is kept.
        self._config = {
            "current-context": "pomona",
            "contexts": [{"name": "pomona", "context": {"cluster": "pomona", "user": "pomona"}}],
            "clusters": [{"name": "pomona", "cluster": {"server": entry.cluster.get("server", "")}}],
            "users": [{"name": "pomona", "user": dict(entry.user)}],
        }

    async def authorization(self) -> str | None:
        """Return the header's value; log in first when there is none or it is about to expire."""
        async with self._lock:
            if time.time() >= self._valid_until:
                await self._log_in()
            return self._header

    async def refresh(self, refused: str | None) -> bool:
        """Log in again, unless that was done since `refused` was sent: many requests are refused at once.

        Return True, because there are other credentials now.
        """
        async with self._lock:
            if self._header == refused:
                await self._log_in()
        return True

    async def _log_in(self) -> None:
        """Run the plugin; keep its token and certificate, and how long they are valid. Raises CredentialsError."""
        # The first import takes most of a second, and 21 MiB that most processes do not need.
        library = await asyncio.to_thread(importlib.import_module, "kubernetes.aio.client")
        config = await asyncio.to_thread(importlib.import_module, "kubernetes.aio.config")

        settings = library.Configuration()
        try:
            async with asyncio.timeout(PLUGIN_SECONDS):
                loader = await config.load_kube_config_from_dict(self._config, client_configuration=settings)
        except (TimeoutError, ValueError, OSError, config.ConfigException) as error:
            raise CredentialsError(f"{self._entry.source}: cannot log in: {error}") from error

        # Keep the token, as the value of the header, and the certificate.
        self._header = settings.api_key.get("BearerToken")
        certificate = settings.cert_file
        if not self._header and not certificate:
            problem = "the plugin gave neither token nor certificate; run it by hand"
            raise CredentialsError(f"{self._entry.source}: {problem}")
        if certificate and self._tls:
            self._tls.load_cert_chain(certificate, settings.key_file)

        # Run the plugin again shortly before they expire; without a stated time, only after a refusal.
        expiry = getattr(loader, "exec_plugin_expiry", None)
        expires_at = expiry.timestamp() - _EXPIRY_MARGIN_SECONDS if expiry else float("inf")
        earliest_login = time.time() + PLUGIN_SECONDS  # whatever the plugin states, it is not run all the time
        self._valid_until = max(expires_at, earliest_login)


def load(
    kubeconfig: Path | None,
    token_file: Path | None = None,
    environ: Mapping[str, str] = os.environ,
    *,
    context: str | None = None,
) -> Credentials:
    """Read the configuration of a context of kubeconfig files, or of the ServiceAccount of the pod.

    Without `kubeconfig`: the files in $KUBECONFIG, else the ServiceAccount of the pod, else ~/.kube/config.
    `token_file` replaces the token of the user, and is read again when it changes on disk. `context` is the name of a
    context; None: the current one.

    Raises:
        CredentialsError: no configuration, or one that cannot be used.
    """
    # A pod has its ServiceAccount, which counts unless a kubeconfig or a context is named.
    names_kubeconfig = kubeconfig is not None or environ.get("KUBECONFIG") or context
    if not names_kubeconfig and environ.get("KUBERNETES_SERVICE_HOST"):
        return _load_in_cluster(environ, token_file)

    if kubeconfig is not None:
        paths = [kubeconfig]
    elif environ.get("KUBECONFIG"):
        paths = [Path(path).expanduser() for path in environ["KUBECONFIG"].split(os.pathsep) if path]
    else:
        paths = [Path("~/.kube/config").expanduser()]

    entry = read_kubeconfig(paths, context)
    tls = _build_client_tls(entry)
    return Credentials(
        server=_read_server(entry),
        identity=TokenFile(token_file) if token_file else _choose_identity(entry, tls, paths, context),
        tls=tls,
        tls_server_name=entry.cluster.get("tls-server-name"),
        proxy=entry.cluster.get("proxy-url"),
        authority=_read_pem(entry.cluster, "certificate-authority") if tls else None,
        namespace=entry.namespace,
        context=entry.context,
    )


def _load_in_cluster(environ: Mapping[str, str], token_file: Path | None) -> Credentials:
    """Return the credentials of the ServiceAccount of this pod. Raises CredentialsError."""
    host, port = environ["KUBERNETES_SERVICE_HOST"], environ.get("KUBERNETES_SERVICE_PORT", "443")
    authority = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"  # of a URL: an IPv6 address is in brackets
    cluster = {"server": f"https://{authority}", "certificate-authority": str(SERVICE_ACCOUNT / "ca.crt")}
    entry = KubeconfigEntry(source=f"in-cluster configuration ({SERVICE_ACCOUNT})", cluster=cluster, user={})
    namespace_file = SERVICE_ACCOUNT / "namespace"
    return Credentials(
        server=cluster["server"],
        identity=TokenFile(token_file or SERVICE_ACCOUNT / "token"),
        tls=_build_client_tls(entry),
        authority=_read_pem(entry.cluster, "certificate-authority"),
        namespace=namespace_file.read_text().strip() if namespace_file.exists() else "",
    )


def _read_server(entry: KubeconfigEntry) -> str:
    """Return the URL of the API server, without a slash at its end. Raises CredentialsError."""
    server = str(entry.cluster.get("server", "")).rstrip("/")
    if not server.startswith(("https://", "http://")):
        raise CredentialsError(f"{entry.source}: cluster.server {server!r} is not an http(s) URL")
    return server


def _choose_identity(
    entry: KubeconfigEntry, tls: ssl.SSLContext | None, paths: Sequence[Path], context: str | None
) -> ClientIdentity:
    """Return the identity that the user of a kubeconfig has. Raises CredentialsError for what is not supported."""
    user = entry.user
    if refused := [key for key in _UNSUPPORTED if user.get(key)]:
        raise CredentialsError(f"{entry.source}: user has {', '.join(refused)}, which Pomona does not support")
    if user.get("tokenFile"):
        return TokenFile(Path(user["tokenFile"]))
    if user.get("token"):
        return KubeconfigToken(entry.source, paths, str(user["token"]), context)
    if user.get("exec") or user.get("auth-provider"):
        return Plugin(entry, tls)
    return StaticToken(None)  # no header: a client certificate, if the user has one, is in the TLS context


def _build_client_tls(entry: KubeconfigEntry) -> ssl.SSLContext | None:
    """Return the TLS context of the cluster and the user; None for plain http. Raises CredentialsError."""
    if not _read_server(entry).startswith("https://"):
        return None
    try:
        tls = build_tls(_read_pem(entry.cluster, "certificate-authority"))
        if entry.cluster.get("insecure-skip-tls-verify"):
            tls.check_hostname = False
            tls.verify_mode = ssl.CERT_NONE
        certificate, key = _read_pem(entry.user, "client-certificate"), _read_pem(entry.user, "client-key")
        if certificate and key:
            _load_certificate(tls, certificate, key)
    except (OSError, ValueError) as error:
        raise CredentialsError(f"{entry.source}: TLS: {error}") from error
    return tls


def build_tls(authority: bytes | None) -> ssl.SSLContext:
    """Return a context that trusts the PEM certificates `authority` alone, or by default those of the system.

    Raises:
        ValueError: they cannot be read as PEM (ssl.SSLError, which is an OSError, if one is no certificate).
    """
    tls = ssl.create_default_context(cadata=authority.decode() if authority else None)
    # Cluster authorities often lack the key identifiers that Python 3.13 demands and Go does not.
    tls.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return tls


def _read_pem(entry: Mapping[str, Any], name: str) -> bytes | None:
    """Return the content of a field that is either inline base64 (`name`-data, which wins) or a path."""
    if data := entry.get(f"{name}-data"):
        return base64.b64decode(data, validate=True)
    return Path(entry[name]).read_bytes() if entry.get(name) else None


def _load_certificate(tls: ssl.SSLContext, certificate: bytes, key: bytes) -> None:
    """Load a client certificate. `ssl` reads files only: the temporary one is private and deleted afterwards."""
    with tempfile.NamedTemporaryFile(prefix="pomona-") as file:
        file.write(certificate + b"\n" + key)
        file.flush()
        tls.load_cert_chain(file.name)
