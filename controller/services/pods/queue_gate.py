"""The scheduling gate by which new pods of a service wait for the queue.

A gate in the template of a Deployment is a part of all its pods, so a gate that comes or goes would replace them. No
pod that has a node is replaced for that: the template keeps its gate, or its lack of one, until it changes for another
cause.
"""

from typing import Final

from controller.pod_settings import PodSettings
from controller.services.pods.devices import DeviceRequest
from crds.inferenceservice import InferenceService
from crds.meta import KUEUE_QUEUE_NAME, QUEUE_GATE
from kube.client import Obj

_GATES: Final = "schedulingGates"
_LONGEST_DEADLINE: Final[Obj] = {"progressDeadlineSeconds": 2147483647}
"""A Deployment makes no progress while its pods wait, which is no failure. The API has no value for "never"."""


def is_queued(service: InferenceService, devices: DeviceRequest, settings: PodSettings) -> bool:
    """Return whether new pods of a service wait for the queue, which pods without devices do not need."""
    mode = service.spec.scheduling.mode or settings.scheduling_mode
    return mode == "Queue" and devices.number > 0


def name_local_queue(service: InferenceService) -> str | None:
    """Return the LocalQueue of Kueue to which the pods of a service are given, or None."""
    scheduling = service.spec.scheduling
    return scheduling.queue_name if scheduling.mode == "Kueue" else None


def read_local_queue(deployment: Obj) -> str | None:
    """Return the LocalQueue of Kueue to which a Deployment gives its pods, or None."""
    queue: str | None = (deployment["metadata"].get("labels") or {}).get(KUEUE_QUEUE_NAME)
    return queue


def has_gate(deployment: Obj) -> bool:
    """Return whether new pods of a Deployment wait for the queue."""
    gates = deployment["spec"]["template"]["spec"].get(_GATES) or ()
    return any(gate["name"] == QUEUE_GATE for gate in gates)


def set_gate(deployment: Obj, *, is_gated: bool) -> Obj:
    """Return the Deployment with or without the scheduling gate, which holds new pods back until the queue admits them.

    Pods that wait for our queue or for Kueue are no failure, so the Deployment gets the longest deadline then.
    """
    # Gate and deadline are taken out first, and put in again where they are needed.
    spec = {name: value for name, value in deployment["spec"].items() if name not in _LONGEST_DEADLINE}
    template = spec["template"]
    pod = {name: value for name, value in template["spec"].items() if name != _GATES}
    gates = {_GATES: [{"name": QUEUE_GATE}]} if is_gated else {}
    deadline = _LONGEST_DEADLINE if is_gated or read_local_queue(deployment) else {}
    return {**deployment, "spec": {**spec, **deadline, "template": {**template, "spec": {**pod, **gates}}}}
