"""Ready and the phase: each rule is reached, and has this text."""

from typing import Any

import pytest

from controller.services.preconditions import ServiceProblem
from controller.services.status import ReadyInputs, build_ready_condition, pick_phase
from runtimes.probe import ProbeResult

OK = ProbeResult(ok=True, reason="Generated", message="a host generated a token")
REFUSED = ProbeResult(ok=False, reason="Unauthorized", message="a host answered 401")
PROBLEM = ServiceProblem("NoHostFits", "1 of 2 replicas are ready: a replica needs 2 GiB", "Pending")
WAS_READY: dict[str, Any] = {
    "was_ready": True,
    "last_generation": 3,
    "last_reason": "Serving",
    "last_message": "generated a token",
}

FOREIGN = (
    "the EndpointSlices of the Service name 10.6.6.6, which is the address of no replica and is not sent the token: "
    "delete the slice, or wait until the replica reports this address"
)
READY_ROWS = {
    "suspended": (
        ReadyInputs(suspended=True, wanted=0, probe=OK, problem=PROBLEM, generation=3, **WAS_READY),
        ("False", "Suspended", "spec.suspend is true: set it to false to serve again", 3),
    ),
    "scaled to zero": (
        ReadyInputs(wanted=0, probe=OK, problem=PROBLEM, generation=3, **WAS_READY),
        ("False", "ScaledToZero", "spec.replicas is 0: set it to 1 or more to serve again", 3),
    ),
    "serves, with a problem": (
        ReadyInputs(probe=OK, problem=PROBLEM, generation=4, **WAS_READY),
        (
            "True",
            "Serving",
            "a host generated a token; 1 of 2 replicas are ready: a replica needs 2 GiB",
            4,
        ),
    ),
    "serves": (
        ReadyInputs(probe=OK, generation=4, **WAS_READY),
        ("True", "Serving", "a host generated a token", 4),
    ),
    "probe failed": (
        ReadyInputs(probe=REFUSED, problem=PROBLEM, generation=3, **WAS_READY),
        ("False", "Unauthorized", "a host answered 401", 3),
    ),
    "serves as before": (
        ReadyInputs(generation=3, **WAS_READY),
        ("True", "Serving", "generated a token", 3),
    ),
    "still serving, being probed": (
        ReadyInputs(can_be_probed=True, generation=4, **WAS_READY),
        ("True", "Probing", "still serving; waiting for the replicas to generate a first token", 3),
    ),
    "still serving an earlier spec": (
        ReadyInputs(problem=PROBLEM, generation=4, **WAS_READY),
        (
            "True",
            "NoHostFits",
            "still serving; the latest spec is not rolled out yet: 1 of 2 replicas are ready: a replica needs 2 GiB",
            3,
        ),
    ),
    "still serving, with a problem": (
        ReadyInputs(problem=PROBLEM, generation=3, **WAS_READY),
        ("True", "NoHostFits", "still serving; 1 of 2 replicas are ready: a replica needs 2 GiB", 3),
    ),
    "not serving": (
        ReadyInputs(problem=PROBLEM, can_be_probed=True, generation=3),
        ("False", "NoHostFits", "1 of 2 replicas are ready: a replica needs 2 GiB", 3),
    ),
    "being probed": (
        ReadyInputs(can_be_probed=True, generation=3),
        ("False", "Probing", "replicas are ready; waiting for them to generate a first token", 3),
    ),
    "foreign endpoints": (
        ReadyInputs(foreign="10.6.6.6", generation=3),
        (
            "False",
            "ForeignEndpoints",
            FOREIGN,
            3,
        ),
    ),
    "no endpoints": (
        ReadyInputs(generation=3),
        ("False", "NoEndpoints", "replicas are ready; waiting for them in the EndpointSlices of the Service", 3),
    ),
}

PHASE_ROWS = {
    "nothing is wanted": (ReadyInputs(wanted=0, problem=PROBLEM), "Suspended"),
    "serves the latest spec": (ReadyInputs(probe=OK), "Ready"),
    "serves an earlier spec": (ReadyInputs(generation=4, **WAS_READY), "Progressing"),
    "serves, with a problem": (ReadyInputs(probe=OK, problem=PROBLEM, ready_replicas=1), "Degraded"),
    "still serves while an edit is rolled out": (
        ReadyInputs(problem=PROBLEM, generation=4, **WAS_READY),
        "Progressing",
    ),
    "does not serve": (ReadyInputs(problem=PROBLEM), "Pending"),
    "is about to serve": (ReadyInputs(can_be_probed=True), "Progressing"),
}


@pytest.mark.parametrize("name", READY_ROWS)
def test_each_row_of_ready(name: str) -> None:
    inputs, expected = READY_ROWS[name]
    made = build_ready_condition(inputs)
    assert (made["status"], made["reason"], made["message"], made["observedGeneration"]) == expected


@pytest.mark.parametrize("name", PHASE_ROWS)
def test_each_row_of_the_phase(name: str) -> None:
    inputs, phase = PHASE_ROWS[name]
    assert pick_phase(inputs, build_ready_condition(inputs)) == phase


def test_a_blocked_service_without_ready_replicas_is_degraded_while_it_still_serves() -> None:
    inputs = ReadyInputs(problem=PROBLEM, blocked=True, generation=4, **WAS_READY)
    assert pick_phase(inputs, build_ready_condition(inputs)) == "Degraded"
