"""`ModelRoute`: a name that clients of the gateway use for several services, and the services that stand in for these.

A route opens nothing. Whoever may create ModelRoutes must not reach by them what their keys do not open, nor send other
clients of the namespace where these did not go before; and a key for few services must not reach more by the route of
somebody else. So `may_lead`, which controller and gateway both call, asks three things:

* A route is of one namespace: only keys of this namespace find it. A service of another namespace must admit this one.
* The key opens the service behind the route by its own name. The name of the route counts for nothing: if it did, an
  edit of a route would widen each key that names it.
* A route may take over the name of a service of its namespace, to share that service's requests with its next version.
  Then it leads to services of this namespace alone, so that no prompt leaves the namespace which was meant for a
  service in it. NAMESPACE/SERVICE is always the service.

Messages name services of other namespaces only as the route does, in the same words whether they do not exist or admit
nobody, so that a route finds out nothing about them.
"""

from collections.abc import Collection, Iterable
from typing import Annotated, Final, Literal

from msgspec import Meta

from crds.gatewaykey import may_use
from crds.meta import Amount, ApiObject, ApiStruct, Conditions, checked_by, keyed_by, rule

Cause = Literal["NoCapacity", "Unavailable", "ContextTooLong"]
"""Why a service has not answered a request that another service may answer."""

_ServiceName = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=128,
        extra_json_schema={"pattern": "^([a-z0-9]([-a-z0-9]*[a-z0-9])?/)?[a-z0-9]([-a-z0-9]*[a-z0-9])?$"},
    ),
]
_HAS_WEIGHT: Final = rule(
    "self.exists(service, service.weight > 0)", "no service has a weight above 0: give one of them a weight"
)
_FALLBACK_DIFFERS: Final = rule(
    "size(self.services) > 1 || !has(self.fallbacks) || "
    "self.fallbacks.all(fallback, fallback.name != self.services[0].name)",
    "the only service stands in for itself: name another one in fallbacks",
)


class RouteService(ApiStruct, frozen=True):
    """A service that gets a share of the requests."""

    name: Annotated[
        _ServiceName,
        "SERVICE of the namespace of the route, or NAMESPACE/SERVICE: that service must admit this namespace by its "
        "spec.access. The gateway passes over a service that does not exist, or that the client's key does not open.",
    ]
    weight: Annotated[
        Annotated[int, Meta(ge=0, le=1000)],
        "Share of the conversations, in relation to the weights of the other services. Each conversation stays at one "
        "service. 0: no request goes there.",
    ] = 1


class RouteFallback(ApiStruct, frozen=True):
    """A service that stands in for one that does not answer."""

    name: Annotated[_ServiceName, "SERVICE of the namespace of the route, or NAMESPACE/SERVICE, as in spec.services."]
    when: Annotated[
        list[Cause],
        Meta(max_length=3),
        "The causes for which it stands in. NoCapacity: the endpoints that were asked answer 429, as all their slots "
        "and places to wait are taken. Unavailable: there is no endpoint, or none accepts a connection, or they answer "
        "502 or 503. ContextTooLong: the prompt does not fit into the context of the service. Default: all of them.",
    ] = []


class ModelRouteSpec(ApiStruct, frozen=True):
    """The services behind a name, by weight, and those that stand in for them."""

    services: Annotated[
        list[RouteService],
        Meta(min_length=1, max_length=16),
        "Services that answer requests for the name of the route, each in the share of its weight.",
        keyed_by("name"),
        checked_by(_HAS_WEIGHT),
    ]
    fallbacks: Annotated[
        list[RouteFallback],
        Meta(max_length=4),
        "Services that stand in for one that does not answer, in the order in which they are tried. No service is "
        "tried twice for a request, so that those of spec.services may stand in for each other. Once a service has "
        "begun to answer, no other one stands in.",
    ] = []


class ModelRouteStatus(ApiStruct, frozen=True):
    """Observed state of a route, as the controller reports it."""

    observed_generation: Annotated[Amount | None, "The metadata.generation from which this status was computed."] = None
    conditions: Conditions = []


class ModelRoute(ApiObject, frozen=True, kw_only=True):
    """A name by which clients with GatewayKeys of its namespace ask several services, as if they were one model."""

    spec: Annotated[
        ModelRouteSpec,
        "The services behind the name, by weight, and those that stand in for them. The route goes before a service of "
        "its name in its namespace; then it leads to services of this namespace only.",
        checked_by(_FALLBACK_DIFFERS),
    ]
    status: Annotated[ModelRouteStatus, "State of the route, as the controller reports it."] = ModelRouteStatus()


def split_service(name: str, namespace: str) -> tuple[str, str]:
    """Return namespace and name of the service that a route of `namespace` names."""
    stated, slash, service = name.rpartition("/")
    return (stated if slash else namespace), service


def may_lead(
    namespace: str,
    patterns: Collection[str],
    service_namespace: str,
    service_name: str,
    access_namespaces: Iterable[str],
    *,
    hides_service: bool,
) -> bool:
    """Return whether a route of `namespace` leads clients of a key of this namespace to a service.

    Args:
        namespace: the namespace of the route and the key.
        patterns: `spec.services` of the key; none: a key that opens all that its namespace may use.
        service_namespace: the namespace of the service.
        service_name: the name of the service.
        access_namespaces: its `spec.access.namespaces`.
        hides_service: the namespace has a service of the name of the route.
    """
    if hides_service and service_namespace != namespace:
        return False
    return may_use(namespace, patterns, service_namespace, service_name, access_namespaces)
