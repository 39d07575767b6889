"""A tenant who makes pods by hand to hold devices that it does not use: on the real API server and scheduler."""

from controller.placement.effects import admit_pod
from crds.meta import LABEL_MANAGED_BY, LABEL_SERVICE, MANAGED_BY
from kube.resources import PODS
from tests.cluster.policy.queued_pods import build_pod
from tests.cluster.queue.queue_user import QueueUser
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
