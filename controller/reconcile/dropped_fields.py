"""Fields that the API server has not kept of what was sent: of a later version, or behind a feature that is off.

The object for which they were sent says so in its condition Reconciled. The API server is asked again now and then.
"""

import re
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Final, NamedTuple

import msgspec

from controller.reconcile.plan import Plan
from controller.reconcile.write_refusals import RECONCILED, report_refusal
from kube.client import Client, Obj
from kube.comparison import list_dropped
from kube.errors import ApiError, Unreachable
from kube.resources import ObjectKey, Resource, object_key
from kube.store import Store

DROPPED: Final = "FieldsDropped"
"""Reason of an object of which the API server has not kept all that was sent."""
DOUBT_SECONDS: Final = 300.0
"""Pause between two questions whether it keeps the fields by now: each is a write of all objects made for one."""
Reconciled = tuple[Resource, ObjectKey]
"""The object that is reconciled, for which others are written."""
_MOST_NAMED: Final = 4
_IMAGE_VOLUME: Final = re.compile(r"\.volumes\[[^\]]*\]\.image\b")


class _Doubt(NamedTuple):
    """The API server's last answer without fields that were sent for an object."""

    asked_at: datetime
    version: str


class DroppedFields:
    """The fields that are missing, and what the API server has answered about them."""

    def __init__(self, client: Client, store: Store, now: Callable[[], datetime]) -> None:
        self._client = client
        self._store = store
        self._now = now
        self._dropped: dict[Reconciled, dict[tuple[Resource, ObjectKey], list[str]]] = {}
        """By the object for which they were sent, and the one that lacks them."""
        self._doubts: dict[Reconciled, _Doubt] = {}
        """By the object for which they were sent."""

    def note(self, writer: Reconciled, resource: Resource, sent: Obj, answer: Obj) -> None:
        """Note the fields of a spec that the answer to its write lacks; none, and none is known any more."""
        key, known = object_key(answer), self._dropped.setdefault(writer, {})
        known[resource, key] = [
            f"{path} of {resource.kind} {key.name}"
            for path in list_dropped(sent.get("spec"), answer.get("spec"), "spec")
        ]

    def list_missing(self, writer: Reconciled) -> list[str]:
        """Return the fields that the API server has not kept, of objects that are there and were made for another."""
        known = self._dropped.pop(writer, {})
        there = {what: lost for what, lost in known.items() if lost and self._find(what) is not None}
        if there:
            self._dropped[writer] = there
        else:
            self._doubts.pop(writer, None)
        return [path for lost in there.values() for path in lost]

    def is_doubted(self, writer: Reconciled) -> bool:
        """Return whether the API server is to be asked again for fields that it has not kept, which is then noted."""
        known, doubt = self._find(writer), self._doubts.get(writer)
        if known is None or not _lacks_fields(known):
            return False
        if doubt is not None and (self._now() - doubt.asked_at).total_seconds() < DOUBT_SECONDS:
            return False
        self._doubts.pop(writer, None)
        return True

    async def add_condition(self, plan: Plan, dropped: Sequence[str], decided: Obj, writer: Reconciled) -> Plan:
        """Return the plan with the condition about fields that the API server has not kept."""
        doubt = self._doubts.get(writer)
        if doubt is None:
            try:
                version = await self._client.get_version()
            except (ApiError, Unreachable) as error:
                version = f"of unknown version ({error})"
            doubt = self._doubts[writer] = _Doubt(self._now(), version)
        message = _describe_dropped(dropped, doubt.version)
        report = report_refusal(plan, DROPPED, message, decided["metadata"]["generation"])
        events = plan.events if _lacks_fields(decided) else (*plan.events, *report.events)
        left_seconds = DOUBT_SECONDS - (self._now() - doubt.asked_at).total_seconds()
        again = left_seconds if plan.again_seconds is None else min(plan.again_seconds, left_seconds)
        return msgspec.structs.replace(plan, status=report.status, events=events, again_seconds=max(again, 0.0))

    def _find(self, reconciled: Reconciled) -> Obj | None:
        resource, key = reconciled
        return self._store.get(resource, key.name, key.namespace or None)


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
