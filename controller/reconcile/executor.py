"""The execution of a plan: read the store, decide, then make one API call after the other.

The process may die between any two calls: each call is harmless when repeated, and calls that were not made are
decided again. Only differences from the store are written. The status is decided after the other writes, whose answers
are in the store by then, so that one status write reports them. A lasting refusal by the API server (a quota, a
webhook, a name that is taken) becomes a condition of the object, because its owner reads conditions and not the
controller's log.
"""

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from http import HTTPStatus
from typing import Final, NamedTuple

import msgspec
import structlog

from controller.reconcile.conditions import MESSAGE_LENGTH, condition
from controller.reconcile.indexes import controller_of
from controller.reconcile.labels import LABEL_MANAGER, desired_labels
from controller.reconcile.plan import FIELD_MANAGER, Event, Plan, Reconciler, Ref, Snapshot
from controller.reconcile.stamp import needs_apply
from kube.apply import apply_status, merge_conditions
from kube.client import Client, Obj
from kube.comparison import list_dropped
from kube.errors import ApiError, Conflict, Forbidden, Gone, NotDeletedYet, NotFound, NotOurs, Unauthorized, Unreachable
from kube.events import EventRecorder
from kube.resources import METAL_HOSTS, POD_MONITORS, PVCS, SECRETS, ObjectKey, Resource, object_key
from kube.store import Store

RECONCILED: Final = "Reconciled"
"""Condition of an object whose writes the API server refuses, or does not keep; absent otherwise."""
FAILING_SECONDS: Final = 5.0
"""A server error is reported when it lasts this long: a server that restarts refuses every write for a moment."""
REPORT_SECONDS: Final = 60.0
"""A refusal whose words change is reported at most this often: each report enqueues the object again."""
UNWATCHED: Final = frozenset({SECRETS})
"""Resources that are not watched: a copy of an answer in the store would never be corrected."""
MONITORING: Final = frozenset({POD_MONITORS})
"""Kinds that only help to watch what serves: their refusal, or the end of the kind itself, holds up nothing else."""
_UNANSWERED_WEBHOOK: Final = re.compile(r'failed calling webhook "([^"]+)"')
DROPPED: Final = "FieldsDropped"
"""Reason of an object of which the API server has not kept all that was sent."""
LABEL_SECONDS: Final = 60.0
"""Time after which labels are written again whose write has failed, unless the controller has no right to it."""
DOUBT_SECONDS: Final = 300.0
"""Pause between two questions whether it keeps the fields by now: each is a write of all objects made for one."""
_MOST_NAMED: Final = 4
_IMAGE_VOLUME: Final = re.compile(r"\.volumes\[[^\]]*\]\.image\b")
_REASON: Final = re.compile(r"[A-Za-z]([A-Za-z0-9_,:]{0,250}[A-Za-z0-9_])?")

log = structlog.get_logger()


class WriteRefusal(NamedTuple):
    """The refusal of the last plan of an object, and of all its plans since `since`."""

    uid: str
    generation: int
    reason: str
    since: datetime
    reported_at: datetime | None
    reported: frozenset[tuple[str, str, str]] = frozenset()
    """Type, status and reason of each condition that was reported with it."""


class _Doubt(NamedTuple):
    """The API server's last answer without fields that were sent for an object."""

    asked_at: datetime
    version: str


@dataclass(slots=True)
class Write:
    """A write that is under way, whose answer and event of the watch come in any order.

    Neither enqueues the object for which it is made, as that is decided again after its writes.
    """

    resource: Resource
    writer: tuple[Resource, ObjectKey]
    """The object for which this write is made."""
    seen: set[str] = field(default_factory=set)
    """The resourceVersions that came meanwhile and concern the writer; empty: the object is gone."""


class Executor:
    """Decides about an object and executes the plan.

    `require_leadership` is called before each write, and raises LeadershipLost when another replica may lead by now.
    """

    def __init__(
        self,
        client: Client,
        store: Store,
        recorder: EventRecorder,
        now: Callable[[], datetime],
        require_leadership: Callable[[], None],
    ) -> None:
        self._client = client
        self._store = store
        self._recorder = recorder
        self._now = now
        self._require_leadership = require_leadership
        self._refusals: dict[tuple[Resource, ObjectKey], WriteRefusal] = {}
        self._dropped: dict[tuple[Resource, ObjectKey], dict[tuple[Resource, ObjectKey], list[str]]] = {}
        """Fields that the API server has not kept: by the object for which they were sent, and the one with them."""
        self._doubts: dict[tuple[Resource, ObjectKey], _Doubt] = {}
        """By the object for which fields were sent that are not kept."""
        self.writes: dict[tuple[Resource, ObjectKey], Write] = {}
        """The writes that are under way, by object."""

    async def reconcile(self, reconciler: Reconciler, key: ObjectKey) -> float | None:
        """Reconcile one object; returns the seconds after which to reconcile it again, or None.

        Raises ApiError, LeadershipLost, Unreachable and NotOurs; the caller retries with back-off.
        """
        snapshot, plan = Snapshot(self._store, self._now()), Plan()
        if reconciler.report is not None and (report := reconciler.report(snapshot, key)) is not None:
            await self._report(reconciler.resource, key, report)
            return report.again_seconds
        decided = self._find(reconciler.resource, key)
        try:
            if reconciler.observe is not None:
                inputs = await reconciler.observe(self._client, snapshot, key)
                snapshot = Snapshot(self._store, self._now(), inputs)
            decided = self._find(reconciler.resource, key)
            plan = reconciler.decide(snapshot, key)
            revision = self._store.revision
            overtaken = await self._write_others((reconciler.resource, key), plan, reconciler.written or _ignore)
        except (ApiError, NotOurs) as error:
            if decided is not None:
                await self._report_refusal(reconciler.resource, decided, plan, error)
            raise
        self._refusals.pop((reconciler.resource, key), None)
        dropped = self._list_dropped((reconciler.resource, key))
        if self._store.revision != revision:
            earlier, plan = plan, reconciler.decide(Snapshot(self._store, self._now(), snapshot.inputs), key)
            if overtaken or _has_more_writes(plan, earlier):
                plan = msgspec.structs.replace(plan, again_seconds=0.0)
        elif reconciler.decided is not None and not (plan.create or plan.patch or plan.delete or dropped):
            reconciler.decided(snapshot, key, plan)
        if dropped and decided is not None:
            plan = await self._add_dropped(plan, dropped, decided, (reconciler.resource, key))
        await self._report(reconciler.resource, key, plan)
        again = await self._write_labels(reconciler.resource, key, plan.labels) if plan.labels is not None else None
        return min((seconds for seconds in (plan.again_seconds, again) if seconds is not None), default=None)

    def _find(self, resource: Resource, key: ObjectKey) -> Obj | None:
        return self._store.get(resource, key.name, key.namespace or None)

    async def _report_refusal(self, resource: Resource, decided: Obj, plan: Plan, error: ApiError | NotOurs) -> None:
        """Report a lasting refusal: the status at most once in `REPORT_SECONDS`, the Event when its reason changes.

        A condition that changes meanwhile is reported at once. The plan is empty if a read was refused, on which it
        depends: then there is only the Event.
        """
        if _is_passing(error):
            return
        now, reason, key = self._now(), _refusal_reason(error), object_key(decided)
        # A user who has edited the object, which may be since this was decided, waits for the answer to this edit.
        identity = decided["metadata"]["uid"], decided["metadata"]["generation"], reason
        last = self._refusals.get((resource, key))
        if last is None or last[:3] != identity:
            last = WriteRefusal(*identity, now, None)
        self._refusals[resource, key] = last
        lasts = not _may_pass(error) or (now - last.since).total_seconds() >= FAILING_SECONDS
        refused = _refused(plan, reason, _describe_refusal(error), decided["metadata"]["generation"])
        # What else has changed meanwhile, such as the Model of a service, is no less true for the refusal.
        conditions = (refused.status or {}).get("conditions", ())
        reported = frozenset((condition["type"], condition["status"], condition["reason"]) for condition in conditions)
        is_old = last.reported_at is None or (now - last.reported_at).total_seconds() >= REPORT_SECONDS
        if not lasts or not (is_old or reported != last.reported):
            return
        if last.reported_at is not None:
            refused = msgspec.structs.replace(refused, events=())
        self._refusals[resource, key] = last._replace(reported_at=now, reported=reported)
        await self._report(resource, key, refused)

    @property
    def _writer(self) -> Client:
        """The client for one write; raises LeadershipLost.

        A former leader decides from an old store, and few of its writes have a precondition: they would undo its
        successor's.
        """
        self._require_leadership()
        return self._client

    async def _write_others(
        self, writer: tuple[Resource, ObjectKey], plan: Plan, written: Callable[[Resource, Obj], None]
    ) -> bool:
        """Make all writes but that of the status; return whether somebody else changed one of the objects meanwhile."""
        overtaken = False
        is_doubted = self._is_doubted(writer)

        def keep(write: Write, answer: Obj, sent: Obj | None = None) -> None:
            nonlocal overtaken
            if sent is not None:
                self._note_dropped(write, sent, answer)
            if write.resource in UNWATCHED:
                written(write.resource, answer)
            else:
                self._store.put(write.resource, answer)
                overtaken |= not write.seen <= {answer["metadata"]["resourceVersion"]}

        for resource, obj in plan.create:
            with self._writing(resource, object_key(obj), writer) as write:
                answer, is_new = await self._create(resource, obj)
                keep(write, answer, obj if is_new else None)
        for resource, obj in plan.apply:
            with self._writing(resource, object_key(obj), writer) as write:
                try:
                    applied = await self._apply(resource, obj, is_doubted=is_doubted)
                except (Forbidden, NotFound) as error:
                    if resource not in MONITORING:
                        raise
                    log.warning("monitor_refused", object=f"{resource.kind} {object_key(obj)}", error=str(error))
                    continue
                if applied is not None:
                    keep(write, applied, obj)
        for patch in plan.patch:
            resource, namespace, name, _uid = patch.ref
            with self._writing(resource, ObjectKey(namespace, name), writer) as write:
                keep(write, await self._writer.patch_json(resource, name, namespace or None, patch.operations))
        await self._delete_all(plan.delete)
        return overtaken

    @contextlib.contextmanager
    def _writing(self, resource: Resource, key: ObjectKey, writer: tuple[Resource, ObjectKey]) -> Iterator[Write]:
        self.writes[resource, key] = write = Write(resource, writer)
        try:
            yield write
        finally:
            self.writes.pop((resource, key), None)

    async def _create(self, resource: Resource, obj: Obj) -> tuple[Obj, bool]:
        """Create an object; returns it, and whether it was not there."""
        try:
            return await self._writer.create(resource, obj), True
        except Conflict as error:
            if error.reason != "AlreadyExists":
                raise
            return await self._get_ours(resource, obj), False

    async def _apply(self, resource: Resource, obj: Obj, *, is_doubted: bool) -> Obj | None:
        """Apply an object; returns the answer, or None if the store shows that it would change nothing.

        The store keeps too little to see that a field was dropped: in doubt, the API server is asked again.
        """
        metadata = obj["metadata"]
        observed = self._store.get(resource, metadata["name"], metadata.get("namespace"))
        if observed is None:
            return await self._apply_first(resource, obj)
        _require_ours(resource, observed, obj)
        if not is_doubted and not needs_apply(resource, obj, observed):
            return None
        return await self._writer.apply(resource, obj, field_manager=FIELD_MANAGER)

    async def _apply_first(self, resource: Resource, obj: Obj) -> Obj:
        """Apply an object that the store does not have, without force: another owner may have made it."""
        try:
            return await self._writer.apply(resource, obj, field_manager=FIELD_MANAGER, force=False)
        except Conflict as conflict:
            try:
                await self._get_ours(resource, obj)
            except NotFound:
                raise conflict from None  # there is no other owner: a webhook refused it
            return await self._writer.apply(resource, obj, field_manager=FIELD_MANAGER)

    async def _get_ours(self, resource: Resource, obj: Obj) -> Obj:
        """Read the existing object with the name of a desired one; raises NotOurs unless it has the same owner."""
        metadata = obj["metadata"]
        existing = await self._client.get(resource, metadata["name"], metadata.get("namespace"))
        _require_ours(resource, existing, obj)
        return existing

    async def _delete_all(self, refs: Sequence[Ref]) -> None:
        refused: list[ApiError] = []
        for ref in refs:
            try:
                await self._delete(ref)
            except ApiError as error:  # one that is refused keeps no other object alive
                refused.append(error)
        if refused:
            raise refused[0]

    async def _delete(self, ref: Ref) -> None:
        try:
            await self._writer.delete(ref.resource, ref.name, ref.namespace or None, uid=ref.uid)
        except (NotFound, Conflict) as error:
            # A successor that has the name is a conflict, but a webhook may refuse by the same status.
            if isinstance(error, Conflict) and await self._exists(ref):
                raise
            self._store.remove(ref.resource, ref.namespace or None, ref.name, uid=ref.uid)

    async def _exists(self, ref: Ref) -> bool:
        try:
            found = await self._client.get(ref.resource, ref.name, ref.namespace or None)
        except NotFound:
            return False
        return bool(found["metadata"]["uid"] == ref.uid)

    def _note_dropped(self, write: Write, sent: Obj, answer: Obj) -> None:
        """Note the fields of a spec that the answer to its write lacks; none, and none is known any more."""
        what, known = (write.resource, object_key(answer)), self._dropped.setdefault(write.writer, {})
        known[what] = [
            f"{path} of {write.resource.kind} {what[1].name}"
            for path in list_dropped(sent.get("spec"), answer.get("spec"), "spec")
        ]

    def _list_dropped(self, writer: tuple[Resource, ObjectKey]) -> list[str]:
        """Return the fields that the API server has not kept, of objects that are there and were made for another."""
        known = self._dropped.pop(writer, {})
        there = {what: lost for what, lost in known.items() if lost and self._find(*what) is not None}
        if there:
            self._dropped[writer] = there
        else:
            self._doubts.pop(writer, None)
        return [path for lost in there.values() for path in lost]

    def _is_doubted(self, writer: tuple[Resource, ObjectKey]) -> bool:
        """Return whether the API server is to be asked again for fields that it has not kept, which is then noted."""
        known, doubt = self._find(*writer), self._doubts.get(writer)
        if known is None or not _lacks_fields(known):
            return False
        if doubt is not None and (self._now() - doubt.asked_at).total_seconds() < DOUBT_SECONDS:
            return False
        self._doubts.pop(writer, None)
        return True

    async def _add_dropped(
        self, plan: Plan, dropped: Sequence[str], decided: Obj, writer: tuple[Resource, ObjectKey]
    ) -> Plan:
        """Return the plan with the condition about fields that the API server has not kept."""
        doubt = self._doubts.get(writer)
        if doubt is None:
            try:
                version = await self._client.get_version()
            except (ApiError, Unreachable) as error:
                version = f"of unknown version ({error})"
            doubt = self._doubts[writer] = _Doubt(self._now(), version)
        message = _describe_dropped(dropped, doubt.version)
        report = _refused(plan, DROPPED, message, decided["metadata"]["generation"])
        events = plan.events if _lacks_fields(decided) else (*plan.events, *report.events)
        left_seconds = DOUBT_SECONDS - (self._now() - doubt.asked_at).total_seconds()
        again = left_seconds if plan.again_seconds is None else min(plan.again_seconds, left_seconds)
        return msgspec.structs.replace(plan, status=report.status, events=events, again_seconds=max(again, 0.0))

    async def _report(self, resource: Resource, key: ObjectKey, plan: Plan) -> None:
        """Write the status and send the Events."""
        observed = self._find(resource, key)
        if observed is None:
            return
        if plan.status is not None:
            await self._write_status(resource, key, observed, plan.status)
        for event in plan.events:
            log.info("event_sent", object=f"{resource.kind} {key}", reason=event.reason, note=event.note)
            await self._recorder.event(observed, event.type, event.reason, event.note, event.action)

    async def _write_labels(self, resource: Resource, key: ObjectKey, labels: Mapping[str, str]) -> float | None:
        """Write the discovery labels; return the seconds until another try, or None: 0 if somebody else wrote them."""
        observed = self._find(resource, key)
        desired = desired_labels(resource, labels, observed) if observed is not None else None
        if desired is None:
            return None
        with self._writing(resource, key, (resource, key)) as write:
            try:
                answer = await self._writer.apply(resource, desired, field_manager=LABEL_MANAGER)
            except (NotFound, Conflict):  # the name belongs to another object by now, which the watch brings
                return None
            except ApiError as error:  # labels help to find an object, and must not hold up anything else
                log.warning("labels_refused", object=f"{resource.kind} {key}", error=str(error))
                return None if isinstance(error, Forbidden) else LABEL_SECONDS
            self._store.put(resource, answer)
            return None if write.seen <= {answer["metadata"]["resourceVersion"]} else 0.0

    async def _write_status(self, resource: Resource, key: ObjectKey, observed: Obj, status: Obj) -> None:
        old = observed.get("status", {}).get("conditions", [])
        status = status | {"conditions": merge_conditions(old, status.get("conditions", []), self._now())}
        try:
            self._store.put(resource, await apply_status(self._writer, resource, observed, status, FIELD_MANAGER))
        except NotFound:
            self._store.remove(resource, key.namespace or None, key.name, uid=observed["metadata"]["uid"])


def _require_ours(resource: Resource, existing: Obj, wanted: Obj) -> None:
    """Raise NotOurs, which names the true owner, unless the existing object has the same owner as the wanted one.

    What a former host of the same name had is ours, too: its grants would stay until the garbage collector, which may
    be minutes late, has deleted them. Applying it replaces the owner reference, which this writer has applied.
    """
    ours, theirs = controller_of(wanted), controller_of(existing)
    if ours is None or (theirs is not None and theirs["uid"] == ours["uid"]):
        return
    metadata = wanted["metadata"]
    what = f"{resource.kind} {'/'.join(filter(None, (metadata.get('namespace'), metadata['name'])))}"
    if theirs is not None and (theirs["kind"], theirs["name"]) == (ours["kind"], ours["name"]):
        if ours["kind"] == METAL_HOSTS.kind:
            return
        mounted = resource == PVCS and "deletionTimestamp" in existing["metadata"]
        wait = (
            "until no pod mounts it: suspend the InferenceServices of the Model" if mounted else "until it is deleted"
        )
        error = NotOurs if mounted else NotDeletedYet
        raise error(f"{what} of a former {ours['kind']} {ours['name']} still exists: waiting {wait}")
    owner = f"belongs to {theirs['kind']} {theirs['name']}" if theirs else "was not made by Pomona"
    raise NotOurs(f"{what} exists and {owner}: delete it, or choose another name for {ours['kind']} {ours['name']}")


def _is_passing(error: ApiError | NotOurs) -> bool:
    """Return whether the next try may well succeed, or no try can succeed and our own credentials are the cause."""
    return isinstance(error, Gone | Unauthorized) or (
        isinstance(error, ApiError) and error.status == HTTPStatus.TOO_MANY_REQUESTS
    )


def _may_pass(error: ApiError | NotOurs) -> bool:
    """Return whether the error counts only if it stays: most conflicts end with the next try, a webhook's does not."""
    return isinstance(error, Conflict) or (
        isinstance(error, ApiError) and error.status >= HTTPStatus.INTERNAL_SERVER_ERROR
    )


def _refusal_reason(error: ApiError | NotOurs) -> str:
    """Return the reason for a condition; a webhook may answer with any text for one."""
    if isinstance(error, ApiError):
        if _REASON.fullmatch(error.reason):
            return error.reason
        return "Refused" if type(error) is ApiError else type(error).__name__
    return type(error).__name__


def _describe_refusal(error: Exception) -> str:
    """Return the words of the API server; with the way out if it has asked a webhook that does not answer."""
    if (found := _UNANSWERED_WEBHOOK.search(str(error))) is None:
        return str(error)
    return (
        f"{error}; let webhook {found[1]} answer again, or delete its configuration, one of those in: "
        "kubectl get validatingwebhookconfigurations,mutatingwebhookconfigurations"
    )


def _has_more_writes(plan: Plan, earlier: Plan) -> bool:
    """Return whether a plan has a write that was not in the earlier one, which has just been executed."""
    created = {(resource, obj["metadata"]["name"]) for resource, obj in earlier.create}
    return (
        any((resource, obj["metadata"]["name"]) not in created for resource, obj in plan.create)
        or any(each not in earlier.apply for each in plan.apply)
        or any(each not in earlier.patch for each in plan.patch)
        or any(each not in earlier.delete for each in plan.delete)
    )


def _ignore(_resource: Resource, _answer: Obj) -> None:
    """Do nothing."""


def _lacks_fields(obj: Obj) -> bool:
    """Return whether the status of an object says that the API server has dropped fields of what was made for it."""
    conditions = (obj.get("status") or {}).get("conditions") or ()
    return any(condition["type"] == RECONCILED and condition.get("reason") == DROPPED for condition in conditions)


def _describe_dropped(dropped: Sequence[str], version: str) -> str:
    more = f" and {len(dropped) - _MOST_NAMED} more" if len(dropped) > _MOST_NAMED else ""
    named = ", ".join(dropped[:_MOST_NAMED]) + more
    way_out = "upgrade Kubernetes, switch the feature on, or leave out the option that needs it"
    if any(map(_IMAGE_VOLUME.search, dropped)):
        way_out = (
            "spec.cache.medium Image needs image volumes, which Kubernetes has since 1.35, and before only with the "
            "feature gate ImageVolume: make a Model with spec.cache.medium Volume, or upgrade Kubernetes"
        )
    return f"the API server {version} has dropped {named}: {way_out}"


def _refused(plan: Plan, reason: str, message: str, generation: int) -> Plan:
    """Return status and Events that report the refusal of a plan; the next plan that succeeds leaves them out.

    If the plan has no status, neither has the result: another writer may own it, as the agent owns a MetalProcess's.
    """
    report = Plan(events=(Event("Warning", reason, message[:MESSAGE_LENGTH], "Reconcile"),))
    if plan.status is None:
        return report
    status = plan.status
    conditions = {each["type"]: each for each in status.get("conditions", [])}
    kinds = [RECONCILED]
    # Without a phase, Ready does not report our writes: a host's Ready is its liveness, on which rollouts depend.
    waiting = [kind for kind in ("Ready", *plan.waiting) if conditions.get(kind, {}).get("status") == "False"]
    if "phase" in status and waiting:
        phase = "Pending" if reason == NotDeletedYet.__name__ else "Failed"
        status, kinds = status | {"phase": phase}, [*waiting, RECONCILED]
    for kind in kinds:
        conditions[kind] = condition(kind, true=False, reason=reason, message=message, generation=generation)
    return msgspec.structs.replace(report, status=status | {"conditions": [*conditions.values()]})
