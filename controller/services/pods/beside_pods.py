"""The objects beside the pods of a service: how pods are evicted, who may send requests, and who scrapes them.

* PodDisruptionBudget: a drain of nodes evicts one pod after the other. A service with one pod gets none: it could only
  allow every eviction, which needs no budget, or refuse every one, which would hold up the drain of its node for ever.
  So would a budget of pods that share one node because of their volume: none can start elsewhere before all have left.
* NetworkPolicy: who may send requests to a service, and what its engine may reach. It is an option of the controller
  (`--network-policies`), because a cluster without such policies may have clients without the label. Most network
  plugins exempt the kubelet, whose probes come from the node; one that does not needs a policy of its own for them.
  Pods with the node's network, and a controller outside of the cluster, cannot be named by a policy: allow their
  addresses by another one, because policies add up.
* PodMonitor: by it Prometheus' operator scrapes the metrics of the engine. There is one for each service, because each
  has a token of its own, which Pomona's proxy asks for at its metrics, too. The proxy serves its own metrics, and adds
  those of the engine behind it. Whoever may state an image decides what an engine sends: series of other names than
  the engine's would pass for those of the cluster, and are dropped; a scrape that is too large is dropped as a whole.
  The kind is not Kubernetes' own: `optional_kinds.py` knows whether the cluster has it.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from controller.pod_settings import PodSettings
from controller.reconcile.plan import child
from controller.services.pods.pod_proxy import PORT_NAME
from controller.services.tokens import TOKEN_KEY, token_name
from crds.inferenceservice import InferenceService, wanted_replicas
from crds.meta import (
    CONTROLLER_NAMESPACE,
    GROUP,
    LABEL_CLIENT,
    LABEL_MANAGED_BY,
    LABEL_SERVICE,
    LABEL_VALUE_PATTERN,
    NAME_PATTERN,
)
from gateway.proxy.exposition import MOST_LINES
from gateway.proxy.paths import METRICS
from kube.client import Obj
from kube.resources import INFERENCE_SERVICES, NETWORK_POLICIES, POD_DISRUPTION_BUDGETS, POD_MONITORS, Resource
from runtimes.pod import SERVICE_PORT
from runtimes.registry import RUNTIMES


def build_disruption_budget(service: InferenceService, *, share_one_node: bool) -> tuple[tuple[Resource, Obj], ...]:
    """Return the PodDisruptionBudget of a service in pods, by which one pod at a time may be evicted.

    Empty for fewer than two pods, and for pods that share one node: a budget would block the drain of that node.
    """
    if share_one_node or wanted_replicas(service) < 2:  # noqa: PLR2004 - one is too few to go on without one
        return ()
    spec = {
        "maxUnavailable": 1,
        "selector": {"matchLabels": {LABEL_SERVICE: service.metadata.name}},
        # A pod that does not serve is no reason to keep it on a node that is drained.
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }
    name = service.metadata.name
    return (child(POD_DISRUPTION_BUDGETS, name, INFERENCE_SERVICES, service.metadata, {}, spec=spec),)


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


_META_LABEL: Final = "__meta_kubernetes_pod_label_inference_pomona_dev_service"
"""Label of a pod as Prometheus names it while it finds targets."""
_MOST_SERIES: Final = MOST_LINES + 500
"""Series of a scrape. The proxy passes on at most MOST_LINES of an engine, and has less than 300 of its own."""
_LIMITS: Final = {
    "sampleLimit": _MOST_SERIES,
    "labelLimit": 64,
    "labelNameLengthLimit": 256,
    "labelValueLengthLimit": 4096,
    "bodySizeLimit": "2MiB",
}
"""Limits of a scrape. The proxy passes on at most 1 MiB of an engine, and vLLM has some 40 labels at one series, whose
values name all adapters at another."""
_PROXY_PREFIX: Final = "pomona_proxy_"
_MOST_OF_A_PREFIX: Final = 253
_MOST_OF_A_NAME: Final = 63


def parse_monitor_labels(texts: Iterable[str]) -> dict[str, str]:
    """Return the labels of `KEY=VALUE` texts.

    Raises:
        ValueError: a text is no label, has a key of Pomona's, or states another value for a key.
    """
    labels: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        is_label = equals and _is_label_key(key) and (not value or _is_label_name(value))
        if not is_label:
            raise ValueError(f"{text!r} is no label of Kubernetes: give one such as release=prometheus")

        if key == LABEL_MANAGED_BY or key.startswith(f"{GROUP}/"):
            raise ValueError(f"{text!r} has a key that only Pomona sets: choose another key")

        if labels.setdefault(key, value) != value:
            raise ValueError(f"{text!r} states {key} a second time, after {labels[key]!r}: keep one of them")
    return labels


def _is_label_key(key: str) -> bool:
    """Return whether a text can be the key of a label: a name, or a prefix, a slash and a name."""
    prefix, slash, name = key.rpartition("/")
    is_prefix = len(prefix) <= _MOST_OF_A_PREFIX and re.fullmatch(NAME_PATTERN, prefix) is not None
    return _is_label_name(name) and (is_prefix or not slash)


def _is_label_name(text: str) -> bool:
    """Return whether a text can be the value of a label, or its key without a prefix."""
    return len(text) <= _MOST_OF_A_NAME and re.fullmatch(LABEL_VALUE_PATTERN, text) is not None


def build_pod_monitor(
    service: InferenceService, runtime: str, labels: Mapping[str, str], *, exists: bool
) -> tuple[tuple[Resource, Obj], ...]:
    """Return the PodMonitor of a service in pods; nothing if the engine has no metrics or the kind does not exist."""
    engine = RUNTIMES[runtime].pod if runtime in RUNTIMES else None
    if engine is None or not exists:
        return ()

    # Only series with these prefixes are kept: those of the proxy, and what the engine is known to serve.
    metrics, name = engine.metrics, service.metadata.name
    prefixes = (_PROXY_PREFIX, *(metrics.prefixes if metrics is not None else ()))
    kept = [f"{re.escape(prefix)}.*" for prefix in prefixes]

    endpoint: Obj = {
        "port": PORT_NAME,
        "path": METRICS,
        # Each series gets the service from the label of its pod (_META_LABEL): the engines' own series do not have it,
        # and a pattern of pod names fits other services, too.
        "relabelings": [{"sourceLabels": [_META_LABEL], "targetLabel": "inference_service"}],
        # Labels that a pod states for itself never replace those of its target, since honorLabels is absent.
        "metricRelabelings": [{"sourceLabels": ["__name__"], "regex": "|".join(kept), "action": "keep"}],
        "honorTimestamps": False,
        "authorization": {"type": "Bearer", "credentials": {"name": token_name(name), "key": TOKEN_KEY}},
    }

    spec = {
        "selector": {"matchLabels": {LABEL_SERVICE: name}},
        "podMetricsEndpoints": [endpoint],
        **_LIMITS,
    }
    return (child(POD_MONITORS, name, INFERENCE_SERVICES, service.metadata, labels, spec=spec),)
