"""The controller as a Deployment in the cluster that it controls, until the chart is what installs it."""

from kube.client import Obj
from tests.controlplane.members import CONTROLLER_ACCOUNT, CONTROLLER_NAMESPACE
from tests.support.file_server import ALLOWED_NETWORKS

RESTRICTED: Obj = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


def controller_deployment(image: str) -> Obj:
    """Return a Deployment of the controller, whose image also runs in Jobs and proxies, and says what it runs as."""
    labels = {"app.kubernetes.io/name": CONTROLLER_ACCOUNT}
    networks = [f"--allow-private-sources={network}" for network in ALLOWED_NETWORKS]
    container: Obj = {
        "name": "controller",
        "image": image,
        "args": ["controller", f"--image={image}", *networks],
        "readinessProbe": {"httpGet": {"path": "/readyz", "port": 8081}, "periodSeconds": 1},
        "securityContext": RESTRICTED,
    }
    pod: Obj = {
        "serviceAccountName": CONTROLLER_ACCOUNT,
        "terminationGracePeriodSeconds": 10,
        "securityContext": {"runAsNonRoot": True},
        "containers": [container],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": CONTROLLER_ACCOUNT, "namespace": CONTROLLER_NAMESPACE},
        "spec": {
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }
