"""The model that a pod serves, and the devices that it needs: what a node is scored for.

A serving pod names its InferenceService by a label, and the service its Model, both of the pod's own namespace. A pod
of others may name a model by its hash; nothing else is known of it then, so that it is scored by measurements alone and
fits every node. Labels are a tenant's words: they are bounded, and lead to no object of another namespace.
"""

import re
from typing import Final, NamedTuple

from crds.inferenceservice import InferenceService
from crds.meta import LABEL_ACCELERATOR
from crds.model import Model
from devices.vendors import Vendors
from extender.wire import PodFacts
from fitness.corrections import Corrections
from fitness.performance_store import LABEL_MODEL_HASH
from fitness.serving_devices import ServingDevices
from fitness.speed import estimate_speed, find_active_share

_HASH: Final = re.compile(r"[0-9a-f]{8,64}")
_MIG: Final = re.compile(r"nvidia\.com/mig-(?P<profile>[0-9a-z.]{1,32})")


class ServedModel(NamedTuple):
    """A model with the service that serves it."""

    model: Model
    service: InferenceService
    runtime: str

    @property
    def speed_inputs(self) -> tuple[object, ...]:
        """All that the estimate of its speed follows from; its status changes more often."""
        status = self.model.status
        counts = status.total_parameters, status.active_parameters
        return self.model.spec, status.layout, counts, self.service.spec, self.runtime


class ScoringSubject(NamedTuple):
    """The model and the devices of a replica, as a key: equal ones have equal scores on each node."""

    model_hash: str
    namespace: str
    """Namespace of the pod, in which further measurements count."""
    accelerator: str = ""
    """Vendor of the devices, cpu without devices; empty: unknown."""
    device_count: int = 0
    partition: str = ""
    """Partition that each device is; empty: a whole device."""
    need_bytes: int | None = None
    """Memory that each device must have; None: unknown."""
    is_served: bool = False
    """The Model is known, so that its speed can be estimated."""


class DeviceDemand(NamedTuple):
    """The devices that a pod requests."""

    accelerator: str = ""
    """Name of their vendor; empty if the pod requests no device."""
    number: int = 0
    partition: str = ""


def find_stated_hash(pod: PodFacts) -> str:
    """Return the model hash that a pod of others states; empty: none, or no hash."""
    stated = pod.labels.get(LABEL_MODEL_HASH, "")
    return stated if _HASH.fullmatch(stated) else ""


def read_demand(pod: PodFacts, vendors: Vendors) -> DeviceDemand:
    """Return the devices that a pod requests: the vendor, their number, and the MIG profile if they are partitions.

    Only the first requested resource that a vendor offers counts. It is empty if the pod requests no device.
    """
    for resource, count in pod.devices.items():
        for name, vendor in vendors.items():
            if vendor.offers(resource):
                # A resource such as nvidia.com/mig-1g.10gb counts partitions: its profile is 1g.10gb.
                profile = _MIG.fullmatch(resource)
                return DeviceDemand(name, count, profile["profile"] if profile else "")
    return DeviceDemand()


def describe_subject(
    model_hash: str, pod: PodFacts, demand: DeviceDemand, served: ServedModel | None = None
) -> ScoringSubject:
    """Return the model and the devices of a pod, for which nodes are scored.

    Of a pod of no service, nothing is known but the devices that it requests. For the pod of a service, the accelerator
    is the first that one of these states: its requests, its label, the status of the service, a spec.

    Args:
        model_hash: identity of the model.
        pod: the pod.
        demand: devices that it requests.
        served: its service and Model; None: a pod that no service has made.
    """
    # The hash finds the measurements of the model, which count by device class.
    subject = ScoringSubject(model_hash, pod.namespace, demand.accelerator, demand.number, demand.partition)
    if served is None:
        return subject

    # 1. The accelerator.
    service, spec = served.service, served.service.spec
    # With several accelerators, the status is about the first of them.
    has_one_accelerator = "," not in service.status.accelerator
    status_accelerator = service.status.accelerator if has_one_accelerator else ""
    spec_accelerator = spec.hardware.accelerator or served.model.spec.hardware.accelerator or ""
    accelerator = demand.accelerator or pod.labels.get(LABEL_ACCELERATOR, "") or status_accelerator or spec_accelerator

    # 2. The number of devices, and the memory that each must have.
    # The memory in the status is that of whole devices of its accelerator.
    status_applies = has_one_accelerator and status_accelerator in {"", accelerator} and not demand.partition
    spec_count = 0 if accelerator == "cpu" else (spec.hardware.count or spec.resources.gpu or 1)
    device_count = demand.number or spec_count
    # need_bytes is None if the status is about other devices, or if the replica has none.
    return subject._replace(
        accelerator=accelerator,
        device_count=device_count,
        need_bytes=service.status.device_memory_bytes if status_applies and device_count else None,
        is_served=True,
    )


def estimate_served_speed(served: ServedModel, devices: ServingDevices, corrections: Corrections) -> float | None:
    """Return the expected tokens a second of one stream; None: layout or bandwidth are not known.

    Args:
        served: the model, and its service.
        devices: devices of one replica.
        corrections: what measurements of other models say, as far as they count in its namespace.
    """
    status = served.model.status
    if status.layout is None:
        return None
    share = find_active_share(served.model)
    options = served.service.spec
    estimate = estimate_speed(status.layout, options, served.runtime, devices, corrections, active_share=share)
    return estimate.generation.expected if estimate is not None else None
