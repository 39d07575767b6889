"""Objects of the API as the server sends them: any part of their status may be absent."""

from collections.abc import Callable, Iterable
from typing import Any

Obj = dict[str, Any]


def find_condition(obj: Obj, kind: str) -> Obj:
    """Return a condition of an object; empty if it has none of this type."""
    conditions = obj.get("status", {}).get("conditions", [])
    return next((condition for condition in conditions if condition["type"] == kind), {})


def has_condition(obj: Obj, kind: str) -> bool:
    """Return whether a condition of an object is True; False also if it has none of this type."""
    return find_condition(obj, kind).get("status") == "True"


def count_serving(service: Obj) -> int:
    """Return the replicas of a service that serve, those of an earlier spec included."""
    return int(service.get("status", {}).get("availableReplicas", 0))


def status_reader(field: str) -> Callable[[Obj], str]:
    """Return a function that returns a field of the status of an object as text; empty if it is absent."""
    return lambda obj: str(obj.get("status", {}).get(field, ""))


def may_be_on_hosts(service: Obj) -> bool:
    """Return whether replicas of a service may be processes on hosts; pods are those of all other accelerators.

    A service that may use several accelerators may still have processes on hosts that it is about to leave.
    """
    status = service.get("status", {})
    return "choice" in status or status.get("accelerator") in {None, "", "metal"}


def list_model_names(service: Obj) -> list[str]:
    """Return the names of the Models that a service serves: its own, then those of its companions.

    Companions are a draft model for speculative decoding, a projector for images, and adapters.
    """
    spec = service["spec"]
    companions = [
        spec.get("speculative", {}).get("draftModelRef"),
        spec.get("projectorModelRef"),
        *(adapter["modelRef"] for adapter in spec.get("adapters", [])),
    ]
    return [spec["modelRef"], *(companion for companion in companions if companion)]


def find_users(model: str, apart_from: str, services: Iterable[Obj]) -> list[str]:
    """Return the names of the services that use a Model, apart from one."""
    names = {service["metadata"]["name"] for service in services if model in list_model_names(service)}
    return sorted(names - {apart_from})
