"""Quantities that were stored before the CRD bounded their length: a condition names the field, and nothing crashes."""

from typing import Any, Final

import pytest

from kube.client import Obj
from kube.resources import DEPLOYMENTS, MODELS
from tests.support.api_objects import model, planned_condition
from tests.support.service_decisions import KEY, chat_service, decide_chat, list_applied, ready_outcome

_DIGITS: Final = "9" * 990_000
_NVIDIA: Final[Obj] = {"accelerator": "nvidia"}


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"resources": {"memory": _DIGITS}}, "resources.memory"),
        ({"resources": {"memoryLimit": _DIGITS}}, "resources.memoryLimit"),
        ({"resources": {"cpu": _DIGITS}}, "resources.cpu"),
        ({"hardware": {**_NVIDIA, "memory": _DIGITS}}, "hardware.memory"),
        (
            {"pod": {"volumes": [{"name": "tmp"}, {"name": "scratch", "emptyDir": {"sizeLimit": _DIGITS}}]}},
            "pod.volumes scratch.emptyDir.sizeLimit",
        ),
        ({"resources": {"memory": "much"}}, "resources.memory"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("has_model", [True, False])
def test_quantity_without_a_value_is_refused_with_its_field(
    spec: dict[str, Any], field: str, *, has_model: bool
) -> None:
    objects = [(MODELS, model())] if has_model else []
    plan = decide_chat(chat_service(**spec), *objects)
    assert ready_outcome(plan) == ("Failed", "False", "InvalidSpec")
    message = planned_condition(plan, "Ready")["message"]
    assert message.startswith(f"{field} is ")
    assert message.endswith("which is no quantity: state one such as 500m or 4Gi")
    assert len(message) < 256
    assert list_applied(plan, DEPLOYMENTS) == []
    assert plan.status is not None
    assert "memory" not in plan.status or "memory" not in field


@pytest.mark.parametrize("hardware", [{}, _NVIDIA], ids=["processor", "devices"])
def test_quantity_above_the_largest_of_kubernetes_is_capped(hardware: Obj) -> None:
    memory = "9" * 32
    spec = {"resources": {"memory": memory}, "hardware": hardware | ({"memory": memory} if hardware else {})}
    plan = decide_chat(chat_service(**spec), (MODELS, model()))
    assert plan.status is not None
    assert plan.status["memory"] == "8388608.0 TiB"
    (deployment,) = list_applied(plan, DEPLOYMENTS)
    assert deployment["metadata"]["name"] == KEY.name
