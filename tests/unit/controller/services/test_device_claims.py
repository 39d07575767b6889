"""Services that select devices claim them by DRA; all others request a resource as before."""

from typing import Any

import pytest

from controller.placement.device_need import decode_need
from controller.services.pods.claim_templates import CLAIM_NAME
from controller.services.pods.devices import request_devices
from crds.meta import DEVICE_NEED
from devices.vendors import VENDORS
from kube.client import Obj
from kube.resources import DEPLOYMENTS, MODELS, PODS, RESOURCE_CLAIM_TEMPLATES, Resource
from tests.support.api_objects import as_service, model, planned_condition
from tests.support.service_decisions import chat_pod, chat_service, decide_chat, list_applied, manage, ready_outcome

MODEL = (MODELS, model())


def selecting(accelerator: str = "nvidia", *, count: int = 1, **selector: Any) -> tuple[Resource, Obj]:
    return chat_service(hardware={"accelerator": accelerator, "count": count, "deviceSelector": selector})


def test_pod_claims_devices_by_a_template_and_requests_no_resource() -> None:
    plan = decide_chat(selecting(count=2, memory="80Gi"), MODEL)
    ((kind, template), (other, deployment), *_rest) = plan.apply
    assert (kind, other) == (RESOURCE_CLAIM_TEMPLATES, DEPLOYMENTS)
    assert template["metadata"]["ownerReferences"][0]["name"] == "chat"
    own = "device.attributes['gpu.nvidia.com']"
    capacity = "device.capacity['gpu.nvidia.com']"
    assert template["spec"]["spec"]["devices"]["requests"] == [
        {
            "name": CLAIM_NAME,
            "exactly": {
                "deviceClassName": "gpu.nvidia.com",
                "allocationMode": "ExactCount",
                "count": 2,
                "selectors": [
                    # 3 % less than 80 GiB: an H100 of 80 GB reports 81,559 MiB.
                    {
                        "cel": {
                            "expression": f"'memory' in {capacity} && "
                            f"{capacity}.memory.compareTo(quantity('79462Mi')) >= 0"
                        }
                    },
                    {"cel": {"expression": f"'type' in {own} && {own}.type == 'gpu'"}},
                ],
            },
        }
    ]
    made = deployment["spec"]["template"]
    name = template["metadata"]["name"]
    assert made["spec"]["resourceClaims"] == [{"name": CLAIM_NAME, "resourceClaimTemplateName": name}]
    (engine,) = made["spec"]["initContainers"]
    assert engine["resources"]["claims"] == [{"name": CLAIM_NAME}]
    assert not any(
        "/" in resource for resource in (*engine["resources"]["requests"], *engine["resources"].get("limits", ()))
    )
    assert made["spec"]["schedulingGates"], "it waits in the queue as others do"
    need = decode_need(made["metadata"]["annotations"][DEVICE_NEED])
    assert need is not None
    assert (need.number, need.memory_mib) == (2, 79462)


def test_service_without_selector_claims_nothing() -> None:
    plan = decide_chat(chat_service(hardware={"accelerator": "nvidia"}), MODEL, has_claims=False)
    (deployment,) = list_applied(plan, DEPLOYMENTS)
    assert list_applied(plan, RESOURCE_CLAIM_TEMPLATES) == []
    pod = deployment["spec"]["template"]
    assert "resourceClaims" not in pod["spec"]
    assert DEVICE_NEED not in pod["metadata"].get("annotations", {})
    assert "claims" not in pod["spec"]["initContainers"][0]["resources"]


@pytest.mark.parametrize(
    ("accelerator", "expected"),
    [
        ("amd", "'type' in device.attributes['gpu.amd.com'] && device.attributes['gpu.amd.com'].type == 'amdgpu'"),
        (
            "intel-gaudi",
            "'healthy' in device.attributes['gaudi.intel.com'] && device.attributes['gaudi.intel.com'].healthy == true",
        ),
    ],
)
def test_class_with_partitions_or_sick_devices_is_narrowed_to_whole_ones(accelerator: str, expected: str) -> None:
    _, stated = selecting(accelerator)
    need = request_devices(as_service(stated), VENDORS[accelerator]).need
    assert need is not None
    assert need.list_expressions() == [expected]


def test_template_is_kept_until_no_pod_is_made_of_it() -> None:
    before = decide_chat(selecting(memory="80Gi"), MODEL)
    (earlier,), (deployment,) = list_applied(before, RESOURCE_CLAIM_TEMPLATES), list_applied(before, DEPLOYMENTS)
    earlier["metadata"] |= {"uid": "uid-earlier", "resourceVersion": "1"}
    edited = selecting(memory="40Gi")
    applied, template = manage(deployment), (RESOURCE_CLAIM_TEMPLATES, earlier)
    plan = decide_chat(edited, MODEL, template, (DEPLOYMENTS, applied))
    (later,) = list_applied(plan, RESOURCE_CLAIM_TEMPLATES)
    assert later["metadata"]["name"] != earlier["metadata"]["name"]
    assert plan.delete == ()
    rolled_out = (DEPLOYMENTS, manage(list_applied(plan, DEPLOYMENTS)[0]))
    pod = chat_pod() | {"spec": deployment["spec"]["template"]["spec"]}
    assert decide_chat(edited, MODEL, template, rolled_out, (PODS, pod)).delete == ()
    (deleted,) = decide_chat(edited, MODEL, template, rolled_out).delete
    assert deleted.uid == "uid-earlier"


@pytest.mark.parametrize(
    ("hardware", "says"),
    [
        ({"memory": "24Gi"}, "hardware.memory is about devices of a device plugin"),
        ({"resource": "nvidia.com/mig-1g.10gb"}, "hardware.resource is about devices of a device plugin"),
        ({"deviceSelector": {"attributes": [{"name": "color", "values": ["red"]}]}}, "use one of architecture, brand"),
        (
            {"deviceSelector": {"attributes": [{"name": "productName", "atLeast": "3"}]}},
            "is of type string, which has no atLeast: state values",
        ),
        (
            {"deviceSelector": {"attributes": [{"name": "driverVersion", "values": ["new"]}]}},
            "is compared with new: state a version such as 8.9",
        ),
        (
            {"accelerator": "intel-gaudi", "deviceSelector": {"memory": "1Gi"}},
            "states no memory: select by healthy, mod",
        ),
        ({"accelerator": "cpu"}, "hardware.deviceSelector is stated, but accelerator cpu has no devices: remove it"),
        ({"accelerator": "metal"}, "hardware.deviceSelector is stated, but accelerator metal has no devices"),
    ],
)
def test_selector_that_cannot_be_held_is_refused_with_the_way_out(hardware: Obj, says: str) -> None:
    stated = {"accelerator": "nvidia", "deviceSelector": {}} | hardware
    plan = decide_chat(chat_service(hardware=stated), MODEL)
    assert ready_outcome(plan) == ("Failed", "False", "InvalidSpec")
    assert says in planned_condition(plan, "Ready")["message"]
    assert list_applied(plan, DEPLOYMENTS) == []


def test_selector_is_refused_beside_kueue() -> None:
    scheduling = {"mode": "Kueue", "queueName": "models"}
    hardware = {"accelerator": "nvidia", "deviceSelector": {}}
    plan = decide_chat(chat_service(hardware=hardware, scheduling=scheduling), MODEL)
    assert "scheduling.mode is Kueue" in planned_condition(plan, "Ready")["message"]


def test_cluster_without_claims_is_named_with_the_way_out() -> None:
    plan = decide_chat(selecting(), MODEL, has_claims=False)
    assert ready_outcome(plan) == ("Failed", "False", "NoDeviceClaims")
    message = planned_condition(plan, "Ready")["message"]
    assert "Kubernetes 1.34" not in message, "the oldest version that is supported: an upgrade is no way out"
    assert "--runtime-config=resource.k8s.io/v1=true" in message
    assert "hardware.products and hardware.memory" in message
    assert list_applied(plan, DEPLOYMENTS) == []


def test_selector_of_too_little_memory_is_refused() -> None:
    hardware = {"accelerator": "nvidia", "deviceSelector": {"memory": "1Gi"}}
    plan = decide_chat(chat_service(hardware=hardware, contextLength=2_000_000), MODEL)
    assert ready_outcome(plan) == ("Failed", "False", "DeviceTooSmall")
    assert "hardware.deviceSelector.memory is 1Gi" in planned_condition(plan, "Ready")["message"]
