"""The ModelRoute reconciler: it reports whether a route leads where it says, for the gateway passes over what does not.

Of a service of another namespace a message says the same whether it does not exist or does not admit the route's, so
that who may create ModelRoutes finds out nothing about other namespaces.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Final

from controller.gateway.key_reconciler import MOST_COMPARISONS, read_access
from controller.reconcile.conditions import condition, transitions
from controller.reconcile.indexes import NAMESPACE_INDEX, SERVICE_INDEX, list_admitted
from controller.reconcile.plan import Plan, Reconciler, Snapshot
from controller.reconcile.triggers import Trigger
from crds.modelroute import ModelRoute, ModelRouteSpec, may_lead, split_service
from kube.client import Obj
from kube.resources import GATEWAY_KEYS, INFERENCE_SERVICES, MODEL_ROUTES, ObjectKey, object_key
from kube.store import Store

VALID: Final = "Valid"
HIDES_SERVICE: Final = "HidesService"


def route_reconciler(*, has_gateway: bool) -> Reconciler:
    """Return the reconciler of ModelRoutes; without a gateway it only says that there is none."""
    return Reconciler(
        resource=MODEL_ROUTES,
        decide=functools.partial(decide_route, has_gateway=has_gateway),
        triggers=(
            Trigger(INFERENCE_SERVICES, list_routes_of_service, read_access),
            Trigger(GATEWAY_KEYS, list_routes_of_key, lambda key: key["spec"].get("services") or ()),
        ),
    )


def list_routes_of_service(store: Store, service: Obj) -> list[ObjectKey]:
    """Return the ModelRoutes that name a service, or have its name."""
    return [object_key(route) for route in store.by_index(MODEL_ROUTES, SERVICE_INDEX, str(object_key(service)))]


def list_routes_of_key(store: Store, key: Obj) -> list[ObjectKey]:
    """Return the ModelRoutes that clients of a GatewayKey may name."""
    return [object_key(route) for route in store.by_index(MODEL_ROUTES, NAMESPACE_INDEX, key["metadata"]["namespace"])]


def decide_route(snapshot: Snapshot, key: ObjectKey, *, has_gateway: bool) -> Plan:
    """Return the status of a ModelRoute."""
    route = snapshot.read(MODEL_ROUTES, key, ModelRoute)
    if route is None or route.metadata.deletion_timestamp is not None:
        return Plan()
    reason, message = _judge(snapshot.store, key, route.spec, has_gateway=has_gateway)
    generation = route.metadata.generation
    is_true = reason in {VALID, HIDES_SERVICE}
    ready = condition("Ready", true=is_true, reason=reason, message=message, generation=generation)
    return Plan(
        status={"observedGeneration": generation, "conditions": [ready]},
        events=transitions(route.status.conditions, [ready], action="Check", silent={VALID}),
    )


def _judge(store: Store, route: ObjectKey, spec: ModelRouteSpec, *, has_gateway: bool) -> tuple[str, str]:
    """Return whether requests for a route go where it says, as reason and message."""
    if not has_gateway:
        return "NoGateway", "the cluster has no gateway: install the chart with gateway.enabled=true"
    hides_service = store.get(INFERENCE_SERVICES, route.name, route.namespace) is not None
    named = [*(service.name for service in spec.services), *(fallback.name for fallback in spec.fallbacks)]
    leads = {name: _leads(store, route, (), name, hides_service=hides_service) for name in named}

    # 1. Services to which no request goes.
    if problems := [_explain(route, name, hides_service=hides_service) for name in leads if not leads[name]]:
        effect = "requests go to the other services alone" if any(leads.values()) else "the route leads nowhere"
        return "NoService", f"{'; '.join(problems)}: {effect}"

    # 2. No client can name the route.
    keys = store.by_index(GATEWAY_KEYS, NAMESPACE_INDEX, route.namespace)
    weighted = [target.name for target in spec.services if target.weight]
    if not _is_opened(store, route, keys, weighted, hides_service=hides_service):
        return "NoKey", f"no GatewayKey of namespace {route.namespace} opens a service of the route: make one"

    # 3. It works.
    if hides_service:
        return HIDES_SERVICE, (
            f"clients with GatewayKeys of namespace {route.namespace} who ask for model {route.name} get the services "
            f"of the route, and InferenceService {route.name} only as {route}"
        )
    return VALID, f"clients with GatewayKeys of namespace {route.namespace} ask for model {route.name}"


def _is_opened(
    store: Store, route: ObjectKey, keys: Iterable[Obj], weighted: Sequence[str], *, hides_service: bool
) -> bool:
    """Return whether a key opens a service of a route; True also if there is too much to compare at once."""
    comparisons_left = MOST_COMPARISONS
    for key in keys:
        patterns = key["spec"].get("services") or ()
        for name in weighted:
            comparisons_left -= max(1, len(patterns))
            if comparisons_left < 0 or _leads(store, route, patterns, name, hides_service=hides_service):
                return True
    return False


def _leads(store: Store, route: ObjectKey, patterns: Sequence[str], name: str, *, hides_service: bool) -> bool:
    """Return whether a route leads clients of a key with these patterns to the service that it names so."""
    namespace, service_name = split_service(name, route.namespace)
    service = store.get(INFERENCE_SERVICES, service_name, namespace)
    return service is not None and may_lead(
        route.namespace, patterns, namespace, service_name, list_admitted(service), hides_service=hides_service
    )


def _explain(route: ObjectKey, name: str, *, hides_service: bool) -> str:
    """Return why a route does not lead to the service that it names so."""
    namespace, service_name = split_service(name, route.namespace)
    if namespace == route.namespace:
        return f"InferenceService {service_name} does not exist"
    if hides_service:
        return (
            f"{name} gets no request, because the route has the name of InferenceService {route.name}, whose requests "
            "do not leave the namespace"
        )
    return f"{name} does not exist, or its spec.access does not admit namespace {route.namespace}"
