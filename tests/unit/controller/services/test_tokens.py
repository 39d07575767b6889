"""The replacement of a service's token: when it is done, in which steps, and what it never rolls."""

import base64
from collections.abc import Sequence
from typing import Any

from controller.reconcile.plan import Plan, Snapshot
from controller.services.reconciler import ServiceInputs, decide_service
from controller.services.tokens import TokenRotation, read_rotation, token_secret, wanted_rotation
from crds.meta import ROTATE_TOKEN, TOKEN_ROTATION
from kube.client import Client, Obj
from kube.errors import NotFound
from kube.resources import DEPLOYMENTS, INFERENCE_SERVICES, MODELS, SECRETS, Resource
from tests.support.api_objects import NOW, as_service, model, service, store
from tests.support.service_decisions import KEY, list_applied


class OneSecret(Client):
    """An API with the token Secret of `chat`, or none."""

    def __init__(self, secret: Obj | None) -> None:
        self.secret = secret
        self.reads = 0

    async def get(self, resource: Resource, name: str, namespace: str | None = None) -> Obj:
        assert (resource, name, namespace) == (SECRETS, "chat-token", "team")
        self.reads += 1
        if self.secret is None:
            raise NotFound("get", status=404)
        return self.secret


def annotated(value: str | None, rotation: str = "") -> Obj:
    """Return the service with this annotation, whose status has the last rotation."""
    obj = service(status={"tokenRotation": rotation} if rotation else None)
    obj["metadata"]["annotations"] = {ROTATE_TOKEN: value} if value else {}
    return obj


def stored_secret(value: str | None = None) -> Obj:
    _, secret = token_secret(as_service(annotated(value)), "first")
    metadata = {"uid": "uid-secret", "resourceVersion": "5", **secret["metadata"]}
    return secret | {"metadata": metadata}


def written(operations: Sequence[Any], path: str) -> Any:
    return next(each["value"] for each in operations if each["path"] == path)


async def test_new_value_of_the_annotation_replaces_the_token_once() -> None:
    wanted = as_service(annotated("monday"))
    step = await read_rotation(OneSecret(stored_secret()), wanted)
    assert step.patch is not None
    operations = step.patch.operations
    assert operations[0] == {"op": "test", "path": "/metadata/resourceVersion", "value": "5"}
    token = base64.b64decode(written(operations, "/data")["token"])
    assert len(token) >= 40
    assert token != b"first"
    rotation = written(operations, "/metadata/annotations")[ROTATE_TOKEN]
    assert (rotation, "monday" in rotation) == (wanted_rotation(wanted), False)
    assert await read_rotation(OneSecret(stored_secret("monday")), wanted) == TokenRotation(rotation)


async def test_rotation_that_is_done_reads_no_secret() -> None:
    rotation = wanted_rotation(as_service(annotated("monday")))
    for obj in (annotated(None), annotated("monday", rotation), annotated(None, rotation)):
        api = OneSecret(stored_secret())
        assert await read_rotation(api, as_service(obj)) == TokenRotation()
        assert api.reads == 0


async def test_secret_of_another_owner_or_none_is_not_changed() -> None:
    foreign = stored_secret()
    foreign["metadata"]["ownerReferences"][0]["uid"] = "uid-other"
    for secret in (foreign, None):
        assert await read_rotation(OneSecret(secret), as_service(annotated("monday"))) == TokenRotation()


def decided(obj: Obj, rotation: TokenRotation) -> Plan:
    known = store((INFERENCE_SERVICES, obj), (MODELS, model()))
    return decide_service(Snapshot(known, NOW, ServiceInputs(None, None, None, rotation=rotation)), KEY)


def template_annotations(plan: Plan) -> Obj | None:
    ((deployment),) = list_applied(plan, DEPLOYMENTS)
    found: Obj | None = deployment["spec"]["template"]["metadata"].get("annotations")
    return found


def test_pods_are_replaced_after_the_secret() -> None:
    done = decided(annotated("monday"), TokenRotation("abc"))
    assert done.status is not None
    assert (done.status["tokenRotation"], template_annotations(done)) == ("abc", None)
    assert done.again_seconds == 1
    rolled = decided(annotated("monday", "abc"), TokenRotation())
    assert template_annotations(rolled) == {TOKEN_ROTATION: "abc"}
    assert rolled.status is not None
    assert rolled.status["tokenRotation"] == "abc"


def test_service_whose_token_was_never_replaced_is_not_rolled() -> None:
    plan = decided(annotated(None), TokenRotation())
    assert template_annotations(plan) is None
    assert plan.status is not None
    assert "tokenRotation" not in plan.status
