"""A tenant who makes pods by hand to hold devices that it does not use: on the real API server and scheduler."""

from controller.placement.effects import admit_pod
from crds.meta import LABEL_MANAGED_BY, LABEL_SERVICE, MANAGED_BY, QUEUE_GATE
from kube.client import Obj
from kube.resources import PODS
from tests.cluster.policy.queued_pods import REPLICA_SETS, SECOND_GATE, build_pod
from tests.cluster.queue.queue_user import RUN_SECONDS, QueueUser
from tests.support.eventually import eventually
from tests.support.simulated_nodes import GPU, SimulatedNodes


def build_greedy(service: str, *gates: str) -> Obj:
    """Return a pod with a device in the name of a service."""
    pod = build_pod({LABEL_MANAGED_BY: MANAGED_BY, LABEL_SERVICE: service}, gates=gates)
    pod["spec"]["containers"][0]["resources"] = {"limits": {GPU: "1"}}
    return pod


async def test_pods_that_a_tenant_pins_itself_hold_no_device(simulated: SimulatedNodes, user: QueueUser) -> None:
    """The scheduler refuses the pod for ever, so that it holds nothing, and is in nobody's way."""
    await simulated.add("sim-1", devices=1)
    pod = build_greedy("idle", QUEUE_GATE)
    pod["metadata"] |= {"name": "idle", "namespace": user.namespace, "uid": ""}
    pod["spec"] |= {"nodeSelector": {"no": "node"}, "affinity": admit_pod(pod, "sim-1")[2]["value"]}
    del pod["metadata"]["uid"], pod["spec"]["schedulingGates"]
    await user.client.create(PODS, pod)
    await user.wait_until_unschedulable("idle")
    await user.serve("chat")
    await user.wait_until_on("chat", "sim-1")


async def test_pod_that_a_tenant_keeps_from_starting_makes_room(simulated: SimulatedNodes, user: QueueUser) -> None:
    """A gate of the tenant's own holds up an admitted pod for ever, and no other unit."""
    await simulated.add("sim-1", devices=2)
    await user.serve("low", priority="low")
    await user.wait_until_on("low", "sim-1")
    template = build_greedy("low", QUEUE_GATE, SECOND_GATE)
    template["metadata"]["labels"] |= {"app": "idle", "pod-template-hash": "0a"}
    spec = {"replicas": 1, "selector": {"matchLabels": {"app": "idle"}}, "template": template}
    metadata = {"name": "low-0a", "namespace": user.namespace}
    await user.client.create(REPLICA_SETS, {"metadata": metadata, "spec": spec})

    async def is_admitted() -> bool:
        (pod,) = (await user.client.list(PODS, user.namespace, label_selector="app=idle")).items
        return bool(pod["spec"]["schedulingGates"] == [{"name": SECOND_GATE}])

    await eventually(is_admitted, RUN_SECONDS)
    await user.serve("critical", gpus=2, priority="critical")
    await user.wait_until_on("critical", "sim-1")
    await user.client.delete(REPLICA_SETS, "low-0a", user.namespace)
