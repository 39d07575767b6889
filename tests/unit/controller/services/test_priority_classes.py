"""The PriorityClasses of deploy/: one for each priority of a service, in its order, and none preempts."""

from typing import get_args

import pytest
import yaml

from crds.meta import Priority
from kube.client import Obj
from kube.resources import DEPLOYMENTS, MODELS
from tests.controlplane.process import CHECKOUT
from tests.support.api_objects import model
from tests.support.service_decisions import chat_service, decide_chat, list_applied

PRIORITIES: tuple[Priority, ...] = get_args(Priority)
"""The most important first."""
CLASSES: list[Obj] = list(yaml.safe_load_all((CHECKOUT / "deploy" / "install" / "priority-classes.yaml").read_text()))


def value_of(name: str) -> int:
    """Return the value of a PriorityClass."""
    (value,) = (priority_class["value"] for priority_class in CLASSES if priority_class["metadata"]["name"] == name)
    return int(value)


def test_each_priority_has_a_class_and_no_other_exists() -> None:
    assert {priority_class["kind"] for priority_class in CLASSES} == {"PriorityClass"}
    names = [priority_class["metadata"]["name"] for priority_class in CLASSES]
    assert sorted(names) == sorted(f"pomona-{priority}" for priority in PRIORITIES)


@pytest.mark.parametrize("priority", PRIORITIES)
def test_pod_has_the_class_of_its_priority(priority: Priority) -> None:
    (made,) = list_applied(decide_chat(chat_service(priority=priority), (MODELS, model())), DEPLOYMENTS)
    assert made["spec"]["template"]["spec"]["priorityClassName"] == f"pomona-{priority}"


@pytest.mark.parametrize("priority_class", CLASSES, ids=lambda priority_class: str(priority_class["metadata"]["name"]))
def test_no_class_preempts_or_is_that_of_other_pods(priority_class: Obj) -> None:
    """A model that serves is not stopped for one that waits."""
    assert priority_class["preemptionPolicy"] == "Never"
    assert not priority_class.get("globalDefault", False)


def test_more_important_service_has_a_higher_value() -> None:
    values = [value_of(f"pomona-{priority}") for priority in PRIORITIES]
    assert values == sorted(set(values), reverse=True)
    assert values[-1] > 0, "a pod without a class has 0"
