"""The Models that services use, by the objects as the API server sends them."""

from collections.abc import Iterable

from cli.api_objects import Obj


def list_model_names(service: Obj) -> list[str]:
    """Return the names of the Models that a service serves: its own, then those of its companions."""
    spec = service["spec"]
    companions = [
        spec.get("speculative", {}).get("draftModelRef"),
        spec.get("projectorModelRef"),
        *(each["modelRef"] for each in spec.get("adapters", [])),
    ]
    return [spec["modelRef"], *(each for each in companions if each)]


def find_users(model: str, apart_from: str, services: Iterable[Obj]) -> list[str]:
    """Return the names of the services that use a Model, apart from one."""
    names = {each["metadata"]["name"] for each in services if model in list_model_names(each)}
    return sorted(names - {apart_from})
