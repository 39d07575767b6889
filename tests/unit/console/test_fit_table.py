"""Fits and cells that the density API keeps equal those that are computed anew, for each cell and model alone."""

import asyncio
import copy
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from console.density_queries import DensityQuery, Page, query_nodes
from console.density_service import DensityService
from console.density_snapshot import CONTEXT_LENGTH, DensitySnapshot
from console.fit_table import FitTable, RankedFit
from controller.placement.cluster_view import ClusterView
from crds.meta import LABEL_MANAGED_BY
from kube.resources import NODE_FITNESSES, NODES, PODS
from tests.support.density_worlds import (
    GIB,
    GPU,
    OLD,
    Clock,
    build_source,
    build_view,
    cpu_node,
    gpu_node,
    host,
    model,
    pod,
)


def rank_one_by_one(snapshot: DensitySnapshot, names: tuple[str, ...]) -> list[RankedFit]:
    """Return the models on a cell by a table that has computed nothing else."""
    ranked = []
    profile = snapshot.profile_of[names[0]]
    for position, ranked_model in enumerate(snapshot.models):
        place = FitTable(CONTEXT_LENGTH).find_best_fit(ranked_model, profile)
        if place is not None:
            ranked.append(RankedFit(*place.rank, ranked_model.full_name, position))
    return sorted(ranked)


free = st.integers(0, 26)


@st.composite
def draw_models(draw: st.DrawFn) -> list[tuple[Any, Any]]:
    models = []
    for number, (size, memory) in enumerate(
        draw(st.lists(st.tuples(st.integers(1, 60), st.sampled_from((None, 3, 20))), min_size=1, max_size=6))
    ):
        stated: dict[str, Any] = {"memoryBytes": memory * GIB} if memory else {}
        kind, built = model(f"m{number}", **stated)
        built["status"]["layout"]["tensorBytes"] = size * GIB
        if size % 7 == 0:
            built["status"]["format"] = "safetensors"
        if size % 11 == 0:
            del built["status"]["layout"]
        models.append((kind, built))
    return models


@given(draw_models(), st.lists(st.tuples(free, st.integers(1, 8)), min_size=1, max_size=3), free, st.integers(0, 60))
def test_ranks_on_a_cell_equal_those_computed_one_by_one(
    known: list[Any], gpus: list[tuple[int, int]], memory: int, budget: int
) -> None:
    nodes = [entry for n, (size, count) in enumerate(gpus) for entry in gpu_node(f"g{n}", count, free=size * GIB)]
    snapshot = build_source([*nodes, *cpu_node("c", memory * GIB), host("mac", budget * GIB), *known]).take_snapshot()
    table = FitTable(CONTEXT_LENGTH)
    for profile in snapshot.profiles:
        assert table.rank_models(snapshot.models, profile) == rank_one_by_one(snapshot, profile.names)


changes = st.lists(
    st.tuples(
        st.sampled_from(("heartbeat", "silence", "pod", "unbind", "foreign", "cordon", "remove", "wait")),
        st.integers(0, 2),
        free,
    ),
    max_size=8,
)


Objects = dict[tuple[Any, str], Any]


@given(changes)
def test_view_after_changes_equals_one_that_begins_with_them(steps: list[tuple[str, int, int]]) -> None:
    clock = Clock()
    initial = [*gpu_node("n0", 2), *gpu_node("n1"), *cpu_node("n2"), model("tiny")]
    source, objects = build_source(initial, clock), {(kind, obj["metadata"]["name"]): obj for kind, obj in initial}
    source.take_snapshot()
    for moment, (step, number, amount) in enumerate(steps):
        clock.seconds += 100 if step == "wait" else 0
        change(source.view, objects, step, f"n{number}", amount, version=str(moment + 2))
        # The facts of an agent that is heard first may be old, which is not what this compares.
        anew = build_source([], clock)
        anew.view.registry.foreign, anew.view.freshness = source.view.registry.foreign, source.view.freshness
        for (kind, _), obj in objects.items():
            anew.view.store.put(kind, obj)
        actual, expected = source.take_snapshot(), anew.take_snapshot()
        assert actual.machines == expected.machines
        assert actual.profiles == expected.profiles


def change(view: ClusterView, objects: Objects, step: str, name: str, amount: int, *, version: str) -> None:
    """Change one object, in the view and among the objects of the cluster."""
    fitness, node = objects.get((NODE_FITNESSES, name)), objects.get((NODES, name))
    changed: tuple[Any, Any] | None = None
    if step == "pod":
        changed = pod(f"p{version}", name, {GPU: "1", "memory": f"{amount}Gi"})
    elif step == "foreign":
        _, built = pod(f"f{version}", name, {GPU: "1"})
        del built["metadata"]["labels"][LABEL_MANAGED_BY]
        foreign = view.registry.foreign
        foreign.replace(PODS, [foreign.read(msgspec.Raw(msgspec.json.encode(built)))])
    elif step in {"remove", "unbind"}:
        gone = {"remove": (NODE_FITNESSES if amount % 2 else NODES, name), "unbind": (PODS, f"p{version}")}[step]
        if step == "unbind":
            gone = next((key for key in objects if key[0] is PODS), gone)
        objects.pop(gone, None)
        view.store.remove(gone[0], "team" if gone[0] is PODS else None, gone[1])
    elif step == "cordon" and node is not None:
        changed = NODES, renew(node, version, spec={"unschedulable": True})
    elif step != "wait" and fitness is not None:
        observed = OLD if step == "silence" else f"2026-11-21T12:00:{int(version):02}Z"
        status = fitness["status"] | {"availableBytes": amount * GIB, "observedAt": observed}
        changed = NODE_FITNESSES, renew(fitness, version, status=status)
    if changed is not None:
        objects[changed[0], changed[1]["metadata"]["name"]] = changed[1]
        view.store.put(*changed)


def renew(obj: Any, version: str, **parts: Any) -> Any:
    return copy.deepcopy(obj) | {"metadata": obj["metadata"] | {"resourceVersion": version}} | parts


def test_first_question_after_the_lists_estimates_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    models = [model(f"m{number}") for number in range(20)]
    service = DensityService(build_view([*gpu_node("g1"), *cpu_node("c1"), *models]))

    async def start() -> None:
        preparation = asyncio.create_task(service.prepare())
        for listed in service.view._lists:
            listed.set()
        await preparation

    asyncio.run(start())
    monkeypatch.delattr("console.fit_table.assess_fit")
    answer = query_nodes(service.take_snapshot(), service.table, None, DensityQuery("*"), Page())
    assert {node.node_name for node in answer.ranked_nodes} == {"g1", "c1"}
