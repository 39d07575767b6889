"""The PodMonitor of a service in pods, by which Prometheus' operator scrapes the metrics of its engine.

There is one for each service, because each has a key of its own, which engines and Pomona's proxy ask for at their
metrics, too. In front of an engine that listens on loopback, the metrics are those of the proxy. The kind is not
Kubernetes' own: `optional_kinds.py` knows whether the cluster has it.
"""

from controller.reconcile.plan import child
from controller.services.pods.key_proxy import PORT_NAME
from controller.services.tokens import TOKEN_KEY, token_name
from crds.inferenceservice import InferenceService
from crds.meta import LABEL_SERVICE
from gateway.proxy.paths import METRICS
from kube.client import Obj
from kube.resources import INFERENCE_SERVICES, POD_MONITORS, Resource
from runtimes.registry import RUNTIMES

_META_LABEL = "__meta_kubernetes_pod_label_inference_pomona_dev_service"
"""Label of a pod as Prometheus names it while it finds targets."""


def build_pod_monitor(service: InferenceService, runtime: str, *, exists: bool) -> tuple[tuple[Resource, Obj], ...]:
    """Return the PodMonitor of a service in pods; nothing if the engine has no metrics or the kind does not exist."""
    engine = RUNTIMES[runtime].pod if runtime in RUNTIMES else None
    if engine is None or not exists:
        return ()
    metrics, is_behind_proxy = engine.metrics, engine.key == "proxy"
    if metrics is None and not is_behind_proxy:
        return ()
    name = service.metadata.name
    endpoint: Obj = {
        "port": PORT_NAME,
        "path": metrics.path if metrics is not None and not is_behind_proxy else METRICS,
        # The engines' own series have no label of the service, and a pattern of pod names fits other services, too.
        "relabelings": [{"sourceLabels": [_META_LABEL], "targetLabel": "inference_service"}],
    }
    if is_behind_proxy or (metrics is not None and metrics.needs_key):
        endpoint["authorization"] = {"type": "Bearer", "credentials": {"name": token_name(name), "key": TOKEN_KEY}}
    spec = {"selector": {"matchLabels": {LABEL_SERVICE: name}}, "podMetricsEndpoints": [endpoint]}
    return (child(POD_MONITORS, name, INFERENCE_SERVICES, service.metadata, {}, spec=spec),)
