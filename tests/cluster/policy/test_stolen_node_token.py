"""A thief with the token of one node's agent writes the labels and facts of that node only, within bounds."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest

from crds.meta import CONTROLLER_NAMESPACE, GROUP, LABEL_MANAGED_BY, MANAGED_BY
from kube import credentials
from kube.client import Client, Obj, connect
from kube.errors import ApiError, Forbidden
from kube.resources import NODE_FITNESSES, NODES, PODS, SECRETS, Resource
from node_agent.node_fitness import build_object
from node_agent.node_labels import FIELD_MANAGER
from tests.controlplane.plane import ControlPlane
from tests.support.eventually import eventually
from tests.support.node_tokens import NODE_AGENT, node_agent_kubeconfig

OWN, OTHER = "policy-gpu-1", "policy-gpu-2"


@dataclass
class Thief:
    """The API with the token of the agent on node OWN, beside an administrator's; `nodes` are both Nodes."""

    api: Client
    admin: Client
    nodes: dict[str, Obj]

    def fitness(self, node: str, **metadata: Any) -> Obj:
        obj = build_object(self.nodes[node])
        return {"metadata": {**obj["metadata"], **metadata}}


Attempt = Callable[[Thief], Awaitable[object]]


@pytest.fixture
async def thief(plane: ControlPlane, client: Client) -> AsyncIterator[Thief]:
    async with contextlib.AsyncExitStack() as stack:
        nodes = {}
        for name in (OWN, OTHER):
            taints = [{"key": "team", "effect": "NoSchedule"}]
            metadata = {"name": name, "labels": {"pool": "gpu"}, "annotations": {"a": "b"}}
            nodes[name] = await client.create(NODES, {"metadata": metadata, "spec": {"taints": taints}})
            stack.push_async_callback(_delete, client, NODES, name)
            stack.push_async_callback(_delete, client, NODE_FITNESSES, name)
        kubeconfig = await node_agent_kubeconfig(plane, client, OWN, stack)
        api = await stack.enter_async_context(connect(credentials.load(kubeconfig)))
        found = Thief(api, client, nodes)
        await eventually(lambda: _can_label(found))
        yield found


async def _delete(client: Client, resource: Resource, name: str) -> None:
    with contextlib.suppress(ApiError):
        await client.delete(resource, name)


async def _can_label(thief: Thief) -> bool:
    """Return whether the authorizer and the policy have seen the node and the token."""
    try:
        await label({"gpu.vendor": "NVIDIA"})(thief)
    except Forbidden:
        return False
    return True


def label(labels: dict[str, str], node: str = OWN, prefix: str = f"{GROUP}/") -> Attempt:
    """Apply labels to a Node, by force."""
    body = {"metadata": {"name": node, "labels": {prefix + name: value for name, value in labels.items()}}}
    return lambda thief: thief.api.apply(NODES, body, field_manager=FIELD_MANAGER)


def merge(patch: Obj, node: str = OWN) -> Attempt:
    return lambda thief: thief.api.patch_merge(NODES, node, None, patch, field_manager="thief")


def create(node: str, **metadata: Any) -> Attempt:
    return lambda thief: thief.api.create(NODE_FITNESSES, thief.fitness(node, **metadata))


def report(status: Obj, node: str = OWN) -> Attempt:
    body = {"metadata": {"name": node}, "status": status}
    return lambda thief: thief.api.apply(NODE_FITNESSES, body, field_manager=FIELD_MANAGER, subresource="status")


def owner(thief: Thief, **changes: Any) -> list[Obj]:
    return [{**build_object(thief.nodes[OWN])["metadata"]["ownerReferences"][0], **changes}]


def condition(number: int) -> Obj:
    moment = "2026-11-26T22:00:00Z"
    return {"type": f"T{number}", "status": "True", "reason": "R", "message": "", "lastTransitionTime": moment}


ATTEMPTS: dict[str, Attempt] = {
    "label of another node": label({"gpu.vendor": "AMD"}, OTHER),
    "label of another prefix": label({"gpu.vendor": "NVIDIA"}, prefix="nvidia.com/"),
    "label of Kubernetes": label({"node-restriction.kubernetes.io/tenant": "a"}, prefix=""),
    "another label of the prefix": label({"accelerator": "nvidia"}),
    "unknown label of devices": label({"gpu.tenant": "a"}),
    "vendor that is none": label({"gpu.vendor": "nvidia"}),
    "endless memory": label({"gpu.vram": "99999Gi"}),
    "endless devices": label({"gpu.count": "65"}),
    "boolean that is none": label({"gpu.int4": "maybe"}),
    "strange architecture": label({"gpu.arch": "SM_89"}),
    "change of a label of others": merge({"metadata": {"labels": {"pool": "mine"}}}),
    "removal of a label of others": merge({"metadata": {"labels": {"pool": None}}}),
    "annotation": merge({"metadata": {"annotations": {"flexinfer.ai/cost": "0"}}}),
    "removal of an annotation": merge({"metadata": {"annotations": {"a": None}}}),
    "finalizer": merge({"metadata": {"finalizers": ["evil.example/stay"]}}),
    "taint": merge({"spec": {"taints": [{"key": "other", "effect": "NoExecute"}]}}),
    "removal of taints": merge({"spec": {"taints": None}}),
    "cordon": merge({"spec": {"unschedulable": True}}),
    "cordon of another node": merge({"spec": {"unschedulable": True}}, OTHER),
    "new node": lambda thief: thief.api.create(NODES, {"metadata": {"name": "policy-gpu-3"}}),
    "deletion of the node": lambda thief: thief.api.delete(NODES, OWN),
    "status of the node": lambda thief: thief.api.apply(
        NODES, {"metadata": {"name": OWN}, "status": {"capacity": {"nvidia.com/gpu": "8"}}},
        field_manager="thief", subresource="status",
    ),
    "facts of another node": create(OTHER),
    "facts of no node": create(OWN, name="policy-gpu-3"),
    "facts with a finalizer": create(OWN, finalizers=["evil.example/stay"]),
    "facts with an annotation": create(OWN, annotations={"a": "b" * 1000}),
    "facts with another label": create(OWN, labels={LABEL_MANAGED_BY: MANAGED_BY, "a": "b"}),
    "facts that hold up a deletion": lambda thief: create(
        OWN, ownerReferences=owner(thief, blockOwnerDeletion=True)
    )(thief),
    "facts that another object owns": lambda thief: create(
        OWN, ownerReferences=owner(thief, apiVersion="apps/v1", kind="Deployment")
    )(thief),
    "facts that another node owns": lambda thief: create(OWN, ownerReferences=owner(thief, name=OTHER))(thief),
    "list of facts": lambda thief: thief.api.list(NODE_FITNESSES),
    "secrets": lambda thief: thief.api.list(SECRETS, CONTROLLER_NAMESPACE),
    "pods": lambda thief: thief.api.list(PODS, CONTROLLER_NAMESPACE),
}  # fmt: skip


async def test_thief_opens_nothing_but_its_own_node(thief: Thief) -> None:
    opened = []
    for name, attempt in ATTEMPTS.items():
        try:
            await attempt(thief)
        except Forbidden:
            continue
        opened.append(name)
    assert opened == []


async def test_thief_changes_no_facts_that_exist(thief: Thief) -> None:
    for node in (OWN, OTHER):
        await thief.admin.create(NODE_FITNESSES, thief.fitness(node))
    await report({"vendor": "nvidia"})(thief)
    for attempt in (
        report({"vendor": "nvidia"}, OTHER),
        report({"conditions": [condition(number) for number in range(9)]}),
        lambda thief: thief.api.delete(NODE_FITNESSES, OWN),
        lambda thief: thief.api.patch_merge(
            NODE_FITNESSES, OWN, None, {"metadata": {"labels": {"a": "b"}}}, field_manager="thief"
        ),
    ):
        with pytest.raises(Forbidden):
            await attempt(thief)
    for lie in (
        {"memoryBytes": 1 << 60},
        {"devices": [{"id": str(number)} for number in range(65)]},
        {"vendor": "x" * 999},
    ):
        with pytest.raises(ApiError) as refused:
            await report(lie)(thief)
        assert refused.value.status == 422


async def test_agent_itself_lacks_nothing(thief: Thief) -> None:
    await thief.api.create(NODE_FITNESSES, thief.fitness(OWN))
    await report({"vendor": "nvidia", "observedAt": "2026-11-26T22:00:00Z", "conditions": [condition(1)]})(thief)
    values = {"gpu.vendor": "INTEL-GAUDI", "gpu.vram": "96Gi", "gpu.arch": "gfx90a", "gpu.int4": "false"}
    values |= {"gpu.count": "64", "cpu.avx512": "true"}
    written = await label(values)(thief)
    assert isinstance(written, dict)
    assert {f"{GROUP}/{name}": value for name, value in values.items()}.items() <= written["metadata"]["labels"].items()
    written = await label({})(thief)
    assert isinstance(written, dict)
    assert written["metadata"]["labels"] == {"pool": "gpu"}


async def test_token_that_names_no_node_writes_nothing(plane: ControlPlane, thief: Thief) -> None:
    """An administrator's `kubectl create token` makes one: it is bound to no pod."""
    kubeconfig = await plane.service_account_kubeconfig(CONTROLLER_NAMESPACE, NODE_AGENT)
    async with connect(credentials.load(kubeconfig)) as api:
        unbound = Thief(api, thief.admin, thief.nodes)
        for attempt in (label({"gpu.vendor": "AMD"}), create(OWN)):
            with pytest.raises(Forbidden, match="names no node"):
                await attempt(unbound)
