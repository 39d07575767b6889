"""The objects of the cluster that the gateway watches, and the part of each that it keeps.

A store has thousands of services, slices and keys. Each is decoded once, as it comes, to a struct with the fields that
are read here, so that the rest of it takes neither time nor memory.
"""

from collections.abc import Sequence
from typing import Final, TypeVar

import msgspec

from crds.gatewaykey import GatewayKeySpec, PreviousKey
from crds.gatewayquota import GatewayQuotaSpec
from crds.meta import CONTROLLER_NAMESPACE, GATEWAY_NAME, GATEWAY_SHARDS, LABEL_HOST, LABEL_SERVICE_NAME, OURS
from gateway.event_log import log
from kube.client import Obj, Read
from kube.resources import ENDPOINT_SLICES, GATEWAY_KEYS, GATEWAY_QUOTAS, INFERENCE_SERVICES, MODEL_ROUTES, SECRETS
from kube.watch import Selection

T = TypeVar("T")

_PART: Final = "part"
"""The key under which an object in the store has its struct."""


class _Metadata(msgspec.Struct, frozen=True, rename="camel"):
    name: str
    uid: str = ""
    namespace: str = ""
    creation_timestamp: str = ""


class _SliceMetadata(_Metadata, frozen=True, rename="camel"):
    labels: dict[str, str] | None = None


class _StoredMetadata(_Metadata, frozen=True, rename="camel"):
    resource_version: str = ""


class _StoredObject(msgspec.Struct, frozen=True):
    metadata: _StoredMetadata


class _Access(msgspec.Struct, frozen=True):
    namespaces: tuple[str, ...] = ()


class _Adapter(msgspec.Struct, frozen=True, rename="camel"):
    model_ref: str
    on_request: bool = False


class _ServiceSpec(msgspec.Struct, frozen=True, rename="camel"):
    mode: str = "chat"
    access: _Access = _Access()
    adapters: tuple[_Adapter, ...] = ()


class _Serving(msgspec.Struct, frozen=True, rename="camel"):
    context_length: int | None = None
    parallel: int | None = None


class WatchedSpeed(msgspec.Struct, frozen=True, rename="camel"):
    """The speed of a replica on a node or host, as its status has it: decimal text that nobody has checked."""

    node: str
    tokens_per_second: str = ""


class _ServiceStatus(msgspec.Struct, frozen=True, rename="camel"):
    phase: str = "Pending"
    serving: _Serving | None = None
    node_speeds: tuple[WatchedSpeed, ...] = ()


class WatchedService(msgspec.Struct, frozen=True):
    """The part of an InferenceService that is read."""

    metadata: _Metadata
    spec: _ServiceSpec = _ServiceSpec()
    status: _ServiceStatus = _ServiceStatus()

    @property
    def context_length(self) -> int | None:
        """The most tokens of one request; None: it is not known yet."""
        return self.status.serving.context_length if self.status.serving else None

    @property
    def slots(self) -> int:
        """The requests that each replica works on at once; 1 as long as that is not known."""
        return (self.status.serving.parallel if self.status.serving else None) or 1


class SlicePort(msgspec.Struct, frozen=True, rename="camel"):
    """A port of a slice."""

    name: str | None = None
    port: int | None = None
    app_protocol: str | None = None


class _EndpointConditions(msgspec.Struct, frozen=True):
    ready: bool | None = None


class SliceEndpoint(msgspec.Struct, frozen=True, rename="camel"):
    """An endpoint of a slice."""

    addresses: tuple[str, ...] = ()
    conditions: _EndpointConditions = _EndpointConditions()
    node_name: str | None = None

    @property
    def is_ready(self) -> bool:
        """True if it takes requests; an absent condition means that, as for every consumer of slices."""
        return self.conditions.ready is not False


class WatchedSlice(msgspec.Struct, frozen=True, rename="camel"):
    """The part of an EndpointSlice that is read."""

    metadata: _SliceMetadata
    address_type: str = "IPv4"
    endpoints: tuple[SliceEndpoint, ...] | None = None
    ports: tuple[SlicePort, ...] | None = None

    def find_ready_addresses(self) -> dict[str, str]:
        """Return the addresses of the endpoints that take requests, each with its node or host; empty: unknown."""
        host = (self.metadata.labels or {}).get(LABEL_HOST, "")  # a slice of a host has no endpoint elsewhere
        return {
            address: endpoint.node_name or host
            for endpoint in self.endpoints or ()
            if endpoint.is_ready
            for address in endpoint.addresses
        }


class RouteTarget(msgspec.Struct, frozen=True):
    """A service that a ModelRoute names, with its weight or, of a fallback, the causes for which it stands in."""

    name: str
    weight: int = 1
    when: tuple[str, ...] = ()


class _RouteSpec(msgspec.Struct, frozen=True):
    services: tuple[RouteTarget, ...]
    fallbacks: tuple[RouteTarget, ...] = ()


class WatchedRoute(msgspec.Struct, frozen=True):
    """The part of a ModelRoute that is read. Causes that this release does not know are kept, and never met."""

    metadata: _Metadata
    spec: _RouteSpec


class _KeyStatus(msgspec.Struct, frozen=True):
    digest: str = ""
    previous: tuple[PreviousKey, ...] = ()


class WatchedKey(msgspec.Struct, frozen=True):
    """The part of a GatewayKey that is read: it stays equal while the controller only writes the usage."""

    metadata: _Metadata
    spec: GatewayKeySpec = GatewayKeySpec()
    status: _KeyStatus = _KeyStatus()


class WatchedQuota(msgspec.Struct, frozen=True):
    """The part of a GatewayQuota that is read."""

    metadata: _Metadata
    spec: GatewayQuotaSpec = GatewayQuotaSpec()


class WatchedShard(msgspec.Struct, frozen=True):
    """The part of a Secret with the tokens of services that is read."""

    metadata: _Metadata
    data: dict[str, str] | None = None


def _decode_to(part: type[T]) -> Read:
    """Return the function that decodes an object of the API server to its identity and the struct `part`."""
    decode_part = msgspec.json.Decoder(part).decode
    decode_metadata = msgspec.json.Decoder(_StoredObject).decode

    def read(raw: msgspec.Raw) -> Obj:
        metadata = decode_metadata(raw).metadata
        struct: T | None = None
        try:
            struct = decode_part(raw)
        except msgspec.ValidationError as error:  # it is of a newer release; a watch that failed would miss all others
            log.warning("object_not_read", kind=part.__name__, namespace=metadata.namespace, name=metadata.name)
            log.info("object_not_read_because", error=str(error))
        return {"metadata": msgspec.to_builtins(metadata), _PART: struct}

    return read


def get_part(obj: Obj | None, part: type[T]) -> T | None:
    """Return the struct of an object in the store; None: there is no object, or it cannot be read."""
    struct = obj[_PART] if obj is not None else None
    assert struct is None or isinstance(struct, part)  # noqa: S101 - each resource is read as one type
    return struct


SELECTIONS: Final[Sequence[Selection]] = (
    Selection(INFERENCE_SERVICES, read=_decode_to(WatchedService)),
    Selection(ENDPOINT_SLICES, label_selector=OURS, read=_decode_to(WatchedSlice)),
    Selection(GATEWAY_KEYS, read=_decode_to(WatchedKey)),
    Selection(GATEWAY_QUOTAS, read=_decode_to(WatchedQuota)),
    Selection(MODEL_ROUTES, read=_decode_to(WatchedRoute)),
)
"""All that is watched cluster-wide."""
REPLICA_SELECTION: Final = Selection(
    ENDPOINT_SLICES,
    CONTROLLER_NAMESPACE,
    label_selector=f"{LABEL_SERVICE_NAME}={GATEWAY_NAME}",
    read=_decode_to(WatchedSlice),
)
"""The slices of the gateway's own Service, which tell how many replicas of it live."""
SHARD_SELECTIONS: Final[Sequence[Selection]] = tuple(
    Selection(
        SECRETS,
        CONTROLLER_NAMESPACE,
        field_selector=f"metadata.name={name}",
        read=_decode_to(WatchedShard),
    )
    for name in GATEWAY_SHARDS
)
"""The Secrets with the tokens of services: each is selected by its name, since no other may be read."""
