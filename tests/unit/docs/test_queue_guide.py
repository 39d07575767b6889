"""The guide to the queue has each reason why a service waits, in the words that the service shows."""

import re
from typing import get_args

import pytest

from controller.placement.admission import LATE_WRITE_SECONDS
from controller.placement.admission_writer import EVICTION_PATIENCE_SECONDS
from controller.placement.choice import BETTER_SECONDS, SETTLE_SECONDS
from controller.placement.kueue import READ_SECONDS
from controller.placement.planner import CONSIDERED, MIN_RUN_SECONDS
from controller.placement.pod_units import MOST_IN_GANG
from controller.placement.pool_limits import DEVICES, LimitKey, LimitRefusal
from controller.placement.refusals import REFUSALS
from controller.placement.standing import CellCounts, WaitFacts, describe_wait
from controller.placement.start_estimate import LEAST_ERRORS, LEAST_RELEASES, MEMORY_SECONDS
from controller.placement.units import Unit
from controller.placement.unscheduled_pods import PINNED_SECONDS, UNPINNED_SECONDS
from crds.queue_status import NoEstimate, QueueReason
from tests.controlplane.process import CHECKOUT
from tests.support.waiting_units import GPU, gpu_cell, waiting_process, waiting_unit

GUIDE = (CHECKOUT / "docs" / "queue.md").read_text()
NONE = CellCounts({}, {}, {}, 0)
QUOTA = LimitRefusal(LimitKey("Quota", "team/nvidia", DEVICES), 4, 3, 2)
DENIED = "patch pods team/chat-1: 403 Forbidden: denied by policy"
EXAMPLES: dict[QueueReason, tuple[Unit, WaitFacts]] = {
    "InsufficientDevices": (waiting_unit("chat", 2), WaitFacts(NONE._replace(short={GPU: 3}))),
    "InsufficientMemory": (waiting_process("chat", 24), WaitFacts(NONE._replace(short={"memory": 1}))),
    "HeadOfLine": (waiting_unit("chat"), WaitFacts(NONE._replace(others=1))),
    "Draining": (waiting_unit("chat"), WaitFacts(NONE, cells=("node/gpu-1",), victims=("team/reports",))),
    "Quota": (waiting_unit("chat", 2), WaitFacts(NONE, limit=QUOTA)),
    "CellsClosed": (waiting_unit("chat"), WaitFacts(NONE._replace(closed={"Cordoned": 1}))),
    "NotConsidered": (waiting_unit("chat"), WaitFacts(NONE, ahead=299)),
    "AdmissionFailed": (waiting_unit("chat"), WaitFacts(NONE, error=DENIED)),
    "NoSuchHardware": (waiting_unit("chat", 16), WaitFacts(NONE, largest=gpu_cell("gpu-1", 8))),
}


def read_rows(section: str) -> dict[str, list[str]]:
    """Return the cells of the table of a section by the word in the first one."""
    text = GUIDE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", text, re.MULTILINE)
    return {name: rest.split(" | ") for name, rest in rows}


ROWS = read_rows("Why does my service wait?")


def test_guide_has_each_reason_once() -> None:
    assert sorted(ROWS) == sorted(get_args(QueueReason))


def test_commands_page_has_each_reason_of_a_node_or_host_in_its_words() -> None:
    page = (CHECKOUT / "docs" / "queue-commands.md").read_text()
    rows = [f"| `{reason}` | {refusal.one} |" for reason, refusal in REFUSALS.items()]
    assert "\n| reason | the node or host |\n| --- | --- |\n{}\n\n".format("\n".join(rows)) in page


def test_guide_has_each_reason_without_an_estimate() -> None:
    assert sorted(set(read_rows("The estimated start")) - {"noEstimate"}) == sorted(get_args(NoEstimate))


@pytest.mark.parametrize("reason", get_args(QueueReason))
def test_example_of_a_reason_is_what_a_service_shows(reason: QueueReason) -> None:
    unit, facts = EXAMPLES[reason]
    example, way_out = ROWS[reason]
    assert example == f"`{describe_wait(unit, reason, facts)}`"
    assert way_out


NUMBERS: dict[str, tuple[str, float, float]] = {
    "has run for less than five minutes": ("queue.md", MIN_RUN_SECONDS, 5 * 60),
    "A PodDisruptionBudget holds up the eviction for a minute": ("queue.md", EVICTION_PATIENCE_SECONDS, 60),
    "refused pods of several namespaces there, and it is tried again after a minute": ("queue.md", PINNED_SECONDS, 60),
    "Nothing is admitted during the next 40 seconds": ("queue.md", LATE_WRITE_SECONDS, 40),
    "for the first 256 replicas of a pool": ("queue.md", CONSIDERED, 256),
    "and `inference.pomona.dev/gang-size` with their number, 256 at most": ("queue.md", MOST_IN_GANG, 256),
    "fewer than 5 replicas have ended in the pool": ("queue.md", LEAST_RELEASES, 5),
    "(older ends count less: after four hours, about a third)": ("queue.md", MEMORY_SECONDS, 4 * 3600),
    "(between 10 and 50 are enough)": ("queue.md", LEAST_ERRORS, 50),
    "One that finds no node within 15 minutes": ("pools.md", UNPINNED_SECONDS, 15 * 60),
    "One that has waited for 10 seconds": ("several-accelerators.md", SETTLE_SECONDS, 10),
    "that has had room for 10 minutes without a break": ("several-accelerators.md", BETTER_SECONDS, 10 * 60),
    "The controller reads it every ten seconds": ("queue-kueue.md", READ_SECONDS, 10),
}


@pytest.mark.parametrize("words", NUMBERS)
def test_number_of_a_guide_is_that_of_the_queue(words: str) -> None:
    page, actual, stated = NUMBERS[words]
    text = " ".join((CHECKOUT / "docs" / page).read_text().split())
    assert words in text, f"docs/{page} says it in other words: state here what it says now"
    assert actual == stated
