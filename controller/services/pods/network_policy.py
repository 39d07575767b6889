"""The NetworkPolicy of a service in pods: who may send requests to it, and what its engine may reach.

It is an option of the controller (`--network-policies`), because a cluster without such policies may have clients
without the label. Most network plugins exempt the kubelet, whose probes come from the node; one that does not needs a
policy of its own for them. Pods with the node's network, and a controller outside of the cluster, cannot be named by a
policy: allow their addresses by another one, because policies add up.
"""

from typing import Any, Final

from controller.pod_settings import PodSettings
from controller.reconcile.plan import child
from crds.inferenceservice import InferenceService
from crds.meta import CONTROLLER_NAMESPACE, LABEL_CLIENT, LABEL_SERVICE
from kube.client import Obj
from kube.resources import INFERENCE_SERVICES, NETWORK_POLICIES, Resource
from runtimes.pod import SERVICE_PORT

_NAMESPACE_NAME: Final = "kubernetes.io/metadata.name"
"""Label that Kubernetes itself gives to each namespace."""
_DNS: Final[list[Obj]] = [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]
_NODE_LOCAL_DNS: Final = "169.254.20.10/32"
"""Address of a node's DNS cache, where one is installed."""
_LINK_LOCAL: Final = "169.254.0.0/16"
"""Where a cloud serves the credentials of a node."""


def build_network_policy(
    service: InferenceService, settings: PodSettings, *, pulls: bool
) -> tuple[tuple[Resource, Obj], ...]:
    """Return the NetworkPolicy of a service in pods; nothing if the option is off.

    `pulls` allows registries, for an engine that downloads the weights by itself.
    """
    if not settings.network_policies:
        return ()
    spec = {
        "podSelector": {"matchLabels": {LABEL_SERVICE: service.metadata.name}},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [{"from": _build_peers(settings), "ports": [{"port": SERVICE_PORT, "protocol": "TCP"}]}],
        "egress": _build_egress(pulls=pulls),
    }
    name = service.metadata.name
    return (child(NETWORK_POLICIES, name, INFERENCE_SERVICES, service.metadata, {}, spec=spec),)


def _build_peers(settings: PodSettings) -> list[Obj]:
    """Return the peers that may send requests: labelled clients, Pomona itself with its gateway, and the monitoring."""
    return [
        {"namespaceSelector": {}, "podSelector": {"matchLabels": {LABEL_CLIENT: "true"}}},
        *(
            {"namespaceSelector": {"matchLabels": {_NAMESPACE_NAME: name}}}
            for name in (CONTROLLER_NAMESPACE, settings.monitoring_namespace)
        ),
    ]


def _build_egress(*, pulls: bool) -> list[Obj]:
    """Return the destinations of the pods: DNS, and registries only if the engine pulls the weights by itself."""
    system: Obj = {"namespaceSelector": {"matchLabels": {_NAMESPACE_NAME: "kube-system"}}}
    # The DNS of the cluster, or the DNS cache on a node.
    rules: list[Obj] = [{"to": [system, {"ipBlock": {"cidr": _NODE_LOCAL_DNS}}], "ports": _DNS}]
    if pulls:
        # Any address but the link-local ones, where a cloud serves the credentials of a node.
        blocks: list[Any] = [{"cidr": "0.0.0.0/0", "except": [_LINK_LOCAL]}, {"cidr": "::/0", "except": ["fe80::/10"]}]
        rules.append({"to": [{"ipBlock": block} for block in blocks], "ports": [{"port": 443, "protocol": "TCP"}]})
    return rules
