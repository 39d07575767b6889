"""The PodMonitor of a service in pods, by which Prometheus' operator scrapes the metrics of its engine.

There is one for each service, because an engine that asks for its key at its metrics has a key of its own. The kind is
not Kubernetes' own: `optional_kinds.py` knows whether the cluster has it.
"""

from controller.reconcile.plan import child
from controller.services.key_proxy import PORT_NAME
from controller.services.tokens import TOKEN_KEY, token_name
from crds.inferenceservice import InferenceService
from crds.meta import LABEL_SERVICE
from kube.client import Obj
from kube.resources import INFERENCE_SERVICES, POD_MONITORS, Resource
from runtimes.registry import RUNTIMES

_META_LABEL = "__meta_kubernetes_pod_label_inference_pomona_dev_service"
"""Label of a pod as Prometheus names it while it finds targets."""


def pod_monitor(service: InferenceService, runtime: str, *, exists: bool) -> tuple[tuple[Resource, Obj], ...]:
    """Return the PodMonitor of a service in pods; nothing if the engine has no metrics or the kind does not exist."""
    engine = RUNTIMES[runtime].pod if runtime in RUNTIMES else None
    metrics = engine.metrics if engine is not None else None
    if metrics is None or not exists:
        return ()
    name = service.metadata.name
    endpoint: Obj = {
        "port": PORT_NAME,
        "path": metrics.path,
        # The engines' own series have no label of the service, and a pattern of pod names fits other services, too.
        "relabelings": [{"sourceLabels": [_META_LABEL], "targetLabel": "inference_service"}],
    }
    if metrics.needs_key:
        endpoint["authorization"] = {"type": "Bearer", "credentials": {"name": token_name(name), "key": TOKEN_KEY}}
    spec = {"selector": {"matchLabels": {LABEL_SERVICE: name}}, "podMetricsEndpoints": [endpoint]}
    return (child(POD_MONITORS, name, INFERENCE_SERVICES, service.metadata, {}, spec=spec),)
