"""`refreshPolicy: OnChange`: check a moving source at an interval, and find out that its revision changed.

A check is another inspection, one at a time. Its facts become those of the Model at once; pods serve the earlier
revision until the new one is verified on a volume of its own.
"""

import hashlib
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Final, NamedTuple

from artifacts.source import SourceError, parse
from controller.models.jobs import JobOutcome, JobProgress
from controller.models.volume import take_answer
from controller.reconcile.conditions import condition, find
from crds.model import Model, ModelFacts
from kube.client import Obj
from kube.time import rfc3339

REFRESHED: Final = "Refreshed"
"""Condition of a Model with refreshPolicy OnChange: the result of the last check of its source."""
UP_TO_DATE: Final = "UpToDate"
_JITTER_SHARE: Final = 10
"""Sources of Models that were created together are checked up to a tenth of the interval later, each by its uid."""
_MOVING_SCHEMES: Final = frozenset({"hf", "http", "https", "oci", "s3"})
"""Schemes whose sources can change, unless they are pinned, and that a Job can check."""


class SourceCheck(NamedTuple):
    """The result of the last check of a source, and the check that is under way or due."""

    facts: ModelFacts
    """The facts of the latest revision that is known."""
    progress: JobProgress
    """The inspection of a check that is under way, or the wait until the next one."""
    last_checked: str = ""
    conditions: Sequence[Obj] = ()


def is_watched(model: Model) -> bool:
    """Return whether the source is checked again: it is asked for, and the revision can change."""
    if model.spec.refresh_policy != "OnChange":
        return False
    source = parse(model.spec.source, model.spec.files)
    return source.scheme in _MOVING_SCHEMES and not source.is_pinned


def is_due(model: Model, now: datetime) -> bool:
    """Return whether the next decision checks the source of an inspected Model.

    It does not for the first time: without a time of the last check, the decision only notes one (`check_source`).
    """
    try:
        return is_watched(model) and bool(model.status.last_checked) and not wait_seconds(model, now)
    except SourceError:
        return False


def wait_seconds(model: Model, now: datetime) -> float:
    """Return the seconds until the next check of a source that is watched; 0 if it is due or has no time yet."""
    if not model.status.last_checked:
        return 0.0
    interval = model.spec.refresh_interval_seconds
    digest = hashlib.sha256(model.metadata.uid.encode()).digest()
    # Up to a tenth later, by the uid, so that Models that were created together are not all checked at once.
    interval += int.from_bytes(digest[:4]) % (interval // _JITTER_SHARE)
    due = datetime.fromisoformat(model.status.last_checked) + timedelta(seconds=interval)
    # A clock that was wrong may have written a time in the future: the wait is one interval at most.
    return min(max(0.0, (due - now).total_seconds()), float(interval))


def check_source(
    model: Model,
    facts: ModelFacts,
    inspect: Callable[[str], JobProgress],
    now: datetime,
) -> SourceCheck:
    """Return what is known of a watched source, and its check: the wait for it, its Job, or its result.

    `facts` are those of the last check. Without one, the inspection of the Model counts as a check, and the next one is
    due after an interval. If a check finds another revision, its facts replace `facts`. If it fails, the last revision
    stays in use.

    `inspect` returns the progress of the inspection Job of this check. It gets the time of the last check, by which the
    Job is told from those of other checks, so that each check inspects the source once.
    """
    # 1. Until the check is due, the condition of the last one stays.
    last_condition, last_checked = find(model.status.conditions, REFRESHED), model.status.last_checked
    last_conditions = []
    if last_condition is not None:
        reason, message = last_condition.reason, last_condition.message
        is_true = last_condition.status == "True"
        last_conditions.append(_condition(model, true=is_true, reason=reason, message=message))
    if seconds := wait_seconds(model, now):
        return SourceCheck(facts, _await_check(seconds), last_checked, last_conditions)

    # 2. It is due: inspect the source. Without an earlier check, the inspection of the Model counts as this one.
    next_check = _await_check(model.spec.refresh_interval_seconds)
    progress = inspect(last_checked) if last_checked else None
    if progress is None or progress.outcome.state == "Succeeded":
        latest_facts = take_answer(model, progress.outcome.answer) if progress is not None else facts
        reason, message = UP_TO_DATE, f"the source has revision {facts.revision}"
        if latest_facts.revision != facts.revision:
            message = f"the source has revision {latest_facts.revision}, after {facts.revision}"
            reason, facts = "RevisionChanged", latest_facts
        checked = _condition(model, true=True, reason=reason, message=message)
        return SourceCheck(facts, next_check, last_checked=rfc3339(now), conditions=[checked])

    # 3. Without a result yet, nothing changes; a failure is stated in the condition.
    outcome = progress.outcome
    if outcome.state == "Going":
        return SourceCheck(facts, progress, last_checked, last_conditions)

    way_out = "the last revision stays in use, and the source is checked again"
    failed = _condition(model, true=False, reason=outcome.reason, message=f"{outcome.message.rstrip('.')}; {way_out}")
    if outcome.state == "Failed":
        return SourceCheck(facts, next_check, last_checked=rfc3339(now), conditions=[failed])
    # The attempt is retried, so the check is not over.
    return SourceCheck(facts, progress, last_checked, conditions=[failed])


def _await_check(seconds: float) -> JobProgress:
    """Return the progress of a check that is due after some seconds."""
    return JobProgress(outcome=JobOutcome(state="Succeeded"), again_seconds=seconds)


def _condition(model: Model, *, true: bool, reason: str, message: str) -> Obj:
    return condition(REFRESHED, true=true, reason=reason, message=message, generation=model.metadata.generation)
