"""The steps of `make demo` that show the queue lead to what they say, and print it."""

import re

import pytest

from kube.client import Client
from kube.resources import INFERENCE_SERVICES
from kube.store import Store
from kube.watch import Selection, reflect
from tests.cluster.queue.queue_user import RUN_SECONDS, QueueUser
from tests.controlplane.plane import ControlPlane
from tests.demo.queue_steps import STEPS, pick_columns, show_queue
from tests.support.background import running
from tests.support.eventually import eventually
from tests.support.simulated_nodes import SimulatedNodes


def test_columns_are_picked_by_their_headings() -> None:
    table = "NAME    PHASE           MAX RUN   QUEUE\nnight   WaitingForGPU   4         1/2\nday     Ready\n"
    assert pick_columns(table, ("NAME", "QUEUE")) == "NAME    QUEUE\nnight   1/2\nday"


async def test_demo_drains_a_low_service_for_a_critical_one_and_brings_it_back(
    plane: ControlPlane,
    client: Client,
    simulated: SimulatedNodes,
    user: QueueUser,
    capsys: pytest.CaptureFixture[str],
) -> None:
    await simulated.add("gpu-1", devices=1)
    store = Store()
    async with running(reflect(client, store, Selection(INFERENCE_SERVICES, user.namespace))):
        await show_queue(plane, store, lambda condition: eventually(condition, RUN_SECONDS), user.namespace)
    printed = capsys.readouterr().out
    drained = printed.partition(STEPS[2].title)[2].partition(STEPS[3].title)[0]
    assert re.search(r"^incident +Ready +Serving *$", drained, re.MULTILINE)
    assert re.search(r"^nightly +WaitingForGPU +InsufficientDevices +1/2$", drained, re.MULTILINE)
    assert re.search(r"^weekly +WaitingForGPU +InsufficientDevices +2/2$", drained, re.MULTILINE)
    assert re.search(r"^Preempted by .*/incident \(critical\): pod .*/nightly-\S+ \(low\) ends", drained, re.MULTILINE)
    back = printed.partition(STEPS[3].title)[2]
    assert re.search(r"^nightly +Ready +Serving *$", back, re.MULTILINE)
    assert re.search(r"^weekly +WaitingForGPU +InsufficientDevices +1/1$", back, re.MULTILINE)
