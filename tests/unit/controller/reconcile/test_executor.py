"""Writes, cache updates and Events of the executor, with an API whose answers a test decides."""

import contextlib
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from controller.reconcile.executor import LABEL_SECONDS, Executor
from controller.reconcile.plan import Event, Plan, Reconciler, Snapshot, child, ref
from crds.meta import ObjectMeta
from kube.client import Client, Obj
from kube.errors import ApiError, Conflict, Forbidden, LeadershipLost, NotFound, NotOurs, Unauthorized
from kube.events import EventRecorder
from kube.resources import (
    INFERENCE_SERVICES,
    METAL_HOSTS,
    POD_MONITORS,
    PVCS,
    ROLES,
    SECRETS,
    SERVICES,
    ObjectKey,
    Resource,
)
from kube.store import Store

OWNER = ObjectMeta(name="chat", namespace="team", uid="chat-uid")
KEY = ObjectKey("team", "chat")
SERVICE = child(SERVICES, "chat", INFERENCE_SERVICES, OWNER, {}, spec={})
TOKEN = child(SECRETS, "chat-token", INFERENCE_SERVICES, OWNER, {}, data={"token": "c2VjcmV0"})
PLANNED = {"phase": "Progressing", "conditions": [{"type": "Ready", "status": "False", "reason": "Progressing"}]}


class World(Client):
    """An API with the objects `there`; `refusal` is raised at every write of a child."""

    def __init__(self, *there: tuple[Resource, Obj], refusal: ApiError | None = None) -> None:
        self.there = {(resource, obj["metadata"]["name"]): obj for resource, obj in there}
        self.refusal = refusal
        self.status: Obj = {}

    async def get(self, resource: Resource, name: str, namespace: str | None = None) -> Obj:
        del namespace
        if (resource, name) not in self.there:
            raise NotFound("get", status=404)
        return self.there[resource, name]

    async def create(self, resource: Resource, obj: Any) -> Obj:
        if self.refusal:
            raise self.refusal
        if (resource, obj["metadata"]["name"]) in self.there:
            raise Conflict("create", status=409, reason="AlreadyExists")
        return self._store_answer(resource, obj)

    async def apply(
        self, resource: Resource, obj: Any, *, field_manager: str, subresource: str = "", force: bool = True
    ) -> Obj:
        del field_manager
        if subresource:
            self.status = obj["status"]
            version = str(int(obj["metadata"]["resourceVersion"]) + 1)
            metadata = obj["metadata"] | {"uid": "chat-uid", "resourceVersion": version, "generation": 3}
            return {**obj, "metadata": metadata}
        if self.refusal:
            raise self.refusal
        if (resource, obj["metadata"]["name"]) in self.there and not force:
            raise Conflict("apply", status=409, reason="Conflict")
        return self._store_answer(resource, obj)

    async def delete(self, resource: Resource, name: str, namespace: str | None = None, **options: Any) -> None:
        stored = await self.get(resource, name, namespace)
        if self.refusal:
            raise self.refusal
        if stored["metadata"]["uid"] != options["uid"]:
            raise Conflict("delete", status=409, reason="Conflict")
        del self.there[resource, name]

    def _store_answer(self, resource: Resource, obj: Obj) -> Obj:
        stored = {**obj, "metadata": {**obj["metadata"], "uid": "new", "resourceVersion": "5"}}
        self.there[resource, obj["metadata"]["name"]] = stored
        return stored


class GoneMeanwhile(World):
    """An API that refuses a deletion of an object that is gone once it is looked for."""

    async def delete(self, resource: Resource, name: str, namespace: str | None = None, **options: Any) -> None:
        if self.refusal:
            raise self.refusal
        await super().delete(resource, name, namespace, **options)


class Told(EventRecorder):
    """An event recorder that collects the reasons."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    async def event(self, regarding: Obj, type: Any, reason: str, note: str, action: str) -> None:  # noqa: A002 - as the base
        del regarding, type, note, action
        self.reasons.append(reason)


class Shell:
    """An executor that decides `plan` for one object of `resource`."""

    def __init__(
        self,
        world: World,
        plan: Plan,
        resource: Resource = INFERENCE_SERVICES,
        require_leadership: Callable[[], None] = lambda: None,
    ) -> None:
        self.world, self.store, self.told = world, Store(), Told()
        metadata = {"name": "chat", "namespace": "team", "uid": "chat-uid", "resourceVersion": "1", "generation": 3}
        self.store.put(resource, {"apiVersion": "v1", "kind": resource.kind, "metadata": metadata})
        self._kind = Reconciler(resource=resource, decide=lambda _snapshot, _key: plan)
        self.now = datetime(2026, 11, 21, tzinfo=UTC)
        self._executor = Executor(world, self.store, self.told, lambda: self.now, require_leadership)

    async def run(self, kind: Reconciler | None = None) -> float | None:
        return await self._executor.reconcile(kind or self._kind, KEY)

    def condition(self, kind: str) -> Obj:
        (match,) = [entry for entry in self.world.status["conditions"] if entry["type"] == kind]
        return dict(match)


def existing(obj: Obj, **metadata: Any) -> Obj:
    return {**obj, "metadata": {"name": obj["metadata"]["name"], "uid": "old", "resourceVersion": "4", **metadata}}


def owner(uid: str, name: str = "chat") -> Sequence[Obj]:
    return [{"apiVersion": "v1", "kind": "InferenceService", "name": name, "uid": uid, "controller": True}]


async def test_former_leader_writes_nothing_more() -> None:
    """Its process was suspended in the middle of a plan, and another leads by now."""
    world = World()

    def require_leadership() -> None:
        if world.there:
            raise LeadershipLost("the lease has expired")

    shell = Shell(world, Plan(create=(TOKEN,), apply=(SERVICE,), status=PLANNED), require_leadership=require_leadership)
    with pytest.raises(LeadershipLost):
        await shell.run()
    assert set(world.there) == {(SECRETS, "chat-token")}
    assert world.status == {}


async def test_kind_without_a_watch_is_never_cached() -> None:
    shell = Shell(World(), Plan(create=(TOKEN,), apply=(SERVICE, (SECRETS, TOKEN[1] | {"data": {}}))))
    await shell.run()
    assert shell.store.list(SECRETS) == []
    assert shell.store.get(SERVICES, "chat", "team")
    assert shell.world.there[SECRETS, "chat-token"]["data"] == {}


@pytest.mark.parametrize("plan", [Plan(apply=(SERVICE,), status=PLANNED), Plan(create=(SERVICE,), status=PLANNED)])
@pytest.mark.parametrize(
    ("metadata", "said", "phase"),
    [
        ({}, "delete it, or choose another name", "Failed"),
        ({"ownerReferences": owner("1", "mail")}, "belongs to InferenceService mail", "Failed"),
        ({"ownerReferences": owner("1")}, "of a former InferenceService chat", "Pending"),
    ],
)
async def test_owner_of_a_taken_name_is_reported(plan: Plan, metadata: Obj, said: str, phase: str) -> None:
    shell = Shell(World((SERVICES, existing(SERVICE[1], **metadata))), plan)
    with pytest.raises(NotOurs, match=said):
        await shell.run()
    assert shell.world.status["phase"] == phase


@pytest.mark.parametrize("is_in_store", [True, False])
async def test_grants_of_a_former_host_are_taken_over(*, is_in_store: bool) -> None:
    shell = Shell(World((ROLES, role := owned_role("former"))), Plan(apply=((ROLES, owned_role("new")),)))
    if is_in_store:
        shell.store.put(ROLES, role)
    await shell.run()
    assert shell.world.there[ROLES, "grants:mac"]["metadata"]["ownerReferences"][0]["uid"] == "new"


async def test_grants_of_another_host_are_not_taken_over() -> None:
    shell = Shell(World((ROLES, owned_role("other", "studio"))), Plan(apply=((ROLES, owned_role("new")),)))
    with pytest.raises(NotOurs, match="belongs to MetalHost studio"):
        await shell.run()


def owned_role(uid: str, host: str = "mac") -> Obj:
    owner = ObjectMeta(name=host, namespace="team", uid=uid)
    _, role = child(ROLES, "grants:mac", METAL_HOSTS, owner, {}, rules=[])
    return existing(role, **role["metadata"])


async def test_claim_that_pods_hold_is_reported_with_the_way_out() -> None:
    claim = PVCS, {**SERVICE[1], "kind": PVCS.kind}
    held = existing(claim[1], ownerReferences=owner("1"), deletionTimestamp="2026-11-21T12:00:00Z")
    with pytest.raises(NotOurs, match="until no pod mounts it: suspend the InferenceServices"):
        await Shell(World((PVCS, held)), Plan(apply=(claim,))).run()


async def test_edited_object_of_ours_is_restored() -> None:
    edited = existing(SERVICE[1], ownerReferences=owner("chat-uid"))
    shell = Shell(World((SERVICES, edited)), Plan(apply=(SERVICE,)))
    await shell.run()
    assert shell.world.there[SERVICES, "chat"]["metadata"]["uid"] == "new"


REFUSAL = Forbidden("create", status=403, reason="Forbidden", message="exceeded quota")


async def test_refusal_keeps_conditions_that_still_hold() -> None:
    serving = {"phase": "Ready", "conditions": [{"type": "Ready", "status": "True", "reason": "Serving"}]}
    shell = Shell(World(refusal=REFUSAL), Plan(apply=(SERVICE,), status=serving))
    with pytest.raises(Forbidden):
        await shell.run()
    assert (shell.condition("Ready")["reason"], shell.world.status["phase"]) == ("Serving", "Ready")
    assert shell.told.reasons == ["Forbidden"]


async def test_refusal_sets_no_condition_of_a_host() -> None:
    expired = {"conditions": [{"type": "Ready", "status": "False", "reason": "LeaseExpired"}]}
    shell = Shell(World(refusal=REFUSAL), Plan(apply=(SERVICE,), status=expired), METAL_HOSTS)
    with pytest.raises(Forbidden):
        await shell.run()
    assert shell.condition("Ready")["reason"] == "LeaseExpired", "by which its processes are given up"
    assert "phase" not in shell.world.status


@pytest.mark.parametrize(
    ("refusal", "reason"),
    [
        (ApiError("create", status=400, reason="BadRequest", message="a webhook denied it"), "BadRequest"),
        (ApiError("create", status=400, reason="no such colour!", message="a webhook denied it"), "Refused"),
        (ApiError("create", status=402, message="a webhook denied it"), "Refused"),
        (NotFound("create", status=404, message="a webhook denied it"), "NotFound"),
    ],
)
async def test_refusal_is_reported_in_condition_and_event(refusal: ApiError, reason: str) -> None:
    events = (Event("Warning", "NeverHappened", "", "Reconcile"),)
    shell = Shell(World(refusal=refusal), Plan(apply=(SERVICE,), status=PLANNED, events=events))
    with pytest.raises(ApiError):
        await shell.run()
    ready = shell.condition("Ready")
    assert (ready["status"], ready["reason"], ready["observedGeneration"]) == ("False", reason, 3)
    assert "a webhook denied it" in ready["message"]
    assert (shell.condition("Reconciled")["reason"], shell.world.status["phase"]) == (reason, "Failed")
    assert shell.told.reasons == [reason]


async def test_refusal_for_a_webhook_that_does_not_answer_names_it_and_the_way_out() -> None:
    said = 'failed calling webhook "pods.policy.example": failed to call webhook: service "policy" not found'
    refusal = ApiError("apply", status=400, reason="InternalError", message=said)
    shell = Shell(World(refusal=refusal), Plan(apply=(SERVICE,), status=PLANNED))
    with pytest.raises(ApiError):
        await shell.run()
    message = shell.condition("Ready")["message"]
    assert "let webhook pods.policy.example answer again, or delete its configuration" in message
    assert "kubectl get validatingwebhookconfigurations" in message


async def test_refused_read_on_which_the_decision_depends_is_an_event() -> None:
    shell = Shell(World(), Plan(status=PLANNED))

    async def observe(_client: Client, _snapshot: Snapshot, _key: ObjectKey) -> None:
        raise Forbidden("get secrets team/chat-token", status=403, reason="Forbidden", message="a role is missing")

    kind = Reconciler(resource=INFERENCE_SERVICES, decide=lambda _snapshot, _key: Plan(status=PLANNED), observe=observe)
    for _ in range(2):
        with pytest.raises(Forbidden):
            await shell.run(kind)
    assert shell.told.reasons == ["Forbidden"]
    assert shell.world.status == {}


@pytest.mark.parametrize(
    "refusal",
    [
        ApiError("create", status=500, reason="InternalError", message="failed calling webhook"),
        Conflict("create", status=409, reason="Conflict", message="a webhook denied it"),
    ],
    ids=lambda error: str(error.status),
)
async def test_refusal_that_may_pass_is_reported_when_it_lasts(refusal: ApiError) -> None:
    shell = Shell(World(refusal=refusal), Plan(apply=(SERVICE,), status=PLANNED))
    for seconds, reported in ((0, []), (4.9, []), (5, [refusal.reason]), (6, [refusal.reason])):
        shell.now = datetime(2026, 11, 21, tzinfo=UTC) + timedelta(seconds=seconds)
        with pytest.raises(ApiError):
            await shell.run()
        assert shell.told.reasons == reported
    assert shell.condition("Ready")["reason"] == refusal.reason


@pytest.mark.parametrize(
    "refusal",
    [Conflict("apply", status=409), ApiError("apply", status=429), Unauthorized("apply", status=401)],
    ids=lambda error: str(error.status),
)
async def test_passing_refusal_is_not_reported(refusal: ApiError) -> None:
    shell = Shell(World((SERVICES, existing(SERVICE[1])), refusal=refusal), Plan(create=(SERVICE,), status=PLANNED))
    with pytest.raises(ApiError):
        await shell.run()
    assert (shell.world.status, shell.told.reasons) == ({}, [])


async def test_refusal_with_other_words_each_time_is_reported_once_a_minute() -> None:
    shell = Shell(World(), Plan(apply=(SERVICE,), status=PLANNED))
    messages = []
    for number in range(120):
        shell.now = datetime(2026, 11, 21, tzinfo=UTC) + timedelta(seconds=number)
        shell.world.refusal = Forbidden("create", status=403, reason="Forbidden", message=f"request {number} denied")
        with pytest.raises(Forbidden):
            await shell.run()
        messages.append(shell.condition("Reconciled")["message"])
    assert len(set(messages)) == 2
    assert "request 60 denied" in messages[-1]
    assert shell.told.reasons == ["Forbidden"]


async def test_refusal_of_the_spec_before_an_edit_delays_no_report_of_the_edit() -> None:
    class EditedMeanwhile(World):
        async def apply(self, resource: Resource, obj: Any, **options: Any) -> Obj:
            if options.get("subresource"):
                answer = await super().apply(resource, obj, **options)
                return {**answer, "metadata": answer["metadata"] | {"generation": 4}}
            chat = shell.store.get(INFERENCE_SERVICES, "chat", "team") or {}
            edited = {**chat["metadata"], "generation": 4, "resourceVersion": "2"}
            shell.store.put(INFERENCE_SERVICES, {**chat, "metadata": edited})
            return await super().apply(resource, obj, **options)

    shell = Shell(EditedMeanwhile(), Plan(apply=(SERVICE,), status=PLANNED))
    for words, generation in (("words about the earlier spec", 3), ("words about the edit", 4)):
        shell.world.refusal = ApiError("apply", status=422, reason="Invalid", message=words)
        with pytest.raises(ApiError):
            await shell.run()
        ready = shell.condition("Ready")
        assert words in ready["message"]
        assert ready["observedGeneration"] == generation


async def test_each_new_reason_and_each_new_refusal_is_reported() -> None:
    shell = Shell(World(), Plan(apply=(SERVICE,), status=PLANNED))
    for refusal in (REFUSAL, ApiError("create", status=400, reason="BadRequest"), None, REFUSAL):
        shell.world.refusal = refusal
        with contextlib.suppress(ApiError):
            await shell.run()
        shell.store.remove(SERVICES, "team", "chat")
    assert shell.told.reasons == ["Forbidden", "BadRequest", "Forbidden"]


async def test_status_is_decided_after_the_writes_whose_answers_it_reports() -> None:
    shell = Shell(World(), Plan())

    def decide(snapshot: Snapshot, _key: ObjectKey) -> Plan:
        there = snapshot.store.get(SERVICES, "chat", "team") is not None
        phase = "Ready" if there else "Progressing"
        return Plan(apply=(SERVICE,), status={"phase": phase, "conditions": []})

    assert await shell.run(Reconciler(resource=INFERENCE_SERVICES, decide=decide)) is None
    assert shell.world.status["phase"] == "Ready"


async def test_decision_after_the_writes_has_no_effects() -> None:
    """A Deployment that was just written has no ready pods yet, and its service is probed on."""
    performed = list[object]()
    shell = Shell(World(), Plan())

    def decide(snapshot: Snapshot, _key: ObjectKey) -> Plan:
        is_written = snapshot.store.get(SERVICES, "chat", "team") is not None
        return Plan(apply=(SERVICE,), effects=("stop" if is_written else "start",))

    def perform(_key: ObjectKey, effect: object) -> None:
        performed.append(effect)

    await shell.run(Reconciler(resource=INFERENCE_SERVICES, decide=decide, perform=perform))
    assert performed == ["start"]


async def test_writes_that_become_due_by_the_first_ones_are_made_at_once() -> None:
    shell = Shell(World(), Plan())
    other = child(SERVICES, "second", INFERENCE_SERVICES, OWNER, {}, spec={})

    def decide(snapshot: Snapshot, _key: ObjectKey) -> Plan:
        there = snapshot.store.get(SERVICES, "chat", "team") is not None
        return Plan(create=(SERVICE, other) if there else (SERVICE,))

    assert await shell.run(Reconciler(resource=INFERENCE_SERVICES, decide=decide)) == 0.0


async def test_answers_of_unwatched_kinds_reach_the_reconciler() -> None:
    shell, answers = Shell(World(), Plan()), []
    kind = Reconciler(
        resource=INFERENCE_SERVICES,
        decide=lambda _snapshot, _key: Plan(create=(TOKEN,), apply=(SERVICE,)),
        written=lambda resource, answer: answers.append((resource, answer["metadata"]["name"])),
    )
    await shell.run(kind)
    assert answers == [(SECRETS, "chat-token")]


REFUSED_DELETION = Conflict("delete", status=409, reason="Conflict")


def deletes(world: World, *objects: Obj) -> Shell:
    """Return an executor that deletes these Services, which the store has."""
    shell = Shell(world, Plan(delete=tuple(ref(SERVICES, obj) for obj in objects), status=PLANNED))
    for obj in objects:
        shell.store.put(SERVICES, obj)
    return shell


@pytest.mark.parametrize("refusal", [None, REFUSED_DELETION], ids=["", "while another deletes it"])
@pytest.mark.parametrize("successor", [False, True])
async def test_object_that_is_gone_before_it_is_deleted_is_forgotten(
    refusal: ApiError | None, *, successor: bool
) -> None:
    there = [(SERVICES, existing(SERVICE[1], namespace="team", uid="successor"))] if successor else []
    shell = deletes(GoneMeanwhile(*there, refusal=refusal), existing(SERVICE[1], namespace="team"))
    await shell.run()
    assert shell.store.get(SERVICES, "chat", "team") is None
    assert shell.world.status["phase"] == "Progressing"


async def test_deletion_that_is_refused_by_a_conflict_is_tried_again() -> None:
    obj = existing(SERVICE[1], namespace="team")
    shell = deletes(World((SERVICES, obj), refusal=REFUSED_DELETION), obj)
    with pytest.raises(Conflict):
        await shell.run()
    assert shell.store.get(SERVICES, "chat", "team") is obj, "a webhook or another writer refused it: it is there"
    shell.world.refusal = None
    await shell.run()
    assert shell.world.there == {}


@pytest.mark.parametrize("refusal", [REFUSED_DELETION, REFUSAL], ids=lambda error: str(error.status))
async def test_deletion_that_is_refused_hinders_no_other(refusal: ApiError) -> None:
    kept, other = (existing(SERVICE[1], namespace="team", name=name, uid=name) for name in ("kept", "other"))

    class Protects(World):
        async def delete(self, resource: Resource, name: str, namespace: str | None = None, **options: Any) -> None:
            self.refusal = refusal if name == "kept" else None
            await super().delete(resource, name, namespace, **options)

    world = Protects((SERVICES, kept), (SERVICES, other))
    with pytest.raises(type(refusal)):
        await deletes(world, kept, other).run()
    assert world.there.keys() == {(SERVICES, "kept")}


@pytest.mark.parametrize(
    ("refusal", "again_seconds"),
    [
        (ApiError("apply", status=500, reason="InternalError"), LABEL_SECONDS),
        (ApiError("apply", status=400, reason="BadRequest"), LABEL_SECONDS),
        # An administrator may not grant the right to patch services: they are reported as always.
        (Forbidden("apply", status=403, reason="Forbidden", message="cannot patch"), None),
        # The watch brings the other object; a webhook that answers so would be asked for ever.
        (Conflict("apply", status=409, reason="Conflict"), None),
        (NotFound("apply", status=404), None),
    ],
)
async def test_refused_label_is_written_later_and_holds_up_nothing_else(
    refusal: ApiError, again_seconds: float | None
) -> None:
    shell = Shell(World(refusal=refusal), Plan(status={"conditions": []}, labels={"inference.pomona.dev/engine": "a"}))
    assert await shell.run() == again_seconds
    assert shell.world.status == {"conditions": []}


@pytest.mark.parametrize(
    "refusal",
    [NotFound("apply", status=404), Forbidden("apply", status=403, reason="Forbidden", message="cannot create")],
    ids=["kind is gone", "no right"],
)
async def test_refused_monitor_holds_up_nothing_else(refusal: ApiError) -> None:
    """Prometheus' operator may be removed at any time, which is noticed later, and services serve without it."""
    monitor = child(POD_MONITORS, "chat", INFERENCE_SERVICES, OWNER, {}, spec={})
    shell = Shell(World(refusal=refusal), Plan(apply=(monitor,), status=PLANNED))
    await shell.run()
    assert shell.world.status["phase"] == "Progressing"
    shell = Shell(World(refusal=refusal), Plan(apply=(SERVICE,), status=PLANNED))
    with pytest.raises(type(refusal)):
        await shell.run()
