"""Tokens of ServiceAccounts, requested from the API server (TokenRequest)."""

from dataclasses import dataclass, field

import msgspec

from kube.client import Client, Obj
from kube.errors import Unreachable
from kube.resources import SERVICE_ACCOUNTS


@dataclass(frozen=True, slots=True)
class GrantedToken:
    """A token as the server granted it; its repr shows no secret.

    Attributes:
        token: the bearer token.
        lifetime_seconds: its life from the moment of the grant, which no difference between two clocks affects.
        expires_at: end of its life by the server's clock, in RFC 3339.
        audiences: for whom it is; the API server's own unless others were requested.
    """

    token: str = field(repr=False)
    lifetime_seconds: float
    expires_at: str
    audiences: tuple[str, ...] = ()


class _Spec(msgspec.Struct, frozen=True, rename="camel"):
    expiration_seconds: float
    audiences: tuple[str, ...] = ()


class _Status(msgspec.Struct, frozen=True, rename="camel"):
    token: str
    expiration_timestamp: str


class _TokenRequest(msgspec.Struct, frozen=True):
    spec: _Spec
    status: _Status


async def request_token(client: Client, namespace: str, name: str, lifetime_seconds: int) -> GrantedToken:
    """Request a token of a ServiceAccount; a server may grant another lifetime than the one requested.

    Raises ApiError and Unreachable.
    """
    request: Obj = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "metadata": {"namespace": namespace, "name": name},
        "spec": {"expirationSeconds": lifetime_seconds},
    }

    answer = await client.create_subresource(SERVICE_ACCOUNTS, name, namespace, "token", request)
    try:
        granted = msgspec.convert(answer, _TokenRequest)
    except msgspec.ValidationError as error:
        # The message of msgspec names the field, never a value.
        raise Unreachable(
            f"create token of {SERVICE_ACCOUNTS} {namespace}/{name}: the answer has no token: {error}"
        ) from error

    spec, status = granted.spec, granted.status
    return GrantedToken(status.token, spec.expiration_seconds, status.expiration_timestamp, spec.audiences)
