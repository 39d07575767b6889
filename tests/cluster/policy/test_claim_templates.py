"""A thief with the controller's token claims no devices that other pods have."""

from typing import Any

import pytest

from kube.client import Obj
from kube.errors import Forbidden
from kube.resources import NAMESPACES, RESOURCE_CLAIM_TEMPLATES, Resource
from tests.cluster.policy.test_stolen_controller_token import COPY, Thief, thief

__all__ = ["thief"]


def claims(thief: Thief, name: str = COPY, **request: Any) -> tuple[Resource, Obj]:
    exactly = {"deviceClassName": "gpu.nvidia.com", "allocationMode": "ExactCount", "count": 1, **request}
    spec = {"spec": {"devices": {"requests": [{"name": "devices", "exactly": exactly}]}}}
    return thief.owned("InferenceService", RESOURCE_CLAIM_TEMPLATES, name, spec=spec)


async def test_stolen_controller_token_claims_devices_for_its_services_only(thief: Thief) -> None:
    await thief.api.create(*claims(thief))
    await thief.api.delete(RESOURCE_CLAIM_TEMPLATES, COPY, thief.namespace)
    with pytest.raises(Forbidden, match="has not the name"):
        await thief.api.create(*claims(thief, "two-0123abcd"))
    # Kubernetes itself allows such claims in a namespace of an administrator's tools.
    labels = {"metadata": {"labels": {"resource.kubernetes.io/admin-access": "true"}}}
    await thief.admin.patch_merge(NAMESPACES, thief.namespace, None, labels, field_manager="administrator")
    with pytest.raises(Forbidden, match="without admin access"):
        await thief.api.create(*claims(thief, adminAccess=True))
