"""The credentials of a node agent: a token of its ServiceAccount that is bound to a pod on its node, as by kubelet."""

import contextlib
from pathlib import Path

import yaml

from crds.meta import CONTROLLER_NAMESPACE
from kube.client import Client, Obj
from kube.errors import NotFound
from kube.resources import PODS, SERVICE_ACCOUNTS
from tests.controlplane.plane import ControlPlane
from tests.controlplane.process import CHECKOUT

NODE_AGENT = "pomona-node-agent"


def _read_pod_spec() -> Obj:
    """Return the pods' spec of the DaemonSet, without its PriorityClass, which is installed with it."""
    manifests = yaml.safe_load_all((CHECKOUT / "deploy" / "install" / "node-agent.yaml").read_text())
    (spec,) = [manifest["spec"]["template"]["spec"] for manifest in manifests if manifest["kind"] == "DaemonSet"]
    return {name: value for name, value in spec.items() if name != "priorityClassName"}


async def node_agent_kubeconfig(
    plane: ControlPlane, admin: Client, node: str, stack: contextlib.AsyncExitStack
) -> Path:
    """Return the kubeconfig file of the agent on `node`; its pod, which nothing runs, ends with `stack`."""
    name = f"{NODE_AGENT}-{node}"
    pod = await admin.create(
        PODS,
        {"metadata": {"name": name, "namespace": CONTROLLER_NAMESPACE}, "spec": _read_pod_spec() | {"nodeName": node}},
    )

    async def delete() -> None:
        path = PODS.path(CONTROLLER_NAMESPACE, name)
        with contextlib.suppress(NotFound):
            await plane.request("DELETE", path, {"gracePeriodSeconds": 0}, accept={404})

    stack.push_async_callback(delete)
    bound = {"kind": "Pod", "apiVersion": "v1", "name": name, "uid": pod["metadata"]["uid"]}
    review = await admin.create_subresource(
        SERVICE_ACCOUNTS, NODE_AGENT, CONTROLLER_NAMESPACE, "token", {"spec": {"boundObjectRef": bound}}
    )
    return plane.token_kubeconfig(f"node-agent_{node}", review["status"]["token"])
