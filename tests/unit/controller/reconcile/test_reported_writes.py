"""Conditions about writes that the API server refuses, or keeps only in part."""

from datetime import timedelta
from typing import Any

import pytest

from controller.reconcile import plan_writer
from controller.reconcile.executor import Executor
from controller.reconcile.plan import Plan, Reconciler, Snapshot, child
from controller.reconcile.reported_writes import DOUBT_SECONDS
from kube.client import Obj
from kube.errors import Forbidden
from kube.resources import DEPLOYMENTS, INFERENCE_SERVICES, JOBS, SERVICES, ObjectKey, Resource
from tests.unit.controller.reconcile.test_executor import KEY, OWNER, PLANNED, REFUSAL, SERVICE, Shell, World


async def test_refusal_is_the_reason_of_each_condition_that_waits_for_the_writes() -> None:
    conditions = [
        {"type": "Ready", "status": "True", "reason": "Inspected"},
        {"type": "Cached", "status": "False", "reason": "Fetching"},
        {"type": "Refreshed", "status": "False", "reason": "Away"},
    ]
    status = {"phase": "Downloading", "conditions": conditions}
    shell = Shell(World(refusal=REFUSAL), Plan(apply=(SERVICE,), status=status, waiting=("Cached",)))
    with pytest.raises(Forbidden):
        await shell.run()
    reasons = [shell.condition(kind)["reason"] for kind in ("Ready", "Cached", "Refreshed")]
    assert reasons == ["Inspected", "Forbidden", "Away"]
    assert "exceeded quota" in shell.condition("Cached")["message"]
    assert shell.world.status["phase"] == "Failed"


async def test_condition_that_changes_while_a_write_is_refused_is_reported_at_once() -> None:
    shell, plans = Shell(World(refusal=REFUSAL), Plan()), list[Plan]()

    def decide(_snapshot: Snapshot, _key: ObjectKey) -> Plan:
        return plans[-1]

    executor = Executor(shell.world, shell.store, shell.told, lambda: shell.now, lambda: None)
    kind = Reconciler(resource=INFERENCE_SERVICES, decide=decide)
    for met in ("False", "True", "True"):
        model = {"type": "ModelReady", "status": met, "reason": "Inspected"}
        plans.append(Plan(apply=(SERVICE,), status={**PLANNED, "conditions": [*PLANNED["conditions"], model]}))
        with pytest.raises(Forbidden):
            await executor.reconcile(kind, KEY)
        assert shell.condition("ModelReady")["status"] == met
    assert shell.told.reasons == ["Forbidden"]


VOLUMES: Obj = {
    "volumes": [{"name": "models", "image": {"reference": "r/a@sha256:0"}}, {"name": "tmp", "emptyDir": {}}],
    "nodeSelector": {},
}


def deployment(**spec: Any) -> tuple[Resource, Obj]:
    owner = {"apiVersion": "inference.pomona.dev/v1alpha1", "kind": "InferenceService", "name": "chat"}
    metadata = {
        "name": "chat",
        "namespace": "team",
        "ownerReferences": [{**owner, "uid": "chat-uid", "controller": True}],
    }
    return DEPLOYMENTS, {"metadata": metadata, "spec": {"template": {"spec": spec}}}


class Dropping(World):
    """An API server that knows no image volumes."""

    drops = True

    async def apply(self, resource: Resource, obj: Any, **options: Any) -> Obj:
        answer = await super().apply(resource, obj, **options)
        if resource != DEPLOYMENTS or not self.drops:
            return answer
        kept = [{"name": "tmp", "emptyDir": {}}]
        return {**answer, "spec": {"template": {"spec": {"volumes": kept}}, "replicas": 1}}

    async def get_version(self) -> str:
        return "v1.34.4"


async def test_field_that_the_api_server_drops_is_told_with_its_version() -> None:
    world = Dropping()
    shell = Shell(world, Plan(apply=(deployment(**VOLUMES),), status=PLANNED))
    for told in (["FieldsDropped"], ["FieldsDropped"]):
        await shell.run()
        ready = shell.condition("Ready")
        assert (ready["status"], ready["reason"], world.status["phase"]) == ("False", "FieldsDropped", "Failed")
        assert "v1.34.4 has dropped spec.template.spec.volumes[models].image of Deployment chat" in ready["message"]
        assert "spec.cache.medium Volume" in ready["message"]
        assert shell.condition("Reconciled")["reason"] == "FieldsDropped"
        assert shell.told.reasons == told, "once"
    world.drops = False
    shell.now += timedelta(seconds=DOUBT_SECONDS)
    await shell.run()
    assert [condition["type"] for condition in world.status["conditions"]] == ["Ready"], (
        "after an upgrade of Kubernetes"
    )


async def test_api_server_that_drops_a_field_is_asked_again_after_a_pause_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy that strips a field of all services would have each decision about one write all of its objects."""
    monkeypatch.setattr(plan_writer, "needs_apply", lambda *_: False)

    class Counting(Dropping):
        applied = 0
        asked = 0

        async def apply(self, resource: Resource, obj: Any, **options: Any) -> Obj:
            self.applied += resource == DEPLOYMENTS
            return await super().apply(resource, obj, **options)

        async def get_version(self) -> str:
            self.asked += 1
            return await super().get_version()

    world = Counting()
    shell = Shell(world, Plan(apply=(deployment(**VOLUMES),), status=PLANNED))
    for number in (1, 2):
        for _ in range(4):
            again_seconds = await shell.run()
            assert again_seconds == DOUBT_SECONDS
            assert shell.condition("Reconciled")["reason"] == "FieldsDropped"
        assert (world.applied, world.asked) == (number, number)
        shell.now += timedelta(seconds=DOUBT_SECONDS)


async def test_dropped_field_holds_up_no_other_write_and_no_service_that_serves() -> None:
    serving = {"phase": "Ready", "conditions": [{"type": "Ready", "status": "True", "reason": "Serving"}]}
    shell = Shell(Dropping(), Plan(apply=(deployment(**VOLUMES), SERVICE), status=serving))
    await shell.run()
    assert (shell.condition("Ready")["reason"], shell.world.status["phase"]) == ("Serving", "Ready")
    assert shell.condition("Reconciled")["reason"] == "FieldsDropped"
    assert (SERVICES, "chat") in shell.world.there


async def test_dropped_field_of_an_object_that_is_only_created_is_told_as_long_as_it_is_there() -> None:
    class Pruning(World):
        async def create(self, resource: Resource, obj: Any) -> Obj:
            return {**await super().create(resource, obj), "spec": {"kept": 1}}

        async def get_version(self) -> str:
            return "v1.35.4"

    job = child(JOBS, "chat", INFERENCE_SERVICES, OWNER, {}, spec={"kept": 1, "lost": 2, "template": {"spec": {}}})
    shell, plans = Shell(Pruning(), Plan()), [Plan(create=(job,), status=PLANNED), Plan(status=PLANNED)]
    executor = Executor(shell.world, shell.store, shell.told, lambda: shell.now, lambda: None)
    kind = Reconciler(resource=INFERENCE_SERVICES, decide=lambda _snapshot, _key: plans[0])
    for _ in range(2):
        await executor.reconcile(kind, KEY)
        assert "v1.35.4 has dropped spec.lost of Job chat" in shell.condition("Ready")["message"]
        plans[:] = plans[-1:]
    shell.store.remove(JOBS, "team", "chat")
    await executor.reconcile(kind, KEY)
    assert shell.condition("Ready")["reason"] == "Progressing"
