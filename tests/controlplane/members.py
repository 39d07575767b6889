"""The members of a cluster: nodes, the controller, and hosts with their agents, each as a process.

Fixtures and demo start them with these functions, so that only this module has command lines and identities.
"""

import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from pathlib import Path

from artifacts.repositories.address_policy import NETWORKS_VARIABLE, networks_text
from crds.meta import GROUP, HOSTS_NAMESPACE
from kube.resources import (
    ACCELERATOR_POOLS,
    GATEWAY_KEYS,
    INFERENCE_SERVICES,
    LEASES,
    METAL_HOSTS,
    METAL_PROCESSES,
    MODEL_ROUTES,
    MODELS,
    SERVICE_ACCOUNTS,
    Resource,
)
from metal_agent.join.host_account import host_account, host_rights
from tests.controlplane.network import Host, Network
from tests.controlplane.plane import NODES, SERVICE_ACCOUNT_ISSUER, ControlPlane, PlaneError
from tests.controlplane.process import CHECKOUT, Process
from tests.support.eventually import eventually
from tests.support.file_server import ALLOWED_NETWORKS

CONTROLLER_NAMESPACE = "pomona-system"
CONTROLLER_ACCOUNT = "pomona-controller"
INSTALLED = CHECKOUT / "deploy" / "install"
"""Folder of the manifests that are rendered from the chart with its default values."""
RUNNING = {"controller.yaml", "gateway.yaml", "node-agent.yaml"}
"""Manifests of what runs in the cluster: tests start it as processes."""
KINDS = (MODELS, INFERENCE_SERVICES, GATEWAY_KEYS, MODEL_ROUTES, METAL_HOSTS, METAL_PROCESSES, ACCELERATOR_POOLS)
NO_BENCHMARKS = "--no-benchmarks"
SOURCES = {NETWORKS_VARIABLE: networks_text(ALLOWED_NETWORKS)}
"""Variables with which controller, Jobs and agents may fetch weights from the servers of tests and demo."""


async def install(plane: ControlPlane) -> None:
    """Install Pomona's kinds, roles and policies without what runs, and wait until kubectl finds the kinds."""
    manifests = (path for path in sorted(INSTALLED.iterdir()) if path.name not in RUNNING)
    await plane.apply(CHECKOUT / "crds", CHECKOUT / "deploy" / "namespace.yaml", *manifests)
    await wait_for_kinds(plane)


async def wait_for_kinds(plane: ControlPlane) -> None:
    """Wait until kubectl finds Pomona's kinds, and the API server answers for them."""
    await plane.kubectl("wait", "--for=condition=Established", "--timeout=90s", "crd", "--all")
    # Drop kubectl's cached list of kinds, which is older than Pomona's: a short name such as `mp` would stay unknown.
    shutil.rmtree(plane.environment["KUBECACHEDIR"], ignore_errors=True)

    async def discovered() -> bool:
        # An Established kind may not be listed yet. This command reads the list anew and caches it for later ones.
        try:
            output = await plane.kubectl("api-resources", f"--api-group={GROUP}", "--output=name")
        except PlaneError:  # a group is listed a moment before its kinds
            return False
        return len(output.split()) == len(list((CHECKOUT / "crds").glob("*.yaml")))

    await eventually(discovered)
    for kind in KINDS:
        # A kind that is listed may still answer 429 until its storage is initialized.
        await plane.request("GET", kind.path())
        await eventually(partial(_is_explained, plane, kind))


def kubelet(
    plane: ControlPlane,
    name: str,
    folder: Path,
    *,
    resources: Mapping[str, str] | None = None,
    labels: Mapping[str, str] | None = None,
    arguments: tuple[str, ...] = (),
) -> Process:
    """Return a node, not yet started.

    Args:
        plane: the control plane to join.
        name: one of NODES; its index there determines the addresses.
        folder: for its pods and its log.
        resources: extended resources, such as `{"nvidia.com/gpu": "2"}`.
        labels: labels of the Node.
        arguments: more options of the kubelet.
    """
    number = NODES.index(name) + 1
    argv = [
        *(sys.executable, "-m", "tests.controlplane.kubelet"),
        f"--kubeconfig={plane.kubeconfig(f'system:node:{name}')}",
        f"--node={name}",
        f"--address=10.77.0.{10 + number}",
        f"--pod-subnet=10.77.{number}",
        f"--root={folder / name}",
        f"--tls={plane.certificates}",
        *(f"--resource={key}={value}" for key, value in (resources or {}).items()),
        *(f"--label={key}={value}" for key, value in (labels or {}).items()),
        *arguments,
    ]
    (folder / name).mkdir(parents=True)
    return Process(f"kubelet {name}", argv, folder / f"kubelet-{name}.log")


def service_proxy(plane: ControlPlane, machine: Host, folder: Path) -> Process:
    """Return the process by which ClusterIPs and names of Services work in the sandbox, not yet started.

    `service_proxy.add_machine` returns its machine.
    """
    argv = [
        *machine.exec,
        *(sys.executable, "-m", "tests.controlplane.service_proxy"),
        f"--kubeconfig={plane.kubeconfig()}",
        f"--resolv-conf={folder / 'resolv.conf'}",
    ]
    return Process("service proxy", argv, folder / "service-proxy.log")


async def controller(plane: ControlPlane, folder: Path, *arguments: str) -> Process:
    """Return the controller with its own ServiceAccount, not yet started."""
    kubeconfig = await plane.service_account_kubeconfig(CONTROLLER_NAMESPACE, CONTROLLER_ACCOUNT)
    argv = [sys.executable, "-m", "cli.main", "controller", f"--kubeconfig={kubeconfig}", *arguments]
    return Process("controller", argv, folder / "controller.log", SOURCES)


async def _is_explained(plane: ControlPlane, kind: Resource) -> bool:
    """Return whether the API server has published the schema of a kind, which follows a moment after the kind."""
    try:
        return "DESCRIPTION" in await plane.kubectl("explain", f"{kind.plural}.spec")
    except PlaneError:
        return False


async def delete_leadership(plane: ControlPlane) -> None:
    """Delete the Lease of a controller that has ended: it may still hold it, and the next would wait for its expiry."""
    await plane.request("DELETE", LEASES.path(CONTROLLER_NAMESPACE, CONTROLLER_ACCOUNT), accept={404})


async def controller_may(
    plane: ControlPlane, verb: str, resource: Resource, namespace: str = "", subresource: str = ""
) -> bool:
    """Return whether the API server lets the controller do this; it learns of a new binding from a watch, a bit later.

    Args:
        plane: the API server.
        verb: of RBAC.
        resource: the kind.
        namespace: where; empty for all namespaces, and for a kind that is in none.
        subresource: such as `status`.

    Raises:
        PlaneError: the API server did not decide.
    """
    spec = {
        "user": f"system:serviceaccount:{CONTROLLER_NAMESPACE}:{CONTROLLER_ACCOUNT}",
        # What the API server derives from a ServiceAccount's token.
        "groups": [
            "system:serviceaccounts",
            f"system:serviceaccounts:{CONTROLLER_NAMESPACE}",
            "system:authenticated",
        ],
        "resourceAttributes": {
            "verb": verb,
            "group": resource.group,
            "resource": resource.plural,
            "subresource": subresource,
            "namespace": namespace,
        },
    }
    review = await plane.request("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", {"spec": spec})
    return bool(review["status"]["allowed"])


@dataclass(frozen=True)
class MetalHost:
    """A separate machine with an agent.

    Attributes:
        host: the machine: address, link.
        agent: its agent; `stop`, `kill` and `start` do not affect the engines, which continue to run.
        file_root: folder for `file://` sources.
        state_folder: the agent's state.
        level: file with the memory pressure that the agent sees, if a test sets it.
    """

    host: Host
    agent: Process
    file_root: Path
    state_folder: Path
    level: Path

    @property
    def name(self) -> str:
        """Name of its MetalHost object."""
        return self.host.name

    @property
    def address(self) -> str:
        """Address of the machine."""
        return self.host.address


async def make_host_account(plane: ControlPlane, name: str) -> None:
    """Make the identity of a host as `pomona host join` does, unless a host of an earlier test left it."""
    account = SERVICE_ACCOUNTS, host_account(name)
    for resource, obj in (account, *host_rights(name, [SERVICE_ACCOUNT_ISSUER])):
        path = resource.path(obj["metadata"].get("namespace"))
        await plane.request("POST", path, obj, accept={HTTPStatus.CONFLICT})


async def metal_host(
    plane: ControlPlane, network: Network, name: str, folder: Path, *arguments: str, decided: bool = False
) -> MetalHost:
    """Return a machine with its agent, which has the host's own ServiceAccount and is not yet started.

    With `decided` a test sets the memory pressure; otherwise it is that of the machine that all hosts share. The agent
    measures no model, unless the arguments say so: that would change statuses half a minute after a test has begun.
    """
    host = await network.add_host(name)
    await make_host_account(plane, name)
    kubeconfig = await plane.service_account_kubeconfig(HOSTS_NAMESPACE, name)
    # Short names, because the agent keeps a Unix socket in its folder, and the path of a socket has at most 107 bytes.
    state_folder, file_root = folder / name, folder / f"{name}-files"
    for needed in (state_folder, file_root):
        needed.mkdir()
    level = folder / f"{name}-level"
    program = ("tests.support.agent_process", str(level)) if decided else ("cli.main",)
    argv = [
        *host.exec,
        *(sys.executable, "-m", *program, "agent"),
        f"--name={name}",
        f"--kubeconfig={kubeconfig}",
        f"--state-dir={state_folder}",
        f"--file-root={file_root}",
        NO_BENCHMARKS,
        *arguments,
    ]
    return MetalHost(
        host, Process(f"agent {name}", argv, folder / f"agent-{name}.log", SOURCES), file_root, state_folder, level
    )
