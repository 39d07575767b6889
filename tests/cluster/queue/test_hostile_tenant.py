"""A tenant who makes pods by hand to hold devices that it does not use: on the real API server and scheduler."""

from copy import deepcopy

from controller.placement.effects import admit_pod
from crds.meta import LABEL_MANAGED_BY, LABEL_SERVICE, MANAGED_BY, QUEUE_GATE
from kube.resources import DEPLOYMENTS, PODS
from tests.cluster.policy.queued_pods import REPLICA_SETS, SECOND_GATE, build_pod
from tests.cluster.queue.queue_user import RUN_SECONDS, QueueUser
from tests.support.eventually import eventually
from tests.support.simulated_nodes import GPU, SimulatedNodes


async def test_pods_that_a_tenant_pins_itself_hold_no_device(simulated: SimulatedNodes, user: QueueUser) -> None:
    """The scheduler refuses the pod for ever, so that it holds nothing, and is in nobody's way."""
    await simulated.add("sim-1", devices=1)
    pod = build_pod({LABEL_MANAGED_BY: MANAGED_BY, LABEL_SERVICE: "idle"})
    pod["spec"]["containers"][0]["resources"] = {"limits": {GPU: "1"}}
    pod["metadata"] |= {"name": "idle", "namespace": user.namespace, "uid": ""}
    pod["spec"] |= {"nodeSelector": {"no": "node"}, "affinity": admit_pod(pod, "sim-1")[2]["value"]}
    del pod["metadata"]["uid"], pod["spec"]["schedulingGates"]
    await user.client.create(PODS, pod)
    await user.wait_until_unschedulable("idle")
    await user.serve("chat")
    await user.wait_until_on("chat", "sim-1")
    await user.client.delete(PODS, "idle", user.namespace)


async def test_pods_that_a_tenant_pins_before_the_queue_does_share_no_device(
    simulated: SimulatedNodes, user: QueueUser
) -> None:
    """A ReplicaSet in the name of a service: one term of its affinity names another node, and a second gate stays.

    All of its pods got the one device that is free, and each device that was freed later, before those that wait.
    """
    await simulated.add("sim-1", devices=2)
    await user.serve("idle")
    await user.wait_until_on("idle", "sim-1")
    template = deepcopy((await user.client.get(DEPLOYMENTS, "idle", user.namespace))["spec"]["template"])
    labels = {**template["metadata"]["labels"], "pod-template-hash": "mine"}
    elsewhere = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["elsewhere"]}]}
    anywhere = {"matchExpressions": [{"key": "team", "operator": "DoesNotExist"}]}
    template["metadata"]["labels"] = labels
    template["spec"]["schedulingGates"].append({"name": SECOND_GATE})
    template["spec"]["affinity"] = {
        "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [elsewhere, anywhere]}}
    }
    spec = {"replicas": 2, "selector": {"matchLabels": labels}, "template": template}
    await user.client.create(
        REPLICA_SETS, {"metadata": {"name": "idle-mine", "namespace": user.namespace}, "spec": spec}
    )

    async def is_one_admitted() -> bool:
        gates = [gate["name"] for gate in await user.gates("idle")]
        assert (gates.count(SECOND_GATE), gates.count(QUEUE_GATE)) == (2, 1), gates
        return True

    await eventually(is_one_admitted, RUN_SECONDS)
    await user.serve("chat")
    await user.wait_for_status("chat", reason="InsufficientDevices")
    await user.client.delete(REPLICA_SETS, "idle-mine", user.namespace)
    await user.wait_until_on("chat", "sim-1")
