"""A stamped object is recognised although a policy rewrote it; a field that another writer took is applied again."""

from copy import deepcopy
from typing import Any

import pytest

from controller.reconcile.plan import FIELD_MANAGER
from controller.reconcile.stamp import ANNOTATION_STAMP, is_desired, needs_apply, stamp
from kube.client import Obj
from kube.resources import DEPLOYMENTS


def desired(image: str = "ghcr.io/engine:1", replicas: int = 1) -> Obj:
    template = {"spec": {"containers": [{"name": "engine", "image": image, "args": ["--port", "1"]}]}}
    return {"metadata": {"name": "chat"}, "spec": {"replicas": replicas, "template": template}}


def applied(obj: Obj, *, image: str | None = None, taken: bool = False) -> Obj:
    """Return the object as the API server has it, with another image if a policy or a user set one."""
    observed = deepcopy(obj)
    if image:
        observed["spec"]["template"]["spec"]["containers"][0]["image"] = image
    fields: dict[str, Any] = {".": {}, "f:name": {}, "f:args": {}} | ({} if taken else {"f:image": {}})
    containers = {'k:{"name":"engine"}': fields}
    owned: Obj = {"f:replicas": {}, "f:template": {"f:spec": {"f:containers": containers}}}
    annotations: Obj = {"f:metadata": {"f:annotations": {f"f:{ANNOTATION_STAMP}": {}}}}
    stamped = annotations if "annotations" in obj["metadata"] else {}
    entry = {"manager": FIELD_MANAGER, "operation": "Apply", "fieldsV1": {"f:spec": owned} | stamped}
    observed["metadata"]["managedFields"] = [entry]
    return observed


def test_object_that_a_policy_rewrote_is_as_desired() -> None:
    observed = applied(stamp(desired()), image="mirror.example/engine:1")
    assert is_desired(stamp(desired()), observed)
    assert not needs_apply(DEPLOYMENTS, stamp(desired()), observed)


@pytest.mark.parametrize("changed", [desired(image="ghcr.io/engine:2"), desired(replicas=2)])
def test_another_desire_is_applied(changed: Obj) -> None:
    assert needs_apply(DEPLOYMENTS, stamp(changed), applied(stamp(desired())))
    assert not is_desired(stamp(changed), applied(stamp(desired())))


def test_field_that_another_writer_took_over_is_applied_again() -> None:
    observed = applied(stamp(desired()), image="evil.example/engine:1", taken=True)
    assert needs_apply(DEPLOYMENTS, stamp(desired()), observed)


def test_object_that_lost_its_stamp_gets_it_again() -> None:
    observed = applied(desired())
    assert not is_desired(stamp(desired()), observed)
    assert needs_apply(DEPLOYMENTS, stamp(desired()), observed)
    assert stamp(desired())["spec"] == desired()["spec"], "no pod restarts for a stamp"


def test_object_without_a_stamp_is_compared_by_its_values() -> None:
    assert not needs_apply(DEPLOYMENTS, desired(), applied(desired()))
    assert needs_apply(DEPLOYMENTS, desired(), applied(desired(), image="mirror.example/engine:1"))
