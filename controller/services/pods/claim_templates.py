"""The ResourceClaimTemplates of a service that claims devices, and its pods that claim by them.

A pod that claims devices requests no resource of a device plugin. Kubernetes makes its claim from a template, whose
spec never changes: another selector is another template, and an earlier one stays until no pod is made of it any more.
"""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Final

from controller.placement.device_need import DeviceNeed, encode_need
from controller.reconcile.indexes import SERVICE_INDEX, namespaced
from controller.reconcile.plan import Ref, Snapshot, child, prune
from controller.services.pods.devices import request_devices
from crds.inferenceservice import InferenceService
from crds.meta import DEVICE_NEED, LABEL_MANAGED_BY, LABEL_SERVICE, MANAGED_BY
from devices.vendors import Vendor
from kube.client import Obj
from kube.resources import DEPLOYMENTS, INFERENCE_SERVICES, PODS, RESOURCE_CLAIM_TEMPLATES, Resource

CLAIM_NAME: Final = "devices"
"""Name of the claim in the pod, and of the request in the claim."""
_DIGITS: Final = 8


def list_templates(service: InferenceService, vendor: Vendor | None) -> tuple[tuple[Resource, Obj], ...]:
    """Return the template of the claims of a service's pods; none if they claim nothing."""
    need = request_devices(service, vendor).need if vendor is not None else None
    return (build_template(service, need),) if need is not None else ()


def list_spent_templates(
    snapshot: Snapshot, service: InferenceService, wanted: Sequence[tuple[Resource, Obj]]
) -> Sequence[Ref]:
    """Return the claim templates of a service to delete: neither wanted nor used by a Deployment or pod."""
    key = service.metadata
    templates = snapshot.children(RESOURCE_CLAIM_TEMPLATES, key.namespace, key.uid)
    if not templates:
        return ()
    pods = snapshot.store.by_index(PODS, SERVICE_INDEX, namespaced(key.namespace, key.name))
    used = _list_used(snapshot.children(DEPLOYMENTS, key.namespace, key.uid), pods)
    observed = (
        (RESOURCE_CLAIM_TEMPLATES, template) for template in templates if template["metadata"]["name"] not in used
    )
    return prune(observed, wanted)  # without those that are wanted


def _list_used(deployments: Iterable[Obj], pods: Iterable[Obj]) -> set[str]:
    """Return the names of the templates from which pods are made or may still be made."""
    specs = (*(deployment["spec"]["template"]["spec"] for deployment in deployments), *(pod["spec"] for pod in pods))
    return {
        claim["resourceClaimTemplateName"]
        for spec in specs
        for claim in spec.get("resourceClaims") or ()
        if "resourceClaimTemplateName" in claim
    }


def name_template(service: str, need: DeviceNeed) -> str:
    """Return the name of the template of a need: the service's name with a digest of the claimed devices."""
    return f"{service}-{hashlib.sha256(encode_need(need).encode()).hexdigest()[:_DIGITS]}"


def build_template(service: InferenceService, need: DeviceNeed) -> tuple[Resource, Obj]:
    """Return the ResourceClaimTemplate of the pods of a service; their claims have our label."""
    owner = service.metadata
    exactly = {
        "deviceClassName": need.device_class,
        "allocationMode": "ExactCount",
        "count": need.number,
        "selectors": [{"cel": {"expression": expression}} for expression in need.list_expressions()],
    }
    labels = {LABEL_MANAGED_BY: MANAGED_BY, LABEL_SERVICE: owner.name}
    spec = {
        "metadata": {"labels": labels},
        "spec": {"devices": {"requests": [{"name": CLAIM_NAME, "exactly": exactly}]}},
    }
    name = name_template(owner.name, need)
    return child(RESOURCE_CLAIM_TEMPLATES, name, INFERENCE_SERVICES, owner, {}, spec=spec)


def add_claim(template: Obj, service: str, need: DeviceNeed) -> Obj:
    """Return a pod template whose pods claim devices; an annotation shows the queue which devices."""
    metadata, pod = template["metadata"], template["spec"]
    annotations = {**metadata.get("annotations", {}), DEVICE_NEED: encode_need(need)}
    claim = {"name": CLAIM_NAME, "resourceClaimTemplateName": name_template(service, need)}
    return {"metadata": {**metadata, "annotations": annotations}, "spec": {**pod, "resourceClaims": [claim]}}
