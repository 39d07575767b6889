"""The one Secret that a host may read: copies of the tokens that its MetalProcesses need, and of nothing else."""

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta
from typing import Final, NamedTuple

import msgspec
import structlog

from controller.models.source_secret import is_source_secret
from controller.reconcile.indexes import controller_of
from controller.reconcile.plan import child
from controller.services.token_copies import MOST_TOKENS_BYTES, fit_tokens, read_secret
from controller.services.tokens import TOKEN_KEY, KnownTokens
from crds.meta import HOSTS_NAMESPACE, host_secret_key
from crds.metalhost import MetalHost
from kube.client import Client, Obj
from kube.errors import Forbidden
from kube.resources import METAL_HOSTS, SECRETS, ObjectKey, Resource

log = structlog.get_logger()

READ_SOURCE_AGAIN: Final = timedelta(seconds=50)
"""Age after which a user's Secret, or its absence, is read again: once for all hosts that need it."""
READ_OWN_AGAIN: Final = timedelta(minutes=10)


class NeededSecret(NamedTuple):
    """A Secret that a host needs; only its key `token` is copied."""

    namespace: str
    name: str
    service_uid: str
    """Uid of the service that must own the Secret; empty for a Secret that the user created."""
    rotation: str = ""
    """The service's `status.tokenRotation`: another one means another token."""


def list_needed_secrets(
    processes: Iterable[Obj], rotation_of: Callable[[ObjectKey], str] = lambda _service: ""
) -> list[NeededSecret]:
    """Return the Secrets that the processes of one host need, sorted.

    A process needs the Secret with the token of its service, and those with which its host downloads the artifacts.
    `rotation_of` returns the `status.tokenRotation` of a service, which changes when its token is replaced.
    """
    needed = set()
    for obj in processes:
        spec, namespace = obj["spec"], obj["metadata"]["namespace"]

        # The token of its service, which owns both the process and the Secret.
        if owner := controller_of(obj):
            rotation = rotation_of(ObjectKey(namespace, owner["name"]))
            needed.add(NeededSecret(namespace, spec["tokenSecret"], owner["uid"], rotation))

        # The tokens for downloads: the spec itself states the artifact of the weights.
        for artifact in (spec, *spec.get("furtherArtifacts", ())):
            if "sourceSecret" in artifact:
                needed.add(NeededSecret(namespace, artifact["sourceSecret"], service_uid=""))
    return sorted(needed)


class _Reading(NamedTuple):
    """The token of a Secret as it was read."""

    token: str | None
    read_again_at: datetime


class HostSecrets:
    """The Secrets of hosts and those of users, as they were last read or written: Secrets are not watched.

    A user's Secret is read again after a minute, because users rotate their download tokens. The tokens of services are
    known to their reconciler, whose status tells when one was replaced.
    """

    def __init__(self, tokens: KnownTokens) -> None:
        self._service_tokens = tokens
        self._readings: dict[NeededSecret, _Reading] = {}
        """For all hosts: what was read last of Secrets that are not to be read again yet.

        These are Secrets of users, those that the controller may not read, and those whose rotation is outdated.
        """
        self._host_secrets: dict[str, tuple[Obj, datetime]] = {}
        """By host: its Secret, and when that was read."""

    async def read_tokens(
        self, client: Client, host: str, needs: Iterable[NeededSecret], now: datetime
    ) -> dict[str, str]:
        """Return the base64 values of a host's Secret by data key.

        A Secret that does not exist is left out, and so are the largest tokens if not all fit into one Secret.
        """
        tokens: dict[str, str] = {}
        for needed in needs:
            if token := await self._find_token(client, needed, now):
                tokens[host_secret_key(needed.namespace, needed.name)] = token
        fitting = fit_tokens(tokens)
        if left_out := sorted(tokens.keys() - fitting.keys()):
            log.warning("tokens_left_out", host=host, keys=left_out, most_bytes=MOST_TOKENS_BYTES)
        return fitting

    async def _find_token(self, client: Client, needed: NeededSecret, now: datetime) -> str | None:
        """Return the base64 token of a Secret, or None if there is none.

        The token of a service comes from `KnownTokens`, which keeps it until the service's rotation, the identifier of
        its last replacement, is another one. A user's Secret is read at most once within `READ_SOURCE_AGAIN`. If the
        controller may not read a Secret any more, its last token stays.
        """
        # 1. The last reading, if it is recent. Kept are readings of users' Secrets, of refused ones, and of tokens
        # whose rotation is outdated.
        last = self._readings.get(needed)
        if last is not None and now < last.read_again_at:
            return last.token

        # 2. Else read it now.
        try:
            if needed.service_uid:  # the Secret with the token of a service; any other is a user's
                key = ObjectKey(needed.namespace, needed.name)
                token = await self._service_tokens.find_token(client, key, needed.service_uid, needed.rotation)
                # A Secret that lacks the rotation of the status may stay so: its reading is kept, as a user's is.
                if token is None or self._service_tokens.is_known(key, needed.service_uid, needed.rotation):
                    return token
            else:
                token = await _read_user_token(client, needed)
        except Forbidden as error:
            log.warning("secret_not_read", namespace=needed.namespace, name=needed.name, error=str(error))
            token = last.token if last else None

        # 3. Keep the reading. Those that are too old are dropped, since perhaps no host needs them any more.
        self._readings = {source: reading for source, reading in self._readings.items() if now < reading.read_again_at}
        self._readings[needed] = _Reading(token, now + READ_SOURCE_AGAIN)
        return token

    async def read_own(self, client: Client, host: str, now: datetime) -> Obj | None:
        """Return the host's existing Secret as it was read within `READ_OWN_AGAIN` or is now; None if there is none."""
        if host in self._host_secrets:
            cached, read_at = self._host_secrets[host]
            if now - read_at < READ_OWN_AGAIN:
                return cached
        secret = await read_secret(client, HOSTS_NAMESPACE, host)
        if secret is not None:
            self._host_secrets[host] = secret, now
        return secret

    def remember(self, resource: Resource, answer: Obj) -> None:
        """Keep a host's Secret as the answer to a write has it; the time of its next reading stays.

        One that was not read before is not kept: `read_own` reads it.
        """
        host = answer["metadata"]["name"]
        if resource == SECRETS and host in self._host_secrets:
            _, read_at = self._host_secrets[host]
            self._host_secrets[host] = answer, read_at

    def restart(self) -> None:
        """Forget all readings: another leader may have written since."""
        self._readings.clear()
        self._host_secrets.clear()

    def forget(self, host: str) -> None:
        """Forget a host that is gone."""
        self._host_secrets.pop(host, None)


def build_host_secret(host: MetalHost, tokens: Mapping[str, str]) -> tuple[Resource, Obj]:
    """Return the one Secret that this host may read. Applying it removes tokens that are not needed any more."""
    owner = msgspec.structs.replace(host.metadata, namespace=HOSTS_NAMESPACE)
    return child(SECRETS, host.metadata.name, METAL_HOSTS, owner, {}, type="Opaque", data=dict(tokens))


async def _read_user_token(client: Client, needed: NeededSecret) -> str | None:
    """Return the token of a user's Secret; None if it does not exist, or its type or label does not allow this use."""
    secret = await read_secret(client, needed.namespace, needed.name)
    if secret is None or not is_source_secret(secret):
        return None
    token: str | None = (secret.get("data") or {}).get(TOKEN_KEY)
    return token
