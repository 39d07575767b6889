"""Hosts that may inspect Models of a namespace, and the Models that a change of a host concerns."""

import pytest

from controller.models.inspecting_hosts import (
    InspectingHost,
    inspecting_facts,
    list_inspecting_hosts,
    models_of_host,
)
from crds.meta import API_VERSION
from kube.client import Obj
from kube.resources import METAL_HOSTS, METAL_PROCESSES, MODELS, ObjectKey
from tests.support.api_objects import NAMESPACE, condition, host, model, process, store

LIVE = InspectingHost(is_live=True)


def inspection(name: str, on: str, of: str = "tiny") -> Obj:
    found = process(name, host=on, inspect=True)
    owner = {"apiVersion": API_VERSION, "kind": "Model", "name": of, "uid": f"uid-{of}", "controller": True}
    found["metadata"]["ownerReferences"] = [owner]
    return found


@pytest.mark.parametrize(
    ("given", "found"),
    [([], {"studio-1": LIVE}), ([NAMESPACE, "other"], {"studio-1": LIVE}), (["other"], {})],
    ids=["all namespaces", "this one", "another"],
)
def test_host_inspects_for_the_namespaces_that_it_is_given(given: list[str], found: dict[str, InspectingHost]) -> None:
    known = store((METAL_HOSTS, host() | {"spec": {"namespaces": given}}))
    assert list_inspecting_hosts(known, NAMESPACE) == found


@pytest.mark.parametrize(
    ("observed", "state"),
    [
        (host(ready="False"), InspectingHost(is_live=False, is_lost=True)),
        (host(ready="Unknown"), InspectingHost(is_live=False)),
        (host(conditions=[]), InspectingHost(is_live=False)),
    ],
    ids=["expired", "unproven", "just registered"],
)
def test_host_that_is_not_live_is_not_asked(observed: Obj, state: InspectingHost) -> None:
    assert list_inspecting_hosts(store((METAL_HOSTS, observed)), NAMESPACE) == {"studio-1": state}


def test_host_that_is_deleted_is_not_asked() -> None:
    leaving = host()
    leaving["metadata"]["deletionTimestamp"] = "2026-11-21T12:00:00Z"
    assert list_inspecting_hosts(store((METAL_HOSTS, leaving)), NAMESPACE) == {}


def test_load_counts_inspections_only() -> None:
    known = store(
        (METAL_HOSTS, host()),
        (METAL_PROCESSES, process("chat-a-0", host="studio-1")),
        (METAL_PROCESSES, inspection("tiny-inspect-1", "studio-1")),
        (METAL_PROCESSES, inspection("other-inspect-1", "studio-2")),
    )
    assert list_inspecting_hosts(known, NAMESPACE)["studio-1"].load == 1


def test_change_of_a_host_concerns_what_it_inspects_and_what_waits_for_one() -> None:
    waiting = model(status={"conditions": [condition("Ready", "False", "ImagePullBackOff")]})
    done = model(status={"conditions": [condition("Ready", "True", "Inspected")]})
    waiting["metadata"]["name"] = "waiting"
    known = store(
        (MODELS, done),
        (MODELS, waiting),
        (METAL_PROCESSES, inspection("tiny-inspect-1", "studio-1")),
        (METAL_PROCESSES, inspection("other-inspect-1", "studio-2", of="other")),
        (METAL_PROCESSES, process("chat-a-0", host="studio-1")),
    )
    assert models_of_host(known, host()) == [ObjectKey(NAMESPACE, "tiny"), ObjectKey(NAMESPACE, "waiting")]


def test_measurements_of_a_host_concern_no_model() -> None:
    before, after = host(free_bytes=1), host(free_bytes=2, memoryPressure="warn")
    assert inspecting_facts(before) == inspecting_facts(after)
    for changed in (host(ready="False"), host() | {"spec": {"namespaces": ["a"]}}):
        assert inspecting_facts(changed) != inspecting_facts(before)
