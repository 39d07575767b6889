"""Small objects for tests that care about the call and not about the object."""

from typing import Any

from kube.client import Obj


def secret(namespace: str, name: str, **more: Any) -> Obj:
    return {"metadata": {"namespace": namespace, "name": name}, "data": {"a": "Zm9v"}, **more}
