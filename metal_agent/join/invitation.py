"""Invite a host: an administrator makes the host's identity and a join code, which is good for 15 minutes and one use.

The host's first token is cut in two. Its signature is in the code; the rest is in an annotation of the PodTemplate
`HOST.join`. The code also has a token of the ServiceAccount `HOST.join`, whose only right is to delete that object. The
answer to this deletion has the annotation: the API server gives it to one client.
"""

import asyncio
import contextlib
import ipaddress
import re
import ssl
import time
from dataclasses import replace
from datetime import datetime
from typing import Final
from urllib.parse import urlsplit

from crds.meta import CLI_FIELD_MANAGER, HOSTS_NAMESPACE, LABEL_MANAGED_BY, LABEL_PATTERN, LONGEST_LABEL, MANAGED_BY
from kube.client import Client, connect
from kube.credentials import Credentials, StaticToken, build_tls
from kube.errors import ApiError, Forbidden, NotFound, Unreachable
from kube.resources import POD_TEMPLATES, SERVICE_ACCOUNTS
from kube.service_accounts import request_token
from metal_agent.join import host_account
from metal_agent.join.host_account import join_code_name
from metal_agent.join.join_code import JoinCode, encode_join_code, split_certificates

CODE_SECONDS: Final = 900
"""Life of a join code."""
_FIRST_TOKEN_SECONDS: Final = CODE_SECONDS + 60
"""Life of the host's first token: a code that is used at the last moment still leads to a token of its own."""
_POLICY_SECONDS: Final = 20.0
"""Time for the API server to apply new rights and policies."""
_PAUSE_SECONDS: Final = 0.2
_POLICY_TEXT: Final = "join code"
"""Part of the message of the policy pomona-host-tokens."""
_RESERVED_NAMES: Final = frozenset({"default", "pomona-controller"})
"""Names of other accounts and roles in the namespace of hosts."""


class InvitationError(Exception):
    """No join code can be made; the message says why, and the way out."""


def check_host_name(name: str) -> None:
    """Raises InvitationError unless `name` can be the name of a host: a DNS label."""
    if len(name) > LONGEST_LABEL or not re.fullmatch(LABEL_PATTERN, name):
        raise InvitationError(
            f"{name!r} cannot be the name of a host: use small letters, digits and '-', at most {LONGEST_LABEL}, such "
            "as studio-1"
        )
    if name in _RESERVED_NAMES:
        raise InvitationError(f"{name!r} is a name of Pomona's or of Kubernetes' own: choose another one")


def check_server(url: str) -> str:
    """Return the address of the API server without a trailing slash, if a host can use it. Raises InvitationError."""
    server = url.rstrip("/")
    parts = urlsplit(server)
    if parts.scheme != "https" or not parts.hostname:
        raise InvitationError(
            f"the API server's address {server!r} is no https URL: give the one that the host reaches by --server "
            "https://ADDRESS:PORT"
        )

    if parts.username or parts.query or parts.fragment:
        raise InvitationError(f"--server takes https://ADDRESS:PORT only, not {parts.hostname} with more around it")

    if _is_loopback(parts.hostname):
        raise InvitationError(
            f"the API server's address {server} leads to this machine only: give the one that the host reaches by "
            "--server https://ADDRESS:PORT; the server's certificate must name it"
        )
    return server


async def invite_host(client: Client, credentials: Credentials, host: str, server: str | None = None) -> str:
    """Make the identity of a host, or renew it, and return a join code; the code before it ends.

    1. Delete what an earlier code left.
    2. Create the host's ServiceAccount, request its first token, which tells the audiences, and apply its rights.
    3. Cut that token: its claims go into a PodTemplate, its signature into the code, so that neither suffices alone.
    4. Create the code's own ServiceAccount, whose only right is to delete that PodTemplate, and request its token.
    5. Wait until the API server enforces that a client sees the PodTemplate only by deleting it.

    Args:
        client: the API, as an administrator.
        credentials: of the same administrator: the address of the API server and its certificate authority.
        host: name of the host.
        server: address of the API server that the host reaches; None for the administrator's.

    Raises:
        InvitationError: name, address or authority cannot be used, or the policies are not installed.
        ApiError, Unreachable: as the calls of `client`.
    """
    check_host_name(host)
    address = check_server(server or credentials.server)
    authority = _read_authority(credentials)
    name = join_code_name(host)
    await _delete_leftover(client, name)  # step 1

    await client.apply(SERVICE_ACCOUNTS, host_account.host_account(host), field_manager=CLI_FIELD_MANAGER)  # step 2
    first = await request_token(client, HOSTS_NAMESPACE, host, _FIRST_TOKEN_SECONDS)
    # Nothing but the API server's own answer tells its audiences.
    for resource, obj in host_account.host_rights(host, first.audiences):
        await client.apply(resource, obj, field_manager=CLI_FIELD_MANAGER)
    claims, _, signature = first.token.rpartition(".")  # a JWT: HEAD.PAYLOAD.SIGNATURE

    template = await client.create(POD_TEMPLATES, host_account.join_template(host, claims))  # step 3
    uid = template["metadata"]["uid"]
    try:
        # Created, so that it is never that of another invitation of this host at this moment.
        await client.create(SERVICE_ACCOUNTS, host_account.code_account(host, uid))  # step 4
        for resource, obj in host_account.code_rights(host, uid):
            await client.apply(resource, obj, field_manager=CLI_FIELD_MANAGER)
        granted = await request_token(client, HOSTS_NAMESPACE, name, CODE_SECONDS)
        await _await_token_policy(credentials, name, granted.token)  # step 5
    except BaseException:
        # What stays is replaced by the next code, and no one has a token of it. It may be replaced already.
        with contextlib.suppress(ApiError, Unreachable):
            await client.delete(POD_TEMPLATES, name, HOSTS_NAMESPACE, uid=uid)
        raise

    return encode_join_code(
        JoinCode(
            host=host,
            server=address,
            token=granted.token,
            signature=signature,
            expires_at=int(datetime.fromisoformat(granted.expires_at).timestamp()),
            authority=authority,
            tls_server_name=credentials.tls_server_name or "",
        )
    )


def _is_loopback(host: str) -> bool:
    """Decide whether a host name or address leads to this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _read_authority(credentials: Credentials) -> tuple[bytes, ...]:
    """Return the certificates to which the host is pinned; empty if the system's are used. Raises InvitationError."""
    if credentials.tls is not None and credentials.tls.verify_mode == ssl.CERT_NONE:
        raise InvitationError(
            "the kubeconfig does not check the API server's certificate (insecure-skip-tls-verify), so no host could "
            "know its API server: replace that by certificate-authority-data"
        )
    if credentials.authority is None:
        return ()
    try:
        return split_certificates(credentials.authority)
    except ValueError as error:
        raise InvitationError(f"certificate-authority of the kubeconfig: {error}: correct it") from error


async def _delete_leftover(client: Client, name: str) -> None:
    """Delete PodTemplate and ServiceAccount of an earlier code. Raises InvitationError if they belong to others."""
    for kind in (POD_TEMPLATES, SERVICE_ACCOUNTS):
        try:
            leftover = await client.get(kind, name, HOSTS_NAMESPACE)
        except NotFound:
            continue
        if leftover["metadata"].get("labels", {}).get(LABEL_MANAGED_BY) != MANAGED_BY:
            raise InvitationError(
                f"{kind.kind} {HOSTS_NAMESPACE}/{name} is not that of a join code: choose another name for the host, "
                "or delete it"
            )
        with contextlib.suppress(NotFound):  # the code may be used at this moment
            await client.delete(kind, name, HOSTS_NAMESPACE, uid=leftover["metadata"]["uid"])


async def _await_token_policy(credentials: Credentials, name: str, token: str) -> None:
    """Wait until the API server enforces the policy pomona-host-tokens, which keeps a join code to one use.

    The PodTemplate `name` has the claims of the host's first token. Its deletion answers with it, and so would a
    deletion that is only tried (dryRun), which leaves no trace: the policy refuses that. This tries one again and
    again, with the code's own `token`, until the policy refuses it.

    Raises:
        InvitationError: it is not refused, or not by the policy.
    """
    # Without the administrator's client certificate, which would be asked first.
    tls = build_tls(credentials.authority) if credentials.tls else None
    holder = replace(credentials, identity=StaticToken(token), tls=tls)

    deadline = time.monotonic() + _POLICY_SECONDS
    async with connect(holder) as client:
        while True:
            last_answer = "it shows it"  # the PodTemplate, if the call raises nothing
            try:
                await client.take(POD_TEMPLATES, name, HOSTS_NAMESPACE, dry_run=True)  # deletes nothing
            except Forbidden as error:
                if _POLICY_TEXT in error.message:
                    return  # it is the policy that refuses
                last_answer = error.message
            except ApiError as error:
                last_answer = str(error)

            if time.monotonic() > deadline:
                raise InvitationError(
                    "the API server does not keep the join code to one use, which the policy pomona-host-tokens does: "
                    "upgrade Pomona in the cluster first: helm upgrade, or kubectl apply --server-side -k deploy/ "
                    f"({last_answer})"
                )
            await asyncio.sleep(_PAUSE_SECONDS)
