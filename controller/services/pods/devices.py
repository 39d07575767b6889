"""The devices of one replica in a pod: their resource and number, and the nodes that have such devices.

A request for the vendor's resource alone keeps a pod on nodes with such a device. Node affinity is added for what
the service says of them, their product and their least memory, and against architectures that cannot serve the weights.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from controller.placement.device_need import DeviceNeed
from controller.services.pods.device_claims import build_need, find_selector_problem, least_mib
from crds.inferenceservice import InferenceService
from crds.meta import Accelerator
from crds.pods import ServiceHardware
from crds.size import MIB, size_text
from devices.products import list_family_labels
from devices.vendors import Vendor
from kube.client import Obj

_MOST_WEIGHT: Final = 100
"""Largest weight of a preference, by the API."""


class DeviceRequest(NamedTuple):
    """The devices that one replica requests."""

    resource: str | None
    """Extended resource; None: no device, or one that is claimed."""
    number: int
    """0 without a device."""
    need: DeviceNeed | None = None
    """Devices that are claimed; None: they are requested by the resource."""


NO_DEVICES: Final = DeviceRequest(resource=None, number=0)


def request_devices(service: InferenceService, vendor: Vendor) -> DeviceRequest:
    """Return the devices of one replica: a number of an extended resource, or of devices that are claimed by DRA.

    The service must be one in which `find_hardware_problem` finds no problem. NO_DEVICES: it runs on the processor.
    """
    hardware = service.spec.hardware
    resource = hardware.resource or vendor.resource
    if resource is None:
        return NO_DEVICES
    number = hardware.count or service.spec.resources.gpu or 1
    if hardware.device_selector is not None and vendor.driver is not None:
        need = build_need(hardware.device_selector, vendor.driver, number)
        return DeviceRequest(resource=None, number=number, need=need)
    return DeviceRequest(resource=resource, number=number)


def find_hardware_problem(service: InferenceService, accelerator: Accelerator, vendor: Vendor) -> str | None:
    """Return the first field about devices that contradicts another one or the vendor, with the way out, or None."""
    hardware, gpu = service.spec.hardware, service.spec.resources.gpu
    # 1. Fields that contradict each other or the accelerator.
    if gpu is not None and hardware.count is not None and gpu != hardware.count:
        return f"hardware.count is {hardware.count} and resources.gpu is {gpu}: remove resources.gpu"
    if mode := _refuse_mode(service, accelerator, vendor):
        return mode
    stated = _list_stated(hardware, gpu)
    if vendor.resource is None:
        if not stated:
            return None
        return f"{stated[0]}, but accelerator {accelerator} has no devices: remove it"

    # 2. Devices are claimed by a selector, or counted by a resource of the vendor.
    if hardware.device_selector is not None:
        return find_selector_problem(service, hardware.device_selector, accelerator, vendor)
    if hardware.resource is not None and not vendor.offers(hardware.resource):
        offered = " or ".join((vendor.resource, *vendor.further_resources))
        return f"hardware.resource {hardware.resource} is none of accelerator {accelerator}: use {offered}"

    # 3. The nodes must state what is demanded of the devices.
    wants_product = hardware.products or hardware.preferred_products
    if wants_product and vendor.product_label is None:
        return (
            f"hardware.products cannot be enforced for accelerator {accelerator}, whose nodes have no label with the "
            "product: use nodeSelector, or add productLabel to the controller's --vendors file"
        )
    if hardware.memory is not None and vendor.memory_label is None:
        return (
            f"hardware.memory cannot be enforced for accelerator {accelerator}, whose nodes have no label with the "
            "memory of a device: use nodeSelector, or add memoryLabel to the controller's --vendors file"
        )
    if hardware.memory is not None and vendor.memory_values and not _list_large_enough(vendor, hardware.memory):
        most = size_text(max(vendor.memory_values.values()) * MIB)
        return f"hardware.memory {hardware.memory} is more than any {accelerator} device has: use at most {most}"
    return None


def _refuse_mode(service: InferenceService, accelerator: Accelerator, vendor: Vendor) -> str | None:
    """Return why scheduling.mode does not suit the accelerator, with the way out, or None."""
    mode = service.spec.scheduling.mode
    if not vendor.in_pods and mode == "Native":
        return f"scheduling.mode is Native, but hosts with accelerator {accelerator} always go by the queue: remove it"
    if vendor.in_pods and vendor.resource is None and mode == "Queue":
        return f"scheduling.mode is Queue, but accelerator {accelerator} has no devices to wait for: remove it"
    return None


def _list_stated(hardware: ServiceHardware, gpu: int | None) -> list[str]:
    """Return the fields about devices that a service states, such as `hardware.count is 2`."""
    fields: dict[str, object] = {
        "hardware.count": hardware.count,
        "resources.gpu": gpu,
        "hardware.resource": hardware.resource,
        "hardware.memory": hardware.memory,
        "hardware.products": ", ".join(hardware.products) or None,
        "hardware.preferredProducts": ", ".join(hardware.preferred_products) or None,
        "hardware.deviceSelector": "stated" if hardware.device_selector is not None else None,
    }
    return [f"{field} is {value}" for field, value in fields.items() if value is not None]


def build_node_affinity(hardware: ServiceHardware, vendor: Vendor, unfit: Sequence[str] = ()) -> Obj | None:
    """Return the node affinity by product and least memory of the devices, or None if none is demanded.

    Args:
        hardware: the hardware that the service states.
        vendor: its accelerator.
        unfit: architectures on which the engine cannot serve the weights; products that are stated were checked.
    """
    # 1. What nodes must have: a product, or none of the unfit architectures, and devices with enough memory.
    required: list[Obj] = []
    if hardware.products and vendor.product_label:
        required.append({"key": vendor.product_label, "operator": "In", "values": sorted(hardware.products)})
    elif unfit and vendor.family_label:
        values = sorted(value for family in unfit for value in list_family_labels(family))
        required.append({"key": vendor.family_label, "operator": "NotIn", "values": values})

    if hardware.memory is not None and vendor.memory_label:
        required.append(_require_memory(vendor, vendor.memory_label, hardware.memory))
        if vendor.shared_label:  # a shared device has less memory for each pod
            values = list(vendor.shared_values)
            required.append({"key": vendor.shared_label, "operator": "NotIn", "values": values})

    # 2. The affinity, with the preferred products, the first of which counts the most.
    affinity: Obj = {}
    if required:
        terms = [{"matchExpressions": required}]
        affinity["requiredDuringSchedulingIgnoredDuringExecution"] = {"nodeSelectorTerms": terms}
    if hardware.preferred_products and vendor.product_label:
        affinity["preferredDuringSchedulingIgnoredDuringExecution"] = [
            {
                "weight": max(1, _MOST_WEIGHT >> rank),  # half of that of the product before
                "preference": {
                    "matchExpressions": [{"key": vendor.product_label, "operator": "In", "values": [product]}]
                },
            }
            for rank, product in enumerate(hardware.preferred_products)
        ]
    return {"nodeAffinity": affinity} if affinity else None


def _require_memory(vendor: Vendor, label: str, memory: int | str) -> Obj:
    """Return the requirement on the label by which nodes state a device's memory: listed values, or a number of MiB."""
    if vendor.memory_values:
        return {"key": label, "operator": "In", "values": _list_large_enough(vendor, memory)}
    return {"key": label, "operator": "Gt", "values": [str(least_mib(memory) - 1)]}


def _list_large_enough(vendor: Vendor, memory: int | str) -> list[str]:
    least = least_mib(memory)
    return [value for value, mib in vendor.memory_values.items() if mib >= least]
