"""Services that select devices by what they are, on the real scheduler, which allocates their claims."""

from typing import Any

import pytest

from controller.placement.device_need import AttributeDemand, DeviceNeed
from controller.services.pods.claim_templates import build_template
from devices.vendors import VENDORS, Vendor
from kube.client import Client, Obj
from kube.errors import Invalid
from kube.resources import (
    ACCELERATOR_POOLS,
    INFERENCE_SERVICES,
    RESOURCE_CLAIM_TEMPLATES,
    RESOURCE_CLAIMS,
    RESOURCE_SLICES,
    Resource,
)
from tests.cluster.queue.queue_user import RUN_SECONDS, QueueUser
from tests.controlplane.plane import ControlPlane
from tests.support.api_objects import as_service
from tests.support.device_slices import DRIVER, L4, device_slice, gpu
from tests.support.eventually import eventually
from tests.support.simulated_nodes import SimulatedNodes

DEVICE_CLASSES = Resource("resource.k8s.io", "v1", "deviceclasses", "DeviceClass", namespaced=False)
WHOLE = f"device.driver == '{DRIVER}' && device.attributes['{DRIVER}'].type == 'gpu'"


def select(**selector: Any) -> Obj:
    """Return the hardware of a service with a selector."""
    return {"accelerator": "nvidia", "deviceSelector": selector}


def need_everything(vendor: Vendor) -> DeviceNeed:
    """Return a need that has a demand of each kind on the devices of a vendor."""
    driver = vendor.driver
    assert driver is not None
    types = driver.attributes | {"other.example/rack": "int"}
    demands = [
        AttributeDemand(name=name, type=type_, values=("true",) if type_ == "bool" else ("1", "2"))
        for name, type_ in types.items()
    ]
    demands += [
        AttributeDemand(name=name, type=type_, at_least="1")
        for name, type_ in types.items()
        if type_ in {"int", "version"}
    ]
    return DeviceNeed(driver=driver.name, device_class=driver.device_class, memory_mib=1, demands=tuple(demands))


async def test_api_server_takes_each_expression_and_no_attribute_without_a_demand(
    client: Client, namespace: str, user: QueueUser
) -> None:
    await user.serve("owner")
    owner = await client.get(INFERENCE_SERVICES, "owner", namespace)
    for vendor in VENDORS.values():
        if vendor.driver is not None:
            _, template = build_template(as_service(owner), need_everything(vendor))
            await client.create(RESOURCE_CLAIM_TEMPLATES, template)
    for attribute in ({"name": "model"}, {"name": "model", "values": ["a"], "atLeast": "1"}):
        with pytest.raises(Invalid, match="either values or atLeast"):
            await user.serve("bad", hardware=select(attributes=[attribute]))
    for spec in (
        {"accelerator": "metal", "memoryOvercommitPercent": 150},
        {"accelerator": "nvidia", "memoryOvercommitPercent": 99},
    ):
        with pytest.raises(Invalid, match="memoryOvercommitPercent"):
            await client.create(ACCELERATOR_POOLS, {"metadata": {"name": spec["accelerator"]}, "spec": spec})


async def read_allocated(client: Client, namespace: str) -> list[str]:
    """Return the devices of all claims; one that two have is there twice."""
    claims = (await client.list(RESOURCE_CLAIMS, namespace)).items
    allocations = (claim.get("status", {}).get("allocation", {}) for claim in claims)
    return sorted(
        result["device"] for allocation in allocations for result in allocation.get("devices", {}).get("results", ())
    )


async def test_device_goes_to_the_most_important_service_whose_selector_it_meets(
    plane: ControlPlane, client: Client, simulated: SimulatedNodes, user: QueueUser
) -> None:
    """The one large GPU of a node goes to services by priority; its small one goes to the service that selects it."""
    made = {"metadata": {"name": DRIVER}, "spec": {"selectors": [{"cel": {"expression": WHOLE}}]}}
    await client.create(DEVICE_CLASSES, made)
    devices = device_slice("claims-1", gpu("large"), gpu("small", L4))
    devices["metadata"] = {"name": "claims-1-gpus"}
    await simulated.add("claims-1", 0)
    await client.create(RESOURCE_SLICES, devices)
    try:
        await user.serve("first", hardware=select(memory="72Gi"))
        await user.wait_until_on("first", "claims-1")
        assert await read_allocated(client, user.namespace) == ["large"]
        await user.serve("low", priority="low", hardware=select(memory="72Gi"))
        await user.wait_until_queued("low")
        hopper = select(attributes=[{"name": "cudaComputeCapability", "atLeast": "9"}])
        await user.serve("normal", hardware=hopper)
        await user.wait_for_places("normal", "low")
        await user.serve("huge", hardware=select(memory="1Ti"))
        status = await user.wait_for_status("huge", reason="NoSuchHardware")
        assert f"{DRIVER}/[memory>=1017118Mi, type=gpu]" in status["message"], status

        await user.delete("first")
        await user.wait_until_on("normal", "claims-1")
        assert await read_allocated(client, user.namespace) == ["large"]
        assert await user.nodes("low") == [""]

        small = select(attributes=[{"name": "productName", "values": [L4[0]]}])
        await user.edit("normal", hardware=small)
        await user.wait_until_on("normal", "claims-1")
        await user.wait_until_on("low", "claims-1")

        async def has_one_template_each() -> bool:
            templates = (await client.list(RESOURCE_CLAIM_TEMPLATES, user.namespace)).items
            owners = sorted(template["metadata"]["ownerReferences"][0]["name"] for template in templates)
            assert owners == ["huge", "low", "normal"], templates
            return await read_allocated(client, user.namespace) == ["large", "small"]

        await eventually(has_one_template_each, RUN_SECONDS)
    finally:
        await user.delete_services()
        await plane.request("DELETE", RESOURCE_SLICES.path(None, "claims-1-gpus"), accept={404})
        await plane.request("DELETE", DEVICE_CLASSES.path(None, DRIVER), accept={404})
