"""The one Secret that a host may read: copies of the tokens that its MetalProcesses need, and of nothing else."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from controller.reconcile.indexes import controller_of
from controller.reconcile.plan import child
from controller.services.tokens import TOKEN_KEY, is_token_secret
from crds.meta import HOSTS_NAMESPACE, host_secret_key
from crds.metalhost import MetalHost
from kube.client import Client, Obj
from kube.errors import NotFound
from kube.resources import METAL_HOSTS, SECRETS, Resource


class NeededSecret(NamedTuple):
    """A Secret that a host needs; only its key `token` is copied."""

    namespace: str
    name: str
    service_uid: str
    """Uid of the service that must own the Secret; empty for a Secret that the user created."""


def list_needed_secrets(processes: Iterable[Obj]) -> list[NeededSecret]:
    """Return the Secrets that the processes of one host need, sorted."""
    found = set()
    for obj in processes:
        spec, namespace = obj["spec"], obj["metadata"]["namespace"]
        if owner := controller_of(obj):
            found.add(NeededSecret(namespace, spec["tokenSecret"], owner["uid"]))
        for each in (spec, *spec.get("furtherArtifacts", ())):
            if "sourceSecret" in each:
                found.add(NeededSecret(namespace, each["sourceSecret"], ""))
    return sorted(found)


async def read_tokens(client: Client, processes: Iterable[Obj]) -> dict[str, str]:
    """Return the base64 values of a host's Secret by data key; a Secret that does not exist is left out."""
    tokens: dict[str, str] = {}
    for needed in list_needed_secrets(processes):
        secret = await read_secret(client, needed.namespace, needed.name)
        if token := secret and _token(secret, needed.service_uid):
            tokens[host_secret_key(needed.namespace, needed.name)] = token
    return tokens


def host_secret(host: MetalHost, tokens: Mapping[str, str]) -> tuple[Resource, Obj]:
    """Return the one Secret that this host may read. Applying it removes tokens that are not needed any more."""
    owner = msgspec.structs.replace(host.metadata, namespace=HOSTS_NAMESPACE)
    return child(SECRETS, host.metadata.name, METAL_HOSTS, owner, {}, type="Opaque", data=dict(tokens))


def _token(secret: Obj, service_uid: str) -> str | None:
    if service_uid and not is_token_secret(secret, service_uid):
        return None
    token: str | None = (secret.get("data") or {}).get(TOKEN_KEY)
    return token


async def read_secret(client: Client, namespace: str, name: str) -> Obj | None:
    """Return a Secret, or None if it does not exist."""
    try:
        return await client.get(SECRETS, name, namespace)
    except NotFound:
        return None
