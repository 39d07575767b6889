"""The resources and nodes that one replica asks for: the Job that fetches its weights reserves the same.

They are read from the pod itself, so that the two cannot differ.
"""

from typing import Final

from msgspec.structs import replace

from controller.models.jobs import Reservation
from controller.models.served import Served, accelerator_of
from controller.placement.pod_requests import sum_requests
from controller.pod_settings import PodSettings, check_limits
from controller.services.pods.deployment import choose_engine
from controller.services.pods.devices import request_devices
from controller.services.pods.pod_template import MountedWeights, build_pod
from controller.services.preconditions import CheckedService, check_service
from controller.services.replica_memory import measure_replica
from controller.services.serving_choice import apply_choice
from crds.inferenceservice import InferenceService

_CLAIM: Final = "copy"
"""Stands for the claim that the Job is for."""


def reserve_replica(service: InferenceService, served: Served, settings: PodSettings) -> Reservation | None:
    """Return the demands of one replica of these Models on its node, read from the pod that it would be.

    The Job that makes a copy of the weights on a node reserves the same, so that the replica has room beside the copy.
    None: the spec of the service is refused, its accelerator does not exist, or its replicas run on hosts. Memory that
    is not known counts as 0: the service reports it.
    """
    service = apply_choice(service)
    checked = check_service(service, served.model, served.companions, settings.vendors, largest_device_bytes=None)
    is_refused = checked.problem is not None and checked.problem.reason == "InvalidSpec"
    accelerator = accelerator_of(service, served.model)
    vendor = settings.vendors.get(accelerator)
    if is_refused or vendor is None or check_limits(service, settings.limits) is not None:
        return None

    # Its memory; 0 if it is not known.
    memory = measure_replica(service, served, request_devices(service, vendor).number)
    if service.spec.resources.memory is None and memory.container_bytes is None:
        spec = service.spec
        service = replace(service, spec=replace(spec, resources=replace(spec.resources, memory=0)))

    # A service that cannot run for another reason than its spec may run later, so it counts as accepted.
    accepted = CheckedService(served=served, problem=None, model_problem=None, memory=memory)
    choice = choose_engine(service, accelerator, accepted, settings)
    if choice is None:
        return None

    status = served.model.status
    # The volume of the copy is not made yet, so any name stands for it.
    weights = MountedWeights(claim=_CLAIM, path=status.file or _CLAIM, size_bytes=status.size_bytes)
    pod = build_pod(service, choice, weights, settings=settings)

    # Of its pod, only the demands on the node count.
    affinity = {kind: value for kind, value in pod.get("affinity", {}).items() if kind == "nodeAffinity"}
    requests = {resource: f"{quantity.normalize():f}" for resource, quantity in sum_requests(pod).items()}
    return Reservation(requests=requests, affinity=affinity, runtime_class_name=pod.get("runtimeClassName"))
