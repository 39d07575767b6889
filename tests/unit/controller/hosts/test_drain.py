"""The condition Drained: what is left on a drained host, and what holds the drain up."""

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.hosts.drain import WAITING_SECONDS, build_drained_condition, find_recheck_seconds
from controller.hosts.reachability import ReachabilityProber
from controller.hosts.reconciler import HostInputs, LeaseReader, decide_host, host_reconciler
from controller.reconcile.plan import Plan, Snapshot
from controller.services.tokens import KnownTokens
from kube.client import Obj
from kube.resources import METAL_HOSTS, METAL_PROCESSES, ObjectKey
from tests.support.api_objects import NOW, as_host, as_hosted, condition, host, planned_condition, process, store

TRIGGERS = [
    trigger
    for trigger in host_reconciler(LeaseReader(), KnownTokens(), ReachabilityProber()).triggers
    if trigger.resource == METAL_PROCESSES
]
YOUNG = (NOW - timedelta(seconds=WAITING_SECONDS - 1)).isoformat()


def drained_host(*, drain: bool = True) -> Obj:
    return host("studio-1") | {"spec": {"unschedulable": drain, "drain": drain}}


def reconcile(*processes: Obj, drain: bool = True) -> Plan:
    stored = store((METAL_HOSTS, drained_host(drain=drain)), *((METAL_PROCESSES, process) for process in processes))
    return decide_host(Snapshot(stored, NOW, HostInputs("Alive")), ObjectKey("", "studio-1"))


def test_host_that_is_not_drained_has_no_such_condition() -> None:
    assert build_drained_condition(as_host(drained_host(drain=False)), [], {}, NOW) is None
    assert "Drained" not in {planned["type"] for planned in (reconcile(drain=False).status or {})["conditions"]}


@pytest.mark.parametrize(
    "left",
    [
        (),
        (process("chat-1-0", host="studio-1", phase="Stopped"),),
        (process("chat-1-0", host="studio-1", phase="Rejected"),),
        (process("chat-1-0", host="studio-2", phase="Ready"), process("chat-1-1")),
    ],
)
def test_host_without_a_process_is_drained(left: tuple[Obj, ...]) -> None:
    done = reconcile(*left)
    assert planned_condition(done, "Drained")["status"] == "True"
    assert "Drained" in {event.reason for event in done.events}


def test_drain_waits_for_replacements_that_have_a_host_or_are_about_to_get_one() -> None:
    serving = process("chat-1-0", host="studio-1", phase="Ready")
    for replacement in (process("chat-1-1", host="studio-2"), process("chat-1-1", creationTimestamp=YOUNG)):
        done = reconcile(serving, replacement)
        drained = planned_condition(done, "Drained")
        assert (drained["status"], drained["reason"]) == ("False", "Draining")
        assert drained["message"].startswith("1 process is still on this host: team/chat (")
        assert "Draining" not in {event.reason for event in done.events}, "normal progress"
        assert done.again_seconds is not None
        assert done.again_seconds <= WAITING_SECONDS


def test_drain_is_blocked_by_what_fits_on_no_other_host_and_names_it() -> None:
    done = reconcile(process("chat-1-0", host="studio-1", phase="Ready", gib=7), process("chat-1-1", gib=7))
    drained = planned_condition(done, "Drained")
    assert (drained["status"], drained["reason"]) == ("False", "DrainBlocked")
    assert "team/chat (7.0 GiB)" in drained["message"]
    assert "serve on" in drained["message"]
    assert "DrainBlocked" in {event.reason for event in done.events}


def test_drain_is_blocked_by_what_gets_no_replacement_at_all() -> None:
    serving = process("chat-1-0", host="studio-1", phase="Ready", gib=7)
    assert planned_condition(reconcile(serving), "Drained")["reason"] == "Draining", "it is about to be created"
    later = NOW + timedelta(seconds=WAITING_SECONDS)
    observed = drained_host()
    observed["status"]["conditions"].append(
        condition("Drained", "False", "Draining") | {"lastTransitionTime": NOW.isoformat()}
    )
    stored = store((METAL_HOSTS, observed), (METAL_PROCESSES, serving))
    for now, reason in ((NOW, "Draining"), (later, "DrainBlocked")):
        done = decide_host(Snapshot(stored, now, HostInputs("Alive")), ObjectKey("", "studio-1"))
        assert planned_condition(done, "Drained")["reason"] == reason


@pytest.mark.parametrize("stated", ["2026-01-01T00:00:00+99:99", "2026-02-31T00:00:00Z", "2026-01-01t00:00:00z"])
def test_stolen_host_does_not_hold_up_its_drain_by_a_time_that_is_none(stated: str) -> None:
    """The schema's date-time takes all of these; a host writes the status of its own MetalHost."""
    observed = drained_host()
    observed["status"]["conditions"].append(condition("Drained", "False", "Draining") | {"lastTransitionTime": stated})
    stored = store((METAL_HOSTS, observed), (METAL_PROCESSES, process("chat-1-0", host="studio-1", phase="Ready")))
    done = decide_host(Snapshot(stored, NOW, HostInputs("Alive")), ObjectKey("", "studio-1"))
    assert planned_condition(done, "Drained")["reason"] == "DrainBlocked"


def test_drain_names_what_has_a_replacement_that_does_not_start() -> None:
    serving = process("chat-1-0", host="studio-1", phase="Ready", gib=7)
    failing = planned_condition(reconcile(serving, process("chat-1-1", host="studio-2", phase="Failed")), "Drained")
    assert failing["reason"] == "Draining", "it may start after all, and changes from try to try"
    assert "the replacement of team/chat (7.0 GiB) does not start" in failing["message"]
    starting = planned_condition(reconcile(serving, process("chat-1-1", host="studio-2", phase="Starting")), "Drained")
    assert "does not start" not in starting["message"]


def test_process_that_is_being_stopped_holds_nothing_up() -> None:
    leaving = process("chat-1-0", host="studio-1", phase="Stopping", deletionTimestamp="2026-11-21T12:00:00Z")
    assert planned_condition(reconcile(leaving, process("chat-1-1")), "Drained")["reason"] == "Draining"


def test_drain_that_is_held_up_is_rechecked_only_after_a_change() -> None:
    observed = drained_host()
    observed["status"]["conditions"].append(
        condition("Drained", "False", "DrainBlocked") | {"lastTransitionTime": "2026-11-21T00:00:00Z"}
    )
    serving = process("chat-1-0", host="studio-1", phase="Ready")
    for replacement, is_soon in ((process("chat-1-1"), False), (process("chat-1-1", creationTimestamp=YOUNG), True)):
        stored = store((METAL_HOSTS, observed), (METAL_PROCESSES, serving), (METAL_PROCESSES, replacement))
        done = decide_host(Snapshot(stored, NOW, HostInputs("Alive")), ObjectKey("", "studio-1"))
        assert done.again_seconds is not None
        assert (done.again_seconds <= 1) == is_soon
        assert is_soon or done.again_seconds > 1


AGES = st.sampled_from([-3.0, 0.0, 1.0, 4.0, 5.0, 30.0, 58.0, 70.0])
"""Seconds since a creation, by the controller's clock, which may be slow."""


@given(
    siblings=st.lists(st.tuples(st.sampled_from([None, "studio-2"]), AGES), max_size=3),
    written=st.none() | AGES,
)
def test_drain_that_time_alone_holds_up_is_decided_again_in_time(
    siblings: list[tuple[str | None, float]], written: float | None
) -> None:
    def since(seconds: float) -> str:
        return (NOW - timedelta(seconds=seconds)).isoformat()

    observed = drained_host()
    if written is not None:
        last = condition("Drained", "False", "Draining") | {"lastTransitionTime": since(written)}
        observed["status"]["conditions"].append(last)
    left = as_hosted(process("chat-1-0", host="studio-1", phase="Ready"))
    others = as_hosted(
        *(
            process(f"chat-1-{number}", host=name, creationTimestamp=since(age))
            for number, (name, age) in enumerate(siblings, 1)
        )
    )
    arguments = as_host(observed), left, {"uid-chat": others}

    def reason(later: float) -> str:
        drained = build_drained_condition(*arguments, NOW + timedelta(seconds=later))
        assert drained is not None
        return str(drained["reason"])

    at = 0.0
    while at < 2 * WAITING_SECONDS and (pause := find_recheck_seconds(*arguments, NOW + timedelta(seconds=at))):
        assert {reason(at + part * pause) for part in (0.25, 0.5, 0.99)} == {reason(at)}, "it changed before"
        at += pause
    if written is not None:
        assert reason(at + 2 * WAITING_SECONDS) == reason(at), "it changed afterwards"


def test_host_is_drained_by_the_changes_of_its_processes_and_of_their_siblings() -> None:
    serving = process("chat-1-0", host="studio-1", phase="Ready")
    waiting, bound = process("chat-1-1"), process("chat-1-1", host="studio-2")
    stopped = process("chat-1-0", host="studio-1", phase="Stopped")
    starting = process("chat-1-1", host="studio-2", phase="Starting")

    def enqueue(old: Obj | None, new: Obj | None, *, drain: bool = True) -> set[ObjectKey]:
        changed = new or old
        assert changed
        stored = store((METAL_HOSTS, drained_host(drain=drain)), (METAL_PROCESSES, serving), (METAL_PROCESSES, changed))
        return {key for trigger in TRIGGERS if trigger.concerns(old, new) for key in trigger.keys(stored, changed)}

    drained = ObjectKey("", "studio-1")
    failed = process("chat-1-1", host="studio-2", phase="Failed")
    for old, new in ((None, waiting), (waiting, None), (waiting, bound), (serving, stopped), (starting, failed)):
        assert drained in enqueue(old, new)
        assert drained not in enqueue(old, new, drain=False)
    assert not enqueue(bound, starting), "its phase decides nothing"
