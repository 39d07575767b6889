"""Decisions that stay over changes of the files, and the memory that models on demand are decided for."""

import asyncio
from typing import Any, cast

from artifacts.inspect import Inspection
from crds.inferenceservice import InferenceService
from crds.model import Model
from kube.resources import INFERENCE_SERVICES, MODELS, ObjectKey
from standalone.inspections import ModelInspector
from standalone.manifests import Manifests, accept_manifest
from standalone.service_decisions import ServiceDecisions
from tests.support.api_objects import GIB
from tests.support.eventually import eventually
from tests.support.refused_manifests import make_manifest
from tests.unit.standalone.test_desired import inspection

ON_DEMAND = {"minReplicas": 0}


class Inspector:
    """An inspector that knows every Model, and counts the inspections of each."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def inspect(self, model: Model) -> tuple[Inspection, str]:
        """Return the same facts for each Model."""
        self.asked.append(model.metadata.name)
        return inspection(), ""


def manifests(**services: dict[str, Any]) -> Manifests:
    """Return services with a Model of the same name each."""
    found = Manifests()
    for name, spec in services.items():
        key = ObjectKey("default", name)
        source = {"source": spec.pop("source")} if "source" in spec else {}
        found.models[key] = accept_manifest(make_manifest(MODELS, name=name, **source), Model)
        service = make_manifest(INFERENCE_SERVICES, name=name, **{"modelRef": name} | spec)
        found.services[key] = accept_manifest(service, InferenceService)
    return found


async def decided(*steps: Manifests, budget_bytes: int = 64 * GIB) -> tuple[list[dict[str, Any]], list[str]]:
    """Serve the manifests one after the other; return the decided specs by name after each, and what was inspected."""
    inspector, found = Inspector(), list[dict[str, Any]]()
    decisions = ServiceDecisions(
        steps[0],
        cast("ModelInspector", inspector),
        "https://huggingface.co",
        budget_bytes=lambda: budget_bytes,
        changed=lambda: None,
    )
    async with asyncio.TaskGroup() as group:
        decisions.inspect_in(group)
        for step in steps:
            if step is not steps[0]:
                decisions.replace_manifests(step)
            await eventually(lambda: all(decision.assignments for decision in decisions.decisions.values()))
            found.append({key.name: decision.assignments[0] for key, decision in decisions.decisions.items()})
        await decisions.end_inspections()
    return found, inspector.asked


async def test_service_that_comes_changes_no_other_one() -> None:
    (first, second), asked = await decided(manifests(a={}), manifests(a={}, b={}))
    assert first["a"] == second["a"]
    assert asked == ["a", "b"]


async def test_edited_service_or_model_is_decided_anew() -> None:
    (first, second, third), asked = await decided(
        manifests(a={}, b={}),
        manifests(a={"contextLength": 1024}, b={}),
        manifests(a={"contextLength": 1024}, b={"source": "hf://o/r/other.gguf"}),
    )
    assert first["a"].uid != second["a"].uid
    assert first["b"] == second["b"]
    assert second["b"].spec.artifact != third["b"].spec.artifact
    assert asked == ["a", "b", "b"]


async def test_model_on_demand_that_fits_beside_no_other_has_the_memory_of_both() -> None:
    both = {name: {"scaling": ON_DEMAND} for name in ("a", "b", "c")}
    ((beside,), _), ((alone,), _) = (
        await decided(manifests(**both), budget_bytes=8 * GIB),
        await decided(manifests(**both), budget_bytes=2 * GIB),
    )
    assert beside["a"].spec.memory_bytes <= 4 * GIB
    assert GIB < alone["a"].spec.memory_bytes <= 2 * GIB
