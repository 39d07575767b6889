"""Redeem a join code on the host: exchange it for the host's first token, once, and that for a token of the host's own.

The first request has no credential: it shows that the server's certificate is signed by the authority in the code. Then
the code's PodTemplate is deleted, and the answer completes the first token. This request is sent once: after a cut
nobody knows whether the code is used up, and a second try could not tell the owner's use from a thief's.
"""

from dataclasses import replace
from datetime import UTC, datetime
from http import HTTPStatus
from pathlib import Path
from typing import Final

import msgspec
import structlog

from crds.meta import HOSTS_NAMESPACE
from kube.client import Client, connect
from kube.credentials import Credentials, StaticToken, build_tls
from kube.errors import ApiError, Forbidden, NotFound, Unauthorized, Unreachable
from kube.resources import POD_TEMPLATES
from kube.service_accounts import request_token
from kube.time import rfc3339
from kube.transport import AiohttpTransport, Request
from metal_agent.cluster import host_identity
from metal_agent.cluster.host_identity import FILE_NAME, TOKEN_SECONDS, JoinedHost
from metal_agent.join.host_account import JOIN_CLAIMS, join_code_name
from metal_agent.join.join_code import JoinCode
from metal_agent.native.process import is_running
from metal_agent.options import StartError
from metal_agent.state_folder import own_folder
from metal_agent.supervise.records import Records

_PROBE: Final = Request("GET", "/version")

log = structlog.get_logger()


class JoinError(Exception):
    """This machine has not joined; the message says why and what to do."""


async def join_cluster(code: JoinCode, folder: Path) -> JoinedHost:
    """Redeem `code` and write the identity of this host into the state folder; return it.

    1. Check that the folder is free, and that the server is the one of the code.
    2. Use up the code, which completes the host's first, short-lived token.
    3. Replace that by a token of long life, which only this host knows, and write it.

    Raises:
        JoinError: the folder belongs to another host or cannot be used, or the code cannot be redeemed.
    """
    _check_folder(folder, code)  # step 1
    credentials = _build_code_credentials(code)
    # Without a credential: nothing secret is sent to a server before its certificate was checked.
    await _check_server(replace(credentials, identity=StaticToken(None)))
    async with connect(credentials) as client:
        first_token = await _redeem(client, code)  # step 2

    first = JoinedHost(
        host=code.host,
        server=code.server,
        token=first_token,
        expires_at=rfc3339(datetime.fromtimestamp(code.expires_at, UTC)),
        authority=code.authority_pem,
        tls_server_name=code.tls_server_name,
    )

    joined = await _request_own_token(first, replace(credentials, identity=StaticToken(first_token)))  # step 3
    try:
        host_identity.write_joined_host(folder, joined)
    except OSError as error:
        way_out = f"fix that, then get another code by `pomona host join {code.host}`"
        raise JoinError(f"cannot write {folder / FILE_NAME}: {error}: {way_out}") from error
    return joined


def _check_folder(folder: Path, code: JoinCode) -> None:
    """Return if this host may use the state folder; raise JoinError if it may not.

    * The folder is that of the same host in the same cluster: it may, and even a running agent takes the new identity.
    * It is that of another host or cluster, and engines run from it: it may not. Without a host before, they may run.
    * Else it may unless an agent or `pomona up` uses the folder.
    """
    try:
        before = host_identity.read_joined_host(folder)
        if before and before.host == code.host:
            has_same_authority = bool(code.authority_pem) and before.authority == code.authority_pem
            if before.server == code.server or has_same_authority:
                return  # the same host and cluster: its agent and engines may run

        # Each engine has a record in the folder.
        records = Records(folder / "processes").load().values()
        running = [record.name for record in records if record.identity and is_running(record.identity)]
    except OSError as error:
        raise JoinError(f"cannot use --state-dir {folder}: {error}") from error
    if before and running:
        raise JoinError(
            f"this machine is host {before.host}, and engines of it run here ({', '.join(running)}): remove that host "
            f"by `pomona host remove {before.host}` and stop its agent and engines, or join with another --state-dir"
        )

    # Own the folder for a moment: that fails while another process uses it.
    try:
        with own_folder(folder):
            pass
    except StartError as error:
        prefix = f"this machine is host {before.host}: " if before else ""
        raise JoinError(f"{prefix}{error}, then join as {code.host}") from error


def _build_code_credentials(code: JoinCode) -> Credentials:
    """Return the credentials in the code. Raises JoinError."""
    if not code.server.startswith("https://"):
        raise JoinError(f"the join code leads to {code.server}, without TLS: get another by `pomona host join`")
    try:
        tls = build_tls(code.authority_pem.encode() or None)
    except (OSError, ValueError) as error:
        message = f"the certificate authority in the join code cannot be used: {error}: get another code"
        raise JoinError(message) from error
    return Credentials(code.server, StaticToken(code.token), tls, tls_server_name=code.tls_server_name or None)


async def _check_server(anonymous: Credentials) -> None:
    """Connect without a credential: any answer shows that the server is the one of the code. Raises JoinError."""
    transport = AiohttpTransport(anonymous)
    try:
        await transport.request(_PROBE)
    except Unreachable as error:
        raise JoinError(
            f"cannot reach the API server {anonymous.server}: {error}; nothing secret was sent, and the code is not "
            "used: fix the network, or get a code with an address that this machine reaches, by `pomona host join "
            "NAME --server URL`"
        ) from error
    finally:
        await transport.close()


async def _redeem(client: Client, code: JoinCode) -> str:
    """Use up the code; return the host's first token. Raises JoinError.

    The token is in two parts, so that neither the code nor the cluster has all of it: its claims are in an annotation
    of a PodTemplate, its signature is in the code. Only the answer to the deletion of the PodTemplate shows it, and
    that goes to one client.
    """
    another = f"get another code by `pomona host join {code.host}`"

    try:
        # `take` deletes the PodTemplate and returns it.
        deleted = await client.take(POD_TEMPLATES, join_code_name(code.host), HOSTS_NAMESPACE)
    except (Unauthorized, NotFound, Forbidden) as error:
        # The code's token is not valid, or has no right, any more; or the PodTemplate is gone.
        if datetime.now(UTC).timestamp() >= code.expires_at:
            raise JoinError(f"this join code has expired: {another}") from error
        raise JoinError(
            f"this join code was used already, or replaced by another one: if it was not you who used it, end what it "
            f"opened by `pomona host remove {code.host}`; then {another}"
        ) from error
    except (ApiError, Unreachable) as error:
        # A server whose storage does not answer in time reports an error of its own, and may have deleted nevertheless.
        if isinstance(error, ApiError) and error.status < HTTPStatus.INTERNAL_SERVER_ERROR:
            raise JoinError(f"the API server refused: {error}; the code is not used: try again") from error
        message = f"the API server did not answer, so this join code may be used up: {another} ({error})"
        raise JoinError(message) from error

    claims = (deleted.get("metadata", {}).get("annotations") or {}).get(JOIN_CLAIMS)
    if not claims:
        raise JoinError(f"the API server did not complete this join code: {another}")
    return f"{claims}.{code.signature}"


async def _request_own_token(joined: JoinedHost, credentials: Credentials) -> JoinedHost:
    """Replace the first token by one of long life; if the server does not answer, the agent does it when it starts.

    Raises:
        JoinError: the server does not accept the first token.
    """
    try:
        async with connect(credentials) as client:
            granted = await request_token(client, HOSTS_NAMESPACE, joined.host, TOKEN_SECONDS)
    except Unauthorized as error:
        # For some seconds the server still accepts the token of a code that was replaced. It has then deleted the
        # PodTemplate of the next code, whose claims do not fit this code's signature.
        raise JoinError(
            f"this join code was replaced by another one, and has used it up: get a third by `pomona host join "
            f"{joined.host}`"
        ) from error
    except (ApiError, Unreachable) as error:
        # The first token ends soon: the agent replaces it when it starts.
        log.warning("first_token_kept", host=joined.host, expires_at=joined.expires_at, error=str(error))
        return joined

    return msgspec.structs.replace(joined, token=granted.token, expires_at=granted.expires_at)
