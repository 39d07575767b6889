"""The devices that a service claims by Dynamic Resource Allocation (DRA), because it selects them by what they are."""

import re
from decimal import Decimal
from typing import Final

from controller.placement.device_need import AttributeDemand, DeviceNeed, any_device
from crds.inferenceservice import InferenceService
from crds.meta import Accelerator
from crds.pods import DeviceAttribute, DeviceSelector
from crds.quantity import quantity_bytes
from crds.size import MIB
from devices.vendors import AttributeType, DeviceDriver, Vendor

ACCEPTED_SHARE: Final = Decimal("0.97")
"""An 80 GB card reports 79.6 GiB: what a device reports may be 3 % less than its nominal memory."""
_FORMS: Final[dict[AttributeType, tuple[re.Pattern[str], str]]] = {
    "string": (re.compile(r".+"), "a text"),
    "int": (re.compile(r"[0-9]{1,18}"), "a whole number"),
    "bool": (re.compile(r"true|false"), "true or false"),
    "version": (re.compile(r"[0-9]{1,9}(\.[0-9]{1,9}){0,2}"), "a version such as 8.9"),
}
"""The values that an attribute of each type may be compared with."""
_ORDERED: Final = frozenset[AttributeType]({"int", "version"})


def least_mib(memory: int | str) -> int:
    """Return the MiB that a device must report."""
    return int(quantity_bytes(memory) * ACCEPTED_SHARE) // MIB


def build_need(selector: DeviceSelector, driver: DeviceDriver, number: int) -> DeviceNeed:
    """Return what a pod claims: `number` devices of the driver that meet the selector.

    An attribute that the driver does not know counts as a text. `find_selector_problem` refuses a service with such a
    one, so that its need is never claimed.
    """
    whole = any_device(driver)  # the demands that every whole device meets
    stated = (_build_demand(attribute, driver) for attribute in selector.attributes)
    return DeviceNeed(
        driver=driver.name,
        device_class=driver.device_class,
        number=number,
        memory_mib=least_mib(selector.memory or 0),
        demands=(*whole.demands, *sorted(stated, key=lambda demand: demand.name)),
    )


def _build_demand(attribute: DeviceAttribute, driver: DeviceDriver) -> AttributeDemand:
    """Return what a selector demands of an attribute, with the type that the driver gives it."""
    return AttributeDemand(
        name=attribute.name,
        type=driver.attributes.get(attribute.name, "string"),
        values=tuple(sorted(attribute.values)),
        at_least=attribute.at_least or "",
    )


def find_selector_problem(
    service: InferenceService, selector: DeviceSelector, accelerator: Accelerator, vendor: Vendor
) -> str | None:
    """Return why devices cannot be claimed by a selector, with the way out, or None."""
    hardware, driver = service.spec.hardware, vendor.driver
    if driver is None:
        return (
            f"hardware.deviceSelector is stated, but no DRA driver of accelerator {accelerator} is known: use "
            "hardware.products and hardware.memory, or add driver to the controller's --vendors file"
        )

    if service.spec.scheduling.mode == "Kueue":
        return (
            "hardware.deviceSelector is stated, and scheduling.mode is Kueue, for which Pomona makes no claims: "
            "remove one of them"
        )

    plugin_fields = {
        "resource": hardware.resource,
        "memory": hardware.memory,
        "products": hardware.products,
        "preferredProducts": hardware.preferred_products,
    }
    if stated_field := next((name for name, value in plugin_fields.items() if value), None):
        return (
            f"hardware.{stated_field} is about devices of a device plugin, and hardware.deviceSelector claims others: "
            "state in deviceSelector what the devices must be, and remove the other"
        )

    # The driver must state all that the selector compares.
    if selector.memory is not None and not driver.states_memory:
        return (
            f"hardware.deviceSelector.memory cannot be enforced for accelerator {accelerator}, whose driver "
            f"{driver.name} states no memory: select by {_list_known(driver)}"
        )
    problems = (_find_attribute_problem(attribute, driver) for attribute in selector.attributes)
    return next((problem for problem in problems if problem is not None), None)


def _find_attribute_problem(attribute: DeviceAttribute, driver: DeviceDriver) -> str | None:
    """Return why an attribute cannot be compared as the selector states, with the way out, or None."""
    field, type_ = f"hardware.deviceSelector.attributes {attribute.name}", driver.attributes.get(attribute.name)
    if type_ is None:
        return f"{field} is no attribute of driver {driver.name}: use one of {_list_known(driver)}"
    if attribute.at_least is not None and type_ not in _ORDERED:
        return f"{field} is of type {type_}, which has no atLeast: state values"

    # _FORMS has the pattern of the values of a type, and its name for people; _ORDERED the types that have an order.
    pattern, form = _FORMS[type_]
    compared = attribute.values if attribute.at_least is None else [attribute.at_least]
    wrong = next((text for text in compared if not pattern.fullmatch(text)), None)
    return f"{field} is compared with {wrong}: state {form}" if wrong is not None else None


def _list_known(driver: DeviceDriver) -> str:
    return ", ".join(sorted(driver.attributes))
