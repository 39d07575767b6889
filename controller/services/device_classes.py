"""The device class of a replica by the node or host that it is on; None if the hardware does not say what it is.

A class of unknown hardware would be that of many kinds, and a speed of one of them would be believed of all.
"""

import math
from collections.abc import Iterable

from controller.models.served import METAL
from controller.reconcile.plan import Snapshot
from controller.services.pods.devices import request_devices
from crds.inferenceservice import InferenceService
from crds.metalhost import MetalHost
from crds.nodefitness import NodeFitness
from crds.quantity import parse_quantity
from devices.device_class import name_device_class, name_host_class, name_processor_class
from devices.node_labels import read_share
from devices.vendors import Vendor, Vendors
from kube.client import Obj
from kube.resources import METAL_HOSTS, NODE_FITNESSES, NODES, ObjectKey


def find_replica_class(
    snapshot: Snapshot, service: InferenceService, accelerators: Iterable[str], place: str, vendors: Vendors
) -> str | None:
    """Return the device class of a replica, such as nvidia-l4x2, by the node or host that it is on; None: unknown.

    On a node, a class of devices comes before that of the processor, which counts only if the service may run
    without devices.

    Args:
        snapshot: the cluster.
        service: the service.
        accelerators: those that its replicas may be on.
        place: the name of the node or host of the replica.
        vendors: the table of accelerators.
    """
    # 1. On a host, the class is that of its hardware.
    names = [accelerator for accelerator in accelerators if accelerator in vendors]
    if METAL in names and (host := snapshot.read(METAL_HOSTS, ObjectKey("", place), MetalHost)) is not None:
        return find_host_class(host)

    # 2. On a node, it is that of devices, else that of the processor.
    node = snapshot.get(NODES, ObjectKey("", place))
    if node is None:
        return None
    # An accelerator without a resource to count its devices by is the processor of the nodes, if it is in pods.
    for name in names:
        if vendors[name].resource is not None and (device_class := find_node_class(service, name, vendors[name], node)):
            return device_class

    may_use_processor = any(vendors[name].resource is None and vendors[name].in_pods for name in names)
    return _find_processor_class(snapshot, service, node) if may_use_processor else None


def find_host_class(host: MetalHost) -> str | None:
    """Return the device class of an off-cluster host; None if its agent does not state the chip."""
    facts = host.status
    return name_host_class(facts.chip, facts.gpu_cores, facts.memory_bytes) if facts.chip else None


def find_node_class(service: InferenceService, accelerator: str, vendor: Vendor, node: Obj) -> str | None:
    """Return the device class that a replica of a service has on a node with devices of a vendor.

    None: the node does not name its product, has no such device, or lets pods share its devices, so that the speed of
    one depends on the others; or the replica claims devices by DRA, which may be of any product.
    """
    labels: dict[str, str] = node["metadata"]["labels"]
    devices = request_devices(service, vendor)
    product = labels.get(vendor.product_label or "", "")
    allocatable: dict[str, str] = node["status"]["allocatable"]

    # A request has a `resource` for devices of a device plugin, and a `need` for devices that it claims.
    if not product or devices.resource is None or not devices.number or devices.need is not None:
        return None

    # Without such devices on the node, or if pods share them (`read_share`), there is no class.
    if allocatable.get(devices.resource, "0") == "0" or read_share(accelerator, vendor, labels) is not None:
        return None

    # A partition of a device has a resource of its own, such as nvidia.com/mig-1g.10gb.
    partition = "" if devices.resource == vendor.resource else devices.resource.rpartition("/")[2]
    return name_device_class(accelerator, product, devices.number, partition)


def _find_processor_class(snapshot: Snapshot, service: InferenceService, node: Obj) -> str | None:
    """Return the class of the processor of a node with the cores of a replica; None if it is unknown.

    A class names the processor and a number of cores, since the speed of a replica depends on both.
    """
    fitness = snapshot.read(NODE_FITNESSES, ObjectKey("", node["metadata"]["name"]), NodeFitness)
    stated = service.spec.resources.cpu
    cores = parse_quantity(node["status"]["allocatable"].get("cpu", "0") if stated is None else stated)
    if fitness is None or not fitness.status.processor or not cores:
        return None
    return name_processor_class(fitness.status.processor, math.ceil(cores))
