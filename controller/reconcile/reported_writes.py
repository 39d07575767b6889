"""Writes that the API server refuses, or of which it keeps a part only: the condition Reconciled of an object.

A lasting refusal (a quota, a webhook, a name that is taken) becomes a condition and an Event because the owner of the
object reads conditions and not the controller's log. Fields that are not kept are of a later version, or behind a
feature that is off: the API server is asked again now and then.
"""

import re
from collections.abc import Callable, Sequence
from datetime import datetime
from http import HTTPStatus
from typing import Final, NamedTuple

import msgspec

from controller.reconcile.conditions import MESSAGE_LENGTH, condition
from controller.reconcile.plan import Event, Plan
from kube.client import Client, Obj
from kube.comparison import list_dropped
from kube.errors import ApiError, Conflict, Gone, NotDeletedYet, NotOurs, Unauthorized, Unreachable
from kube.resources import ObjectKey, Resource, object_key
from kube.store import Store

RECONCILED: Final = "Reconciled"
"""Condition of an object whose writes the API server refuses, or does not keep; absent otherwise."""
FAILING_SECONDS: Final = 5.0
"""A server error is reported when it lasts this long: a server that restarts refuses every write for a moment."""
REPORT_SECONDS: Final = 60.0
"""A refusal whose words change is reported at most this often: each report enqueues the object again."""
_UNANSWERED_WEBHOOK: Final = re.compile(r'failed calling webhook "([^"]+)"')
_REASON: Final = re.compile(r"[A-Za-z]([A-Za-z0-9_,:]{0,250}[A-Za-z0-9_])?")
DROPPED: Final = "FieldsDropped"
"""Reason of an object of which the API server has not kept all that was sent."""
DOUBT_SECONDS: Final = 300.0
"""Pause between two questions whether it keeps the fields by now: each is a write of all objects made for one."""
Reconciled = tuple[Resource, ObjectKey]
"""The object that is reconciled, for which others are written."""
_MOST_NAMED: Final = 4
_IMAGE_VOLUME: Final = re.compile(r"\.volumes\[[^\]]*\]\.image\b")


class WriteRefusal(NamedTuple):
    """The refusal of the last plan of an object, and of all its plans since `since`."""

    uid: str
    generation: int
    reason: str
    since: datetime
    reported_at: datetime | None
    reported: frozenset[tuple[str, str, str]] = frozenset()
    """Type, status and reason of each condition that was reported with it."""


class WriteRefusals:
    """The refusals of the last plans, by object."""

    def __init__(self, now: Callable[[], datetime]) -> None:
        self._now = now
        self._refusals: dict[Reconciled, WriteRefusal] = {}

    def forget(self, resource: Resource, key: ObjectKey) -> None:
        """Forget the refusal of an object whose plan was written."""
        self._refusals.pop((resource, key), None)

    def find_report(self, resource: Resource, decided: Obj, plan: Plan, error: ApiError | NotOurs) -> Plan | None:
        """Remember a refusal of the plan of `decided`, and return its report if one is due: the status, and an Event.

        A report is due when a condition changes, and else every `REPORT_SECONDS`. A conflict or server error is only
        reported once it has lasted for `FAILING_SECONDS`; the Event is sent once for each refusal. If a read was
        refused on which the plan depends, the plan is empty and the report is the Event alone.
        """
        if _is_never_reported(error):
            return None
        now, reason, key = self._now(), _refusal_reason(error), object_key(decided)
        uid, generation = decided["metadata"]["uid"], decided["metadata"]["generation"]

        # 1. Find since when this is refused. The time starts anew after an edit, whose user waits for an answer.
        refusal = self._refusals.get((resource, key))
        if refusal is None or (refusal.uid, refusal.generation, refusal.reason) != (uid, generation, reason):
            refusal = WriteRefusal(uid=uid, generation=generation, reason=reason, since=now, reported_at=None)
        self._refusals[resource, key] = refusal
        is_lasting = not _is_reported_if_it_lasts(error) or (now - refusal.since).total_seconds() >= FAILING_SECONDS

        # 2. Compare the report with the last one. Other conditions that have changed are reported with the refusal;
        # messages are not compared.
        report = report_refusal(plan, reason, _describe_refusal(error), generation)
        conditions = (report.status or {}).get("conditions", ())
        reported = frozenset((condition["type"], condition["status"], condition["reason"]) for condition in conditions)
        may_report_again = refusal.reported_at is None or (now - refusal.reported_at).total_seconds() >= REPORT_SECONDS
        is_due = is_lasting and (may_report_again or reported != refusal.reported)
        if not is_due:
            return None

        # 3. Remember the report; the Event is sent with the first one only.
        if refusal.reported_at is not None:
            report = msgspec.structs.replace(report, events=())
        self._refusals[resource, key] = refusal._replace(reported_at=now, reported=reported)
        return report


def _is_never_reported(error: ApiError | NotOurs) -> bool:
    """Return whether an error is no refusal: the next try may succeed, or our own credentials are the cause."""
    return isinstance(error, Gone | Unauthorized) or (
        isinstance(error, ApiError) and error.status == HTTPStatus.TOO_MANY_REQUESTS
    )


def _is_reported_if_it_lasts(error: ApiError | NotOurs) -> bool:
    """Return whether an error is a refusal only if it lasts: the next try ends most conflicts, but not a webhook's."""
    return isinstance(error, Conflict) or (
        isinstance(error, ApiError) and error.status >= HTTPStatus.INTERNAL_SERVER_ERROR
    )


def _refusal_reason(error: ApiError | NotOurs) -> str:
    """Return the reason for a condition: that of the error if it is a valid one, which a webhook need not state."""
    if isinstance(error, ApiError):
        if _REASON.fullmatch(error.reason):
            return error.reason
        return "Refused" if type(error) is ApiError else type(error).__name__
    return type(error).__name__


def _describe_refusal(error: Exception) -> str:
    """Return the words of the API server, and the way out if one of its webhooks does not answer."""
    if (match := _UNANSWERED_WEBHOOK.search(str(error))) is None:
        return str(error)
    return (
        f"{error}; let webhook {match[1]} answer again, or delete its configuration, one of those in: "
        "kubectl get validatingwebhookconfigurations,mutatingwebhookconfigurations"
    )


def report_refusal(plan: Plan, reason: str, message: str, generation: int) -> Plan:
    """Return the status of a plan with the refusal of its writes as condition Reconciled, and an Event about it.

    If the status has a phase, Ready, and each condition that waits for these writes, gets the refusal as its reason if
    it is False. The next plan that succeeds leaves all of that out. If the plan has no status, neither has the result:
    another writer may own it, as the agent owns a MetalProcess's.
    """
    report = Plan(events=(Event("Warning", reason, message[:MESSAGE_LENGTH], "Reconcile"),))
    if plan.status is None:
        return report

    # 1. The conditions that get the refusal as their reason: Reconciled, and those that wait for these writes.
    status = plan.status
    conditions = {condition["type"]: condition for condition in status.get("conditions", [])}
    kinds = [RECONCILED]
    # Without a phase, Ready does not report our writes: a host's Ready is its liveness, on which rollouts depend.
    waiting = [kind for kind in ("Ready", *plan.waiting) if conditions.get(kind, {}).get("status") == "False"]
    if "phase" in status and waiting:
        phase = "Pending" if reason == NotDeletedYet.__name__ else "Failed"
        status, kinds = status | {"phase": phase}, [*waiting, RECONCILED]

    # 2. Replace these conditions, or add them.
    for kind in kinds:
        conditions[kind] = condition(kind, true=False, reason=reason, message=message, generation=generation)
    return msgspec.structs.replace(report, status=status | {"conditions": [*conditions.values()]})


class DroppedFields:
    """The fields that are missing, and what the API server has answered about them."""

    def __init__(self, client: Client, store: Store, now: Callable[[], datetime]) -> None:
        """Begin with no field known to be dropped; conditions of objects tell which to ask about again."""
        self._client = client
        self._store = store
        self._now = now
        self._dropped: dict[Reconciled, dict[tuple[Resource, ObjectKey], list[str]]] = {}
        """The dropped fields, by the object for which they were sent (kind and key), and the one that lacks them."""
        self._answers: dict[Reconciled, tuple[datetime, str]] = {}
        """When the API server last dropped fields, and its version then, by the object for which they were sent."""

    def note(self, writer: Reconciled, resource: Resource, sent: Obj, answer: Obj) -> None:
        """Note the fields of a spec that the answer to its write lacks, in place of those noted before."""
        key, dropped = object_key(answer), self._dropped.setdefault(writer, {})
        dropped[resource, key] = [
            f"{path} of {resource.kind} {key.name}"
            for path in list_dropped(sent.get("spec"), answer.get("spec"), "spec")
        ]

    def list_missing(self, writer: Reconciled) -> list[str]:
        """Return the fields that the API server has dropped from existing objects that were written for `writer`.

        Objects that are gone are forgotten; if no dropped field is left, so is the time of the API server's last answer
        (`_answers`).
        """
        dropped = self._dropped.pop(writer, {})
        existing = {child: paths for child, paths in dropped.items() if paths and self._find(child) is not None}
        if existing:
            self._dropped[writer] = existing
        else:
            self._answers.pop(writer, None)
        return [path for paths in existing.values() for path in paths]

    def must_apply_again(self, writer: Reconciled) -> bool:
        """Return whether all objects of `writer` are to be applied again, as the API server may keep the fields by now.

        That is every `DOUBT_SECONDS` while the condition of `writer` says that fields were dropped. If so, the time of
        the last answer is forgotten, so that `add_condition` notes that of the next one.
        """
        current, answer = self._find(writer), self._answers.get(writer)
        # Without the condition, there is nothing to try again.
        if current is None or not _lacks_fields(current):
            return False
        if answer is not None:
            answered_at, _version = answer
            if (self._now() - answered_at).total_seconds() < DOUBT_SECONDS:
                return False
        self._answers.pop(writer, None)
        return True

    async def add_condition(self, plan: Plan, dropped: Sequence[str], decided: Obj, writer: Reconciled) -> Plan:
        """Return the plan of `writer` with a condition about the `dropped` fields, due again when they are to be sent.

        `decided` is the object of `writer` as it was: without the condition yet, it gets an Event, too. The version of
        the API server is read for the message, once for each time that the fields are sent.
        """
        # When the fields were last dropped, and by which version.
        if writer not in self._answers:
            try:
                version = await self._client.get_version()
            except (ApiError, Unreachable) as error:
                version = f"of unknown version ({error})"
            self._answers[writer] = self._now(), version
        asked_at, version = self._answers[writer]

        # The condition, and an Event if the object does not have the condition yet.
        message = _describe_dropped(dropped, version)
        report = report_refusal(plan, DROPPED, message, decided["metadata"]["generation"])
        events = plan.events if _lacks_fields(decided) else (*plan.events, *report.events)

        # The seconds until the fields are sent again.
        again = DOUBT_SECONDS - (self._now() - asked_at).total_seconds()
        if plan.again_seconds is not None:
            again = min(again, plan.again_seconds)
        return msgspec.structs.replace(plan, status=report.status, events=events, again_seconds=max(again, 0.0))

    def _find(self, reconciled: Reconciled) -> Obj | None:
        resource, key = reconciled
        return self._store.get(resource, key.name, key.namespace or None)


def _lacks_fields(obj: Obj) -> bool:
    """Return whether the status of an object says that the API server has dropped fields of what was made for it."""
    conditions = (obj.get("status") or {}).get("conditions") or ()
    return any(condition["type"] == RECONCILED and condition.get("reason") == DROPPED for condition in conditions)


def _describe_dropped(dropped: Sequence[str], version: str) -> str:
    """Return in words which fields the API server of this version has dropped, and the way out."""
    more = f" and {len(dropped) - _MOST_NAMED} more" if len(dropped) > _MOST_NAMED else ""
    named = ", ".join(dropped[:_MOST_NAMED]) + more
    way_out = "upgrade Kubernetes, switch the feature on, or leave out the option that needs it"
    if any(map(_IMAGE_VOLUME.search, dropped)):
        way_out = (
            "spec.cache.medium Image needs image volumes, which Kubernetes has since 1.35, and before only with the "
            "feature gate ImageVolume: make a Model with spec.cache.medium Volume, or upgrade Kubernetes"
        )
    return f"the API server {version} has dropped {named}: {way_out}"
