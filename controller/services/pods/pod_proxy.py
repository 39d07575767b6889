"""Pomona's proxy in each pod: it checks the service's token, counts, ends answers, and says who erred.

The proxy is the pod's main container, and the engine a sidecar of it: Kubernetes stops sidecars after the main
containers, so the requests in flight end before their engine does. The engine listens on loopback, and does not get the
token, so that nothing in the cluster gets round the proxy. The kubelet asks at the pod's address, so the readiness of
the proxy is that of its engine, and the proxy answers the liveness probe of the engine, which the kubelet restarts when
it hangs. A startup probe would keep the proxy from being started, so the liveness probe waits until that must be there,
and the proxy gets the time that loading may take.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from artifacts.compiled_code import FOLDER
from artifacts.repositories.address_policy import NETWORKS_VARIABLE
from controller.models.jobs import CONTAINER_SECURITY, keep_literal
from controller.reconcile.partial_objects import DRAIN_OPTION, GRACE_FIELD
from controller.services.tokens import TOKEN_KEY
from crds.meta import PROXY_CONTAINER, RESTORE_CONTAINER, ObjectMeta
from gateway.proxy.paths import ENGINE_LIVENESS
from kube.client import Obj
from runtimes.pod import SERVICE_PORT, EnginePod
from runtimes.registry import find_runtime
from runtimes.serving import Serving

TOKEN_DIRECTORY: Final = "/run/secrets/pomona"  # noqa: S105 - a path
TOKEN_MOUNT: Final = {"name": "token", "mountPath": TOKEN_DIRECTORY, "readOnly": True}
"""The volume of the service's token, which the proxy alone gets."""
PORT_NAME: Final = "http"
_TERMINATION_LOG: Final = "/dev/termination-log"
WITHDRAWAL_SECONDS: Final = 3
"""Time for which a deleted pod serves on: a node applies changes of endpoints about once a second."""
END_SECONDS: Final = 2
"""Time in which the proxy ends after its last request, and then its engine."""
_PROXY_START_SECONDS: Final = 1800
"""Time from the start of an engine in which the proxy's image is pulled: the sidecar is started first. Without a proxy
after that, the engine is restarted, which fails no request: only the proxy sends it requests."""
_PROBE_SECONDS: Final = 10
_PROXY_RESTART_SECONDS: Final = 480
"""Time in which a proxy that ended is back: the kubelet waits at most 300 s before it starts a container again."""
HANG_GRACE: Final = {GRACE_FIELD: 30}
"""Field of the probe that finds a container hanging: it ends without the time that its pod has for answers."""
_KILL_SECONDS: Final = 10
"""Time in which an engine that hangs may end by itself."""
_MEMORY: Final = "96Mi"
"""An idle proxy has 30 MiB, and 70 MiB after it has brought a model into Ollama."""
_MOST_MEMORY: Final = "512Mi"
"""The bodies of waiting requests may take 256 MiB."""


class ProxyContainer(NamedTuple):
    """The proxy of a pod."""

    image: str
    """Pomona's own."""
    runtime: str
    engine: EnginePod
    environment: Mapping[str, str]
    """Variables of the controller's Jobs, of which the proxy gets those that limit sources."""
    loading_seconds: int
    """Time that the engine may take to load its weights."""
    pulse_path: str | None = None
    """Path that the engine answers between two steps of its work; None: it has none."""
    image_pull_secrets: Sequence[str] = ()
    """Secrets with which nodes pull `image`."""

    def put_before_engine(self, pod: Obj, service: ObjectMeta, serving: Serving) -> Obj:
        """Return the spec of a pod with Pomona's proxy as its container and the engine as a sidecar.

        Clients reach only the proxy, so it gets the token. Kubernetes ends a sidecar after the container, so that the
        proxy can end its requests first.
        """
        (engine,) = pod["containers"]
        # The proxy answers the liveness probe for the engine, once it has been started itself.
        sidecar = engine | {
            "restartPolicy": "Always",
            "livenessProbe": {
                "httpGet": {"path": ENGINE_LIVENESS, "port": SERVICE_PORT},
                "initialDelaySeconds": _PROXY_START_SECONDS,
                "periodSeconds": _PROBE_SECONDS,
                "failureThreshold": _PROXY_RESTART_SECONDS // _PROBE_SECONDS,
                "timeoutSeconds": 5,
                "terminationGracePeriodSeconds": _KILL_SECONDS,
            },
        }

        grace_seconds: int = pod["terminationGracePeriodSeconds"]
        # The proxy brings the weights into the store (the own folder) of an engine that has one, so it reads them, too.
        weights = [mount for mount in engine["volumeMounts"] if self.engine.store and mount["name"] == "models"]

        return pod | {
            "initContainers": [sidecar],
            "containers": [self._build_container(service, serving, [*weights, TOKEN_MOUNT], grace_seconds)],
            **self._merge_pull_secrets(pod),
        }

    def _merge_pull_secrets(self, pod: Obj) -> Obj:
        """Return the field of a pod with its own pull secrets and those of the proxy, each once; empty without any."""
        # Server-side apply refuses a list that names one twice.
        names = dict.fromkeys(
            [*(secret["name"] for secret in pod.get("imagePullSecrets", ())), *self.image_pull_secrets]
        )
        return {"imagePullSecrets": [{"name": name} for name in names]} if names else {}

    def _build_container(self, service: ObjectMeta, serving: Serving, mounts: list[Obj], grace_seconds: int) -> Obj:
        """Return the proxy's container.

        `grace_seconds` is the time from the deletion of the pod until it is killed. First the pod serves on while nodes
        forget its endpoint, and last proxy and engine end; the rest is the time for running requests.
        """
        # Only for an engine with a store does the proxy fetch weights; the variable limits from which networks.
        variables = {NETWORKS_VARIABLE: self.environment.get(NETWORKS_VARIABLE)} if self.engine.store else {}
        environment = [{"name": name, "value": value} for name, value in variables.items() if value]
        return {
            "name": PROXY_CONTAINER,
            "image": self.image,
            "args": keep_literal(
                self._render_arguments(service, serving, grace_seconds - WITHDRAWAL_SECONDS - END_SECONDS)
            ),
            **({"env": environment} if environment else {}),
            "ports": [{"name": PORT_NAME, "containerPort": SERVICE_PORT, "protocol": "TCP"}],
            "resources": {"requests": {"cpu": "50m", "memory": _MEMORY}, "limits": {"memory": _MOST_MEMORY}},
            "readinessProbe": {
                "httpGet": {"path": "/health", "port": PORT_NAME},
                "periodSeconds": 2,
                "failureThreshold": 2,
                "timeoutSeconds": 5,
            },
            "livenessProbe": {
                "tcpSocket": {"port": PORT_NAME},
                "periodSeconds": 10,
                "failureThreshold": 6,
                "timeoutSeconds": 5,
                **HANG_GRACE,  # a proxy that hangs ends without the time for requests
            },
            # Nodes send requests to a deleted pod until they have seen its endpoint go.
            "lifecycle": {"preStop": {"sleep": {"seconds": WITHDRAWAL_SECONDS}}},
            "terminationMessagePath": _TERMINATION_LOG,
            "terminationMessagePolicy": "FallbackToLogsOnError",
            "securityContext": CONTAINER_SECURITY,
            "volumeMounts": mounts,
        }

    def _render_arguments(self, service: ObjectMeta, serving: Serving, drain_seconds: int) -> list[str]:
        """Return the command line of the proxy: whom it serves, how it reaches and watches the engine, and its times.

        Once the pod is deleted, it is to end running requests within `drain_seconds`.
        """
        engine, options = self.engine, serving.options
        arguments = ["pod-proxy", "--service", f"{service.namespace}/{service.name}", "--port", str(SERVICE_PORT)]
        arguments += ["--token-file", f"{TOKEN_DIRECTORY}/{TOKEN_KEY}", "--engine-port", str(engine.port)]
        arguments += ["--health-path", engine.health_path, "--engine", self.runtime]
        arguments += ["--mode", options.mode]

        # Without a device, one step of a long prompt may take longer than an engine that hangs is waited for.
        if serving.on_device and self.pulse_path:
            arguments += ["--pulse-path", self.pulse_path]
        if name := engine.served_name(serving):
            arguments += ["--engine-model", name]
        runtime = find_runtime(self.runtime)
        if engine.has_slots:  # it works on so many requests at once
            arguments += ["--concurrency", str(runtime.limit_requests(options) or 1)]
        if not engine.from_container:  # that of a container that the service states is not known
            arguments += ["--context-length", str(options.context_tokens)]
        if (shared_tokens := runtime.count_shared_tokens(options)) is not None:
            arguments += ["--shared-tokens", str(shared_tokens)]
        if any(adapter.request_name for adapter in serving.adapters):
            for adapter in serving.adapters:
                arguments += ["--adapter", f"{adapter.request_name or ''}:{adapter.scale}"]
        if engine.prepare:  # the proxy brings the model into the engine first
            arguments += ["--source", serving.model]
            arguments += ["--threads", str(serving.threads)] if serving.threads is not None else []

        arguments += [DRAIN_OPTION, str(drain_seconds), "--loading-seconds", str(self.loading_seconds)]
        return [*arguments, "--termination-log", _TERMINATION_LOG]


def keep_compiled_code(pod: Obj) -> Obj:
    """Return the spec of a pod that keeps compiled code of this image, with these arguments, beside the weights."""
    (engine,), (proxy,), (models, *others) = pod["initContainers"], pod["containers"], pod["volumes"]
    identity = json.dumps([engine.get(name) for name in ("image", "command", "args", "env")])
    kept = f"/kept/{FOLDER}/{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    home, folder = "/compiled/home", {"name": "compiled", "mountPath": "/compiled"}
    arguments, mounts = ["--home", home, "--kept", kept], [folder, {"name": models["name"], "mountPath": "/kept"}]

    restore = {name: proxy[name] for name in ("image", "resources", "terminationMessagePolicy", "securityContext")}
    # Without the time to drain, of which an edit replaces no pod.
    begin = proxy["args"][: proxy["args"].index(DRAIN_OPTION)]
    restore |= {"name": RESTORE_CONTAINER, "args": [*begin, *arguments, "--restore"], "volumeMounts": mounts}
    proxy = {**proxy, "args": proxy["args"] + arguments, "volumeMounts": proxy["volumeMounts"] + mounts}
    environment = [{**item, "value": home} if item["name"] == "HOME" else item for item in engine["env"]]
    engine = {**engine, "env": environment, "volumeMounts": [*engine["volumeMounts"], folder]}
    models = {**models, "persistentVolumeClaim": {"claimName": models["persistentVolumeClaim"]["claimName"]}}
    volumes = [models, *others, {"name": folder["name"], "emptyDir": {}}]
    return pod | {"initContainers": [restore, engine], "containers": [proxy], "volumes": volumes}
