"""The Models that services use, by the objects as the API server sends them."""

from collections.abc import Iterable

from cli.api_objects import Obj


def list_model_names(service: Obj) -> list[str]:
    """Return the names of the Models that a service serves: its own, then those of its companions."""
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
