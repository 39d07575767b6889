"""The address of the gateway, as its Service, Ingress and HTTPRoute state it; the chart gives all of them one name."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from cli.api_objects import Obj
from cli.cluster_access import Cluster
from cli.cluster_errors import is_unknown_kind
from cli.cluster_options import ClusterOptions
from crds.meta import CONTROLLER_NAMESPACE, GATEWAY_NAME
from kube.errors import Forbidden, NotFound
from kube.resources import GATEWAYS, HTTP_ROUTES, INGRESSES, SERVICES, Resource

if TYPE_CHECKING:
    from kube.client import Client

LOCAL_PORT: Final = 8080
"""The port of this machine in the command that forwards it."""
_HTTPS: Final = "https"
_STANDARD_PORTS: Final = {"http": 80, _HTTPS: 443}


class GatewayAddress(NamedTuple):
    """The base URL of the gateway, without /v1, and the way to it."""

    url: str
    origin: str
    """Where the URL is from."""
    service_url: str = ""
    """The URL for pods of the cluster; empty: it is not known."""
    forwarding: str = ""
    """The command that opens the way to the URL; empty: none is needed."""


class Gateway(NamedTuple):
    """The objects that state where the gateway is."""

    service: Obj
    ingress: Obj | None = None
    route: Obj | None = None
    listeners: Sequence[Obj] = ()
    """The listeners of the Gateways that the route is attached to."""


async def find_gateway_address(cluster: Cluster) -> GatewayAddress:
    """Return the address of the gateway.

    Raises:
        click.ClickException: the cluster has none.
        ApiError: the API server refuses.
        Unreachable: the API server does not answer.
    """
    client = cluster.client
    service = await _find(client, SERVICES, CONTROLLER_NAMESPACE, GATEWAY_NAME)
    if service is None:
        raise click.ClickException(
            f"Service {CONTROLLER_NAMESPACE}/{GATEWAY_NAME} does not exist: install the gateway (gateway.enabled=true "
            "in the values of the chart), or name the address of another one with --url"
        )
    ingress = await _find(client, INGRESSES, CONTROLLER_NAMESPACE, GATEWAY_NAME)
    route = await _find(client, HTTP_ROUTES, CONTROLLER_NAMESPACE, GATEWAY_NAME)
    listeners = await _list_listeners(client, route) if route else []
    return choose_address(Gateway(service, ingress, route, listeners), cluster.target)


def choose_address(gateway: Gateway, target: ClusterOptions) -> GatewayAddress:
    """Return the host of the Ingress, else that of the HTTPRoute, else a port that the user forwards to the Service.

    Args:
        gateway: the objects that state where the gateway is.
        target: the options that a command of kubectl needs, too.
    """
    port = gateway.service["spec"]["ports"][0]
    scheme = _HTTPS if port["name"] == _HTTPS else "http"
    service_url = _build_url(scheme, f"{GATEWAY_NAME}.{CONTROLLER_NAMESPACE}.svc", port["port"])
    if gateway.ingress and (url := _read_ingress(gateway.ingress)):
        return GatewayAddress(url, f"Ingress {CONTROLLER_NAMESPACE}/{GATEWAY_NAME}", service_url)
    if gateway.route and (url := _read_route(gateway.route, gateway.listeners)):
        return GatewayAddress(url, f"HTTPRoute {CONTROLLER_NAMESPACE}/{GATEWAY_NAME}", service_url)
    ports = f"{LOCAL_PORT}:{port['port']}"
    command = f"kubectl port-forward service/{GATEWAY_NAME} {ports}{target.render(namespace=CONTROLLER_NAMESPACE)}"
    return GatewayAddress(_build_url(scheme, "127.0.0.1", LOCAL_PORT), "a forwarded port", service_url, command)


def _read_ingress(ingress: Obj) -> str:
    """Return the URL of an Ingress; empty if it states no host. One without hosts for TLS has it for all of its own."""
    spec = ingress["spec"]
    host = next((rule["host"] for rule in spec.get("rules", []) if rule.get("host")), "")
    has_tls = any(host in entry.get("hosts", [host]) for entry in spec.get("tls", []))
    return _build_url(_HTTPS if has_tls else "http", host) if host else ""


def _read_route(route: Obj, listeners: Sequence[Obj]) -> str:
    """Return the URL of an HTTPRoute, or of the listener that it is attached to; empty if neither states a host.

    Of several listeners that with TLS counts; without one that may be read, TLS is assumed.
    """
    listener: Obj = min(listeners, key=lambda listener: listener["protocol"] != "HTTPS", default={"protocol": "HTTPS"})
    hosts = (*route["spec"].get("hostnames", ()), listener.get("hostname", ""))
    host = next((host for host in hosts if host and not host.startswith("*")), "")
    scheme = _HTTPS if listener["protocol"] == "HTTPS" else "http"
    return _build_url(scheme, host, listener.get("port")) if host else ""


async def _list_listeners(client: "Client", route: Obj) -> list[Obj]:
    """Return the listeners that a route names of its Gateways, as far as the user may read these."""
    listeners: list[Obj] = []
    for reference in route["spec"].get("parentRefs", []):
        namespace = reference.get("namespace", CONTROLLER_NAMESPACE)
        gateway = await _find(client, GATEWAYS, namespace, reference["name"])
        section = reference.get("sectionName")
        stated: list[Any] = gateway["spec"].get("listeners", []) if gateway else []
        listeners += [listener for listener in stated if section in (None, listener["name"])]
    return listeners


async def _find(client: "Client", resource: Resource, namespace: str, name: str) -> Obj | None:
    """Return an object; None if there is none, or if it is one of the Gateway API, and there is no such kind.

    Gateways belong to others, so that None also stands for one that the user may not read.
    """
    try:
        return await client.get(resource, name, namespace)
    except NotFound as error:
        if is_unknown_kind(error) and resource not in (HTTP_ROUTES, GATEWAYS):
            raise
    except Forbidden:
        if resource != GATEWAYS:
            raise
    return None


def _build_url(scheme: str, host: str, port: int | None = None) -> str:
    return f"{scheme}://{host}" if port in (None, _STANDARD_PORTS[scheme]) else f"{scheme}://{host}:{port}"
