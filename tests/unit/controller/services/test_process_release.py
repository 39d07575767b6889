"""Release of a MetalProcess that is being deleted: once no host can be running it any more."""

from typing import Any

import pytest

from controller.reconcile.plan import Plan, Snapshot
from controller.services.metal_processes import decide_release
from crds.meta import PROCESS_FINALIZER
from kube.client import Obj
from kube.resources import METAL_HOSTS, METAL_PROCESSES, ObjectKey
from tests.support.api_objects import NOW, host, process, store

LEAVING: Obj = {"deletionTimestamp": "2026-11-21T12:00:00Z"}


def patched(plan: Plan) -> list[Any]:
    return [operation for patch in plan.patch for operation in patch.operations]


def terminating(phase: str = "Pending", **fields: Any) -> Obj:
    return process("chat-00000000-0", phase=phase, **LEAVING, **fields)


def release(observed: Obj, *, host_exists: bool = True, wait_seconds: float | None = None) -> Plan:
    hosts = ((METAL_HOSTS, host("studio-1")),) if host_exists else ()
    snapshot = Snapshot(store((METAL_PROCESSES, observed), *hosts), NOW, wait_seconds)
    return decide_release(snapshot, ObjectKey("team", observed["metadata"]["name"]))


@pytest.mark.parametrize(
    ("observed", "host_exists", "wait_seconds", "released"),
    [
        (terminating("Stopped", host="studio-1"), True, None, True),
        (terminating(), True, None, True),
        (terminating("Ready", host="studio-1"), True, None, False),
        (terminating("Failed", host="studio-1"), True, None, False),
        (terminating("Ready", host="studio-1"), False, None, True),
        (terminating("Ready", host="studio-1"), True, 12.0, False),
        (terminating("Ready", host="studio-1"), True, 0.0, True),
    ],
)
def test_release_of_a_terminating_process(
    *, observed: Obj, host_exists: bool, wait_seconds: float | None, released: bool
) -> None:
    plan = release(observed, host_exists=host_exists, wait_seconds=wait_seconds)
    assert bool(plan.patch) == released
    if not released:
        assert plan.again_seconds == wait_seconds


def test_release_is_for_one_version_and_keeps_other_finalizers() -> None:
    observed = terminating("Stopped", host="studio-1", finalizers=["a.example/b", PROCESS_FINALIZER])
    assert patched(release(observed)) == [
        {"op": "test", "path": "/metadata/resourceVersion", "value": "7"},
        {"op": "replace", "path": "/metadata/finalizers", "value": ["a.example/b"]},
    ]


def test_undeleted_or_released_process_is_not_released() -> None:
    kept = process("chat-00000000-0", phase="Stopped", host="studio-1")
    assert release(kept) == Plan()
    assert release(terminating("Stopped", finalizers=[])) == Plan()


@pytest.mark.parametrize(
    ("fields", "phase", "released"),
    [
        ({"priority": "cosmic"}, "Stopped", True),
        ({"priority": "cosmic", "conditions": "none"}, "Stopped", True),
        ({}, "Hibernating", False),
    ],
)
def test_process_with_values_of_a_newer_version_is_released(fields: Obj, phase: str, *, released: bool) -> None:
    assert bool(release(terminating(phase, host="studio-1", **fields)).patch) == released


def test_process_that_is_gone_needs_nothing() -> None:
    assert decide_release(Snapshot(store(), NOW), ObjectKey("team", "gone")) == Plan()
