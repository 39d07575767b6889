"""The control plane, its network and its node behave like real ones, as far as other tests rely on them."""

from typing import Any

import pytest

from kube import credentials
from kube.client import connect
from kube.errors import Forbidden
from kube.resources import NODES, SECRETS
from tests.controlplane.plane import ControlPlane
from tests.controlplane.process import Process

Obj = dict[str, Any]


async def test_a_service_account_has_no_rights_by_default(plane: ControlPlane, namespace: str) -> None:
    path = f"/api/v1/namespaces/{namespace}/serviceaccounts"
    await plane.request("POST", path, {"metadata": {"name": "somebody"}})
    kubeconfig = await plane.service_account_kubeconfig(namespace, "somebody")

    async with connect(credentials.load(kubeconfig)) as somebody:
        with pytest.raises(Forbidden, match=f"system:serviceaccount:{namespace}:somebody"):
            await somebody.list(SECRETS, namespace)


async def test_a_kubelet_may_not_touch_another_node(plane: ControlPlane, node: Process) -> None:
    assert node.running
    async with connect(credentials.load(plane.kubeconfig("system:node:cpu-2"))) as other:
        with pytest.raises(Forbidden, match="cpu-1"):
            await other.delete(NODES, "cpu-1")
