"""Refusals of writes by the API server, which become a condition and an Event of the object that was reconciled.

A lasting refusal (a quota, a webhook, a name that is taken) is a condition because the owner of the object reads
conditions and not the controller's log.
"""

import re
from collections.abc import Callable
from datetime import datetime
from http import HTTPStatus
from typing import Final, NamedTuple

import msgspec

from controller.reconcile.conditions import MESSAGE_LENGTH, condition
from controller.reconcile.plan import Event, Plan
from kube.client import Obj
from kube.errors import ApiError, Conflict, Gone, NotDeletedYet, NotOurs, Unauthorized
from kube.resources import ObjectKey, Resource, object_key

RECONCILED: Final = "Reconciled"
"""Condition of an object whose writes the API server refuses, or does not keep; absent otherwise."""
FAILING_SECONDS: Final = 5.0
"""A server error is reported when it lasts this long: a server that restarts refuses every write for a moment."""
REPORT_SECONDS: Final = 60.0
"""A refusal whose words change is reported at most this often: each report enqueues the object again."""
_UNANSWERED_WEBHOOK: Final = re.compile(r'failed calling webhook "([^"]+)"')
_REASON: Final = re.compile(r"[A-Za-z]([A-Za-z0-9_,:]{0,250}[A-Za-z0-9_])?")


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
        self._refusals: dict[tuple[Resource, ObjectKey], WriteRefusal] = {}

    def forget(self, resource: Resource, key: ObjectKey) -> None:
        """Forget the refusal of an object whose plan was written."""
        self._refusals.pop((resource, key), None)

    def find_report(self, resource: Resource, decided: Obj, plan: Plan, error: ApiError | NotOurs) -> Plan | None:
        """Return the report of a lasting refusal: at most one in `REPORT_SECONDS`, the Event when its reason changes.

        A condition that changes meanwhile is reported at once. The plan is empty if a read was refused, on which it
        depends: then there is only the Event.
        """
        if _is_passing(error):
            return None
        now, reason, key = self._now(), _refusal_reason(error), object_key(decided)
        # A user who has edited the object, which may be since this was decided, waits for the answer to this edit.
        identity = decided["metadata"]["uid"], decided["metadata"]["generation"], reason
        last = self._refusals.get((resource, key))
        if last is None or last[:3] != identity:
            last = WriteRefusal(*identity, now, None)
        self._refusals[resource, key] = last
        lasts = not _may_pass(error) or (now - last.since).total_seconds() >= FAILING_SECONDS
        refused = report_refusal(plan, reason, _describe_refusal(error), decided["metadata"]["generation"])
        # What else has changed meanwhile, such as the Model of a service, is no less true for the refusal.
        conditions = (refused.status or {}).get("conditions", ())
        reported = frozenset((condition["type"], condition["status"], condition["reason"]) for condition in conditions)
        is_old = last.reported_at is None or (now - last.reported_at).total_seconds() >= REPORT_SECONDS
        if not lasts or not (is_old or reported != last.reported):
            return None
        if last.reported_at is not None:
            refused = msgspec.structs.replace(refused, events=())
        self._refusals[resource, key] = last._replace(reported_at=now, reported=reported)
        return refused


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


def report_refusal(plan: Plan, reason: str, message: str, generation: int) -> Plan:
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
