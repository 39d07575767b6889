"""The API resources that Pomona reads or writes, one constant each, with their paths.

A path is built from a constant and never by hand, so that a group, a plural or a scope is written down once. A name
that comes from an object stays one segment of the path: `..` would lead to objects of another namespace.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple
from urllib.parse import quote

from crds.meta import GROUP, VERSION
from kube.errors import Invalid

_UNPROCESSABLE: Final = 422


@dataclass(frozen=True, slots=True)
class Resource:
    """One kind of object of the API: its group, version, plural, kind and scope."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        """The `apiVersion` of its objects: `v1`, `apps/v1`."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def custom(self) -> bool:
        """True when a CRD defines it: the server keeps zero values of such objects, and drops many of built-in ones."""
        return "." in self.group and not self.group.endswith(".k8s.io")

    def path(self, namespace: str | None = None, name: str | None = None, subresource: str = "") -> str:
        """Return the URL path of one object or, without a name, of the collection (in one namespace or in all).

        Raises Invalid, before any request: a name or namespace is no segment of a path, or the namespace is missing.
        """
        parts = ["/apis", self.group, self.version] if self.group else ["/api", self.version]
        if self.namespaced:
            if namespace is not None:
                parts += ["namespaces", self._segment("namespace", namespace)]
            elif name is not None:
                raise self._invalid(f"{self.plural} {name} has no namespace: state it")

        parts.append(self.plural)
        if name is not None:
            parts.append(self._segment("name", name))
        if subresource:
            parts.append(subresource)
        return "/".join(parts)

    def _segment(self, what: str, value: str) -> str:
        """Return a name as one segment of a path. Raises Invalid for what the API server takes as no name either."""
        if value in {"", ".", ".."} or "/" in value or "%" in value or not value.isprintable():
            raise self._invalid(f"the {what} {value!r} cannot be used in a path: correct it where it is stated")
        return quote(value, safe=":")

    def _invalid(self, message: str) -> Invalid:
        return Invalid(str(self), status=_UNPROCESSABLE, reason="InvalidName", message=message)

    def __str__(self) -> str:
        return f"{self.plural}.{self.group}" if self.group else self.plural

    def __hash__(self) -> int:
        # Every look-up in the store hashes a resource: all five fields would take five times as long.
        return hash(self.plural)


class ObjectKey(NamedTuple):
    """Namespace and name of an object; the namespace of a cluster-scoped object is empty."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}" if self.namespace else self.name


def object_key(obj: Mapping[str, Any]) -> ObjectKey:
    """Return the key of an object as the API server sends it."""
    metadata = obj["metadata"]
    return ObjectKey(metadata.get("namespace") or "", metadata["name"])


VERSIONS: Final = Resource("", "", "version", "Version", namespaced=False)
"""The version of the API server, which is no object."""
PODS: Final = Resource("", "v1", "pods", "Pod")
POD_TEMPLATES: Final = Resource("", "v1", "podtemplates", "PodTemplate")
SERVICES: Final = Resource("", "v1", "services", "Service")
CONFIG_MAPS: Final = Resource("", "v1", "configmaps", "ConfigMap")
SECRETS: Final = Resource("", "v1", "secrets", "Secret")
SERVICE_ACCOUNTS: Final = Resource("", "v1", "serviceaccounts", "ServiceAccount")
PVCS: Final = Resource("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim")
PERSISTENT_VOLUMES: Final = Resource("", "v1", "persistentvolumes", "PersistentVolume", namespaced=False)
STORAGE_CLASSES: Final = Resource("storage.k8s.io", "v1", "storageclasses", "StorageClass", namespaced=False)
NODES: Final = Resource("", "v1", "nodes", "Node", namespaced=False)
NAMESPACES: Final = Resource("", "v1", "namespaces", "Namespace", namespaced=False)
EVENTS: Final = Resource("events.k8s.io", "v1", "events", "Event")
JOBS: Final = Resource("batch", "v1", "jobs", "Job")
DEPLOYMENTS: Final = Resource("apps", "v1", "deployments", "Deployment")
POD_DISRUPTION_BUDGETS: Final = Resource("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget")
NETWORK_POLICIES: Final = Resource("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy")
INGRESSES: Final = Resource("networking.k8s.io", "v1", "ingresses", "Ingress")
HTTP_ROUTES: Final = Resource("gateway.networking.k8s.io", "v1", "httproutes", "HTTPRoute")
GATEWAYS: Final = Resource("gateway.networking.k8s.io", "v1", "gateways", "Gateway")
"""Kinds of the Gateway API, which a cluster may have or not."""
LOCAL_QUEUES: Final = Resource("kueue.x-k8s.io", "v1beta2", "localqueues", "LocalQueue")
"""A kind of Kueue, which a cluster may have or not."""
VISIBLE_QUEUES: Final = Resource("visibility.kueue.x-k8s.io", "v1beta2", "localqueues", "LocalQueue")
"""A kind of Kueue's own API server: only its subresources can be read."""
POD_MONITORS: Final = Resource("monitoring.coreos.com", "v1", "podmonitors", "PodMonitor")
RESOURCE_CLAIM_TEMPLATES: Final = Resource("resource.k8s.io", "v1", "resourceclaimtemplates", "ResourceClaimTemplate")
RESOURCE_CLAIMS: Final = Resource("resource.k8s.io", "v1", "resourceclaims", "ResourceClaim")
RESOURCE_SLICES: Final = Resource("resource.k8s.io", "v1", "resourceslices", "ResourceSlice", namespaced=False)
"""Kinds of Dynamic Resource Allocation, which an administrator may switch off; a driver reports devices in slices."""
ENDPOINT_SLICES: Final = Resource("discovery.k8s.io", "v1", "endpointslices", "EndpointSlice")
ROLES: Final = Resource("rbac.authorization.k8s.io", "v1", "roles", "Role")
ROLE_BINDINGS: Final = Resource("rbac.authorization.k8s.io", "v1", "rolebindings", "RoleBinding")
CLUSTER_ROLE_BINDINGS: Final = Resource(
    "rbac.authorization.k8s.io", "v1", "clusterrolebindings", "ClusterRoleBinding", namespaced=False
)
SERVICE_CIDRS: Final = Resource("networking.k8s.io", "v1", "servicecidrs", "ServiceCIDR", namespaced=False)
LEASES: Final = Resource("coordination.k8s.io", "v1", "leases", "Lease")
MODELS: Final = Resource(GROUP, VERSION, "models", "Model")
INFERENCE_SERVICES: Final = Resource(GROUP, VERSION, "inferenceservices", "InferenceService")
METAL_HOSTS: Final = Resource(GROUP, VERSION, "metalhosts", "MetalHost", namespaced=False)
METAL_PROCESSES: Final = Resource(GROUP, VERSION, "metalprocesses", "MetalProcess")
ACCELERATOR_POOLS: Final = Resource(GROUP, VERSION, "acceleratorpools", "AcceleratorPool", namespaced=False)
NODE_FITNESSES: Final = Resource(GROUP, VERSION, "nodefitnesses", "NodeFitness", namespaced=False)
GATEWAY_QUOTAS: Final = Resource(GROUP, VERSION, "gatewayquotas", "GatewayQuota", namespaced=False)
GATEWAY_KEYS: Final = Resource(GROUP, VERSION, "gatewaykeys", "GatewayKey")
MODEL_ROUTES: Final = Resource(GROUP, VERSION, "modelroutes", "ModelRoute")
TOKEN_REVIEWS: Final = Resource("authentication.k8s.io", "v1", "tokenreviews", "TokenReview", namespaced=False)
SUBJECT_ACCESS_REVIEWS: Final = Resource(
    "authorization.k8s.io", "v1", "subjectaccessreviews", "SubjectAccessReview", namespaced=False
)
