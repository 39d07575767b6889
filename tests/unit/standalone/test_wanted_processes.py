"""The processes that should run while services are edited, suspended or wrong."""

from typing import NamedTuple

import pytest

from controller.services.preconditions import Phase, ServiceProblem
from crds.metalprocess import Artifact, MetalProcessSpec
from kube.resources import ObjectKey
from metal_agent.assignments import Assignment
from metal_agent.lifecycle import ProcessState
from metal_agent.memory.ledger import Ledger
from metal_agent.process_events import Held
from standalone.desired import Decision
from standalone.wanted_processes import find_wanted

CHAT = ObjectKey("default", "chat")
READY = ProcessState("Ready", exists=True)


class Process(NamedTuple):
    """A process as the decision sees it."""

    assignment: Assignment
    state: ProcessState

    def notify(self, event: object) -> None:
        """Take no event."""


def process(name: str, state: ProcessState = READY, service: str = "chat") -> Process:
    """Return a process of a service that takes one byte."""
    spec = MetalProcessSpec(
        service_name=service,
        model_name="m",
        runtime="llama.cpp",
        artifact=Artifact(source="file:///m.gguf"),
        memory_bytes=1,
        token_secret="t",
    )
    return Process(Assignment(uid=name, namespace="default", name=name, spec=spec), state)


def problem(phase: Phase) -> Decision:
    return Decision(problem=ServiceProblem("Because", "because", phase))


def wanted(decision: Decision | None, *processes: Process, free: int = 1, unwanted: bool = False) -> list[str]:
    """Return the names of the processes that should run for the decision of the service `chat`."""
    reserved = {one.assignment.uid: 1 for one in processes if one.state.exists}
    decisions = {CHAT: decision} if decision else {}
    found = find_wanted(decisions, processes, Ledger(free + len(reserved), reserved), lambda _: unwanted)
    return [assignment.name for assignment in found.assignments]


NEW = Decision((process("new").assignment,))


def test_processes_of_the_decision_run_and_others_do_not() -> None:
    assert wanted(NEW) == ["new"]
    assert wanted(None, process("old")) == []
    assert wanted(problem("Suspended"), process("old")) == []


@pytest.mark.parametrize("state", [None, ProcessState("Fetching"), ProcessState("Starting", exists=True)])
def test_old_process_serves_until_the_new_one_does(state: ProcessState | None) -> None:
    started = [process("new", state)] if state else []
    assert wanted(NEW, process("old"), *started) == ["new", "old"]


def test_old_process_ends_when_the_new_one_serves_or_has_no_room_beside_it() -> None:
    assert wanted(NEW, process("old"), process("new")) == ["new"]
    assert wanted(NEW, process("old"), free=0) == ["new"]
    assert wanted(NEW, process("old"), process("new", ProcessState("Rejected", needed_bytes=1))) == ["new"]


def test_old_process_that_does_not_serve_is_not_kept() -> None:
    assert wanted(NEW, process("old", ProcessState("Starting", exists=True))) == ["new"]
    assert wanted(NEW, process("old", ProcessState("Stopping", exists=True))) == ["new"]


@pytest.mark.parametrize("phase", ["Pending", "Failed"])
def test_old_process_serves_on_while_the_new_one_cannot_be_decided(phase: Phase) -> None:
    assert wanted(problem(phase), process("old")) == ["old"]
    assert not find_wanted({CHAT: problem(phase)}, [], Ledger(1), lambda _: False).is_complete
    assert find_wanted({CHAT: NEW}, [], Ledger(1), lambda _: False).is_complete


def test_room_beside_old_processes_is_given_once() -> None:
    code = ObjectKey("default", "code")
    processes = [process("old"), process("old-code", service="code")]
    decisions = {CHAT: NEW, code: Decision((process("new-code", service="code").assignment,))}
    ledger = Ledger(3, {"old": 1, "old-code": 1})
    found = find_wanted(decisions, processes, ledger, lambda _: False)
    assert [assignment.name for assignment in found.assignments] == ["new", "old", "new-code"]


def test_model_on_demand_that_nobody_wants_has_no_process() -> None:
    assert wanted(NEW, process("new"), unwanted=True) == []
    assert wanted(NEW, process("new", ProcessState("Pending", hold=Held("a", "b")))) == ["new"]
