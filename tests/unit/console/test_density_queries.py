"""The density API's answers: ranked by level then speed, nothing lost, stale and taken places left out."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.density.fit_report import build_report
from console import fit_table
from console.density_answers import QueryAnswer, SimulateRequest
from console.density_costs import list_costs
from console.density_metrics import build_process_registry, render_metrics
from console.density_prices import DensityPrices
from console.density_queries import (
    DensityQuery,
    Page,
    describe_node,
    list_catalog,
    list_installed_models,
    list_nodes,
    list_runtimes,
    query_nodes,
)
from console.density_service import DensityService
from console.density_simulation import ModelNotFound, SimulationRefused, simulate_model
from console.density_snapshot import CONTEXT_LENGTH, DensitySnapshot
from console.fit_table import RANKS, FitTable
from console.llmfit_answers import list_llmfit_models
from controller.placement.machines import compute_remaining_bytes, list_replicas
from crds.meta import CONTROLLER_NAMESPACE
from devices.vendors import VENDORS, Vendor
from fitness.performance import MeasuredPerformance
from fitness.performance_store import RecordKey, build_config_map, encode_record
from kube.resources import CONFIG_MAPS, NODE_FITNESSES, NODES
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
    node,
    pod,
    service,
)

SAMPLES = Path(__file__).parent / "sympozium"
"""Answers of Sympozium's handlers and script with data of llmfit 1.1.17, as recorded in research."""


def table() -> FitTable:
    return FitTable(CONTEXT_LENGTH)


def world(*more: Any) -> DensitySnapshot:
    return build_source(
        [*gpu_node("g1"), *gpu_node("g2", 2), *cpu_node("c1"), host("mac"), model("tiny"), *more]
    ).take_snapshot()


def ask(snapshot: DensitySnapshot, text: str = "tiny", **more: Any) -> QueryAnswer:
    return query_nodes(snapshot, table(), None, DensityQuery(text, **more), Page())


def names(answer: QueryAnswer) -> list[str]:
    return [node.node_name for node in answer.ranked_nodes]


def test_faster_node_of_the_same_level_comes_first() -> None:
    answer = ask(world())
    assert names(answer) == ["mac", "g1", "g2", "c1"]
    assert [node.score for node in answer.ranked_nodes] == sorted(
        (node.score for node in answer.ranked_nodes), reverse=True
    )


def test_no_hit_is_an_empty_list() -> None:
    answer = ask(world(), "no-such-model")
    assert json.loads(msgspec.json.encode(answer))["rankedNodes"] == []
    assert answer.total == 0


def test_least_level_is_honoured() -> None:
    assert names(ask(world(), min_fit="perfect")) == ["mac", "g1", "g2"]
    full = world(*gpu_node("small", memory=4 * GIB))
    assert "small" not in names(ask(full, min_fit="good"))
    worst = ask(full, min_fit="too_tight")
    assert names(worst)[-1] == "small" or "small" in names(worst)


def test_model_that_fits_nowhere_states_what_is_missing() -> None:
    snapshot = build_source([*cpu_node("c1", 2 * GIB), model("tiny")]).take_snapshot()
    assert names(ask(snapshot)) == []
    (node,) = ask(snapshot, min_fit="too_tight").ranked_nodes
    assert (node.score, node.fit_level) == (0.0, "too_tight")
    assert "short" in node.model.shortfall


def test_stale_cordoned_and_sick_nodes_are_shown_and_not_placed_on() -> None:
    snapshot = world(
        *gpu_node("stale", observed_at=OLD),
        *gpu_node("cordoned", node={"unschedulable": True}),
        *gpu_node("sick", node={"ready": "False"}),
        host("lost", ready="False"),
    )
    answer = ask(snapshot)
    assert names(answer) == ["mac", "g1", "g2", "c1"]
    assert [excluded_node.node_name for excluded_node in answer.excluded_nodes] == ["cordoned", "lost", "sick", "stale"]
    nodes = list_nodes(snapshot, table(), VENDORS, None, Page()).nodes
    assert {entry.node_name for entry in nodes if entry.stale} == {"stale", "lost"}
    assert {entry.node_name for entry in nodes if entry.unavailable} == {"stale", "lost", "cordoned", "sick"}
    assert len(nodes) == 8


def test_agent_that_falls_silent_makes_its_node_stale_and_a_heartbeat_ends_it() -> None:
    clock = Clock()
    objects = [*gpu_node("g1"), model("tiny")]
    source = build_source(objects, clock)
    assert names(ask(source.take_snapshot())) == ["g1"]
    clock.seconds += 151
    assert names(ask(source.take_snapshot())) == []
    fitness = next(obj for kind, obj in objects if kind is NODE_FITNESSES)
    status = fitness["status"] | {"observedAt": "2026-11-21T12:02:00Z"}
    metadata = fitness["metadata"] | {"resourceVersion": "2"}
    source.view.store.put(NODE_FITNESSES, {"metadata": metadata, "status": status})
    assert names(ask(source.take_snapshot())) == ["g1"]


def test_device_that_a_pod_holds_is_subtracted_although_it_looks_empty() -> None:
    held = world(pod("p", "g1", {GPU: "1"}, "chat"))
    assert names(ask(held)) == ["mac", "g2", "c1"]
    assert held.machines["g1"].free_bytes == ()
    partly = world(pod("p", "g2", {GPU: "1"}, "chat"))
    assert len(partly.machines["g2"].free_bytes) == 1
    assert names(ask(partly)) == ["mac", "g1", "g2", "c1"]


def test_memory_that_a_pod_requests_of_a_processor_is_subtracted() -> None:
    assert names(ask(world(pod("p", "c1", {"memory": "20Gi"}, "chat")))) == ["mac", "g1", "g2"]


def test_memory_that_another_program_uses_is_subtracted() -> None:
    snapshot = build_source([*gpu_node("g1", free=3 * GIB), model("tiny")]).take_snapshot()
    assert ask(snapshot, min_fit="good").ranked_nodes == []


def test_models_of_other_namespaces_are_hidden() -> None:
    snapshot = world(
        model("secret", "other"), service("s", "secret", "other"), pod("p", "g2", {GPU: "1"}, "s", "other")
    )
    seen = frozenset({"team"})
    assert query_nodes(snapshot, table(), seen, DensityQuery("secret"), Page()).ranked_nodes == []
    hidden = (
        list_catalog(snapshot, table(), seen, Page()),
        list_nodes(snapshot, table(), VENDORS, seen, Page()),
        list_installed_models(snapshot, seen, Page()),
        describe_node(snapshot, table(), VENDORS, seen, name="g2", page=Page()),
        list_costs(snapshot, DensityPrices(), seen, Page()),
    )
    assert not any(b"secret" in msgspec.json.encode(answer) for answer in hidden)
    with pytest.raises(ModelNotFound):
        simulate_model(snapshot, table(), seen, SimulateRequest(model="secret"))
    shown = list_installed_models(snapshot, None, Page())
    assert b"secret" in msgspec.json.encode(shown)


async def test_measurement_of_a_namespace_corrects_only_its_own_models() -> None:
    service = DensityService(
        build_view([*gpu_node("g1"), model("own"), model("foreign", "other"), model("third", "other")])
    )

    async def ask_speeds() -> dict[str, tuple[Any, Any]]:
        query = DensityQuery("-GGUF")
        answer = await service.compute(lambda snapshot, fits: query_nodes(snapshot, fits, None, query, Page()))
        return {fit.model.name: (fit.model.speed_method, fit.model.estimated_tps) for fit in answer.ranked_nodes}

    first = await ask_speeds()
    record = MeasuredPerformance(
        tokens_per_second=10, estimated_tokens_per_second=20, accelerator="nvidia", runtime="llama.cpp"
    )
    data = {RecordKey("nvidia-l4x1", "other").encode(): encode_record(record)}
    config_map = build_config_map("0" * 16, data)
    config_map["metadata"] |= {"uid": "bench", "resourceVersion": "1"}
    service.view.store.put(CONFIG_MAPS, config_map)
    corrected = await ask_speeds()
    assert corrected["own"] == first["own"]
    assert {corrected[name][0] for name in ("foreign", "third")} == {"corrected"}
    assert corrected["third"][1] < first["third"][1]
    snapshot = service.take_snapshot()
    ranked = service.table.rank_models(snapshot.models, snapshot.profiles[0])
    by_name = {fit.name: -fit.slowness for fit in ranked}
    assert round(by_name["other/third"], 1) == corrected["third"][1]
    service.view.store.remove(CONFIG_MAPS, CONTROLLER_NAMESPACE, config_map["metadata"]["name"])
    assert await ask_speeds() == first


def test_quantization_and_context_are_honoured() -> None:
    def need(**more: Any) -> float:
        answer = simulate_model(world(), table(), None, SimulateRequest(model="tiny", **more))
        return next(node.required_memory_gb for node in answer.ranked_nodes if node.node_name == "g1")

    assert need(quantization="Q8_0") > need() + 2 > need(quantization="Q2_K") + 2
    assert need(context=65536) > need() + 5


def test_simulation_takes_the_devices_of_the_replica() -> None:
    answer = simulate_model(world(), table(), None, SimulateRequest(model="team/tiny"))
    nodes = {node.node_name: node for node in answer.ranked_nodes}
    two, mac = nodes["g2"], nodes["mac"]
    assert two.after is not None
    assert mac.after is not None
    assert (two.before.free_devices, two.after.free_devices) == (2, 1)
    assert mac.after.free_gb == pytest.approx(mac.before.free_gb - mac.required_memory_gb, abs=0.02)


@pytest.mark.parametrize("stated", [{}, {"memoryBytes": 10 * GIB}])
def test_quantized_weights_do_not_fit_where_the_architecture_cannot_serve_them(stated: dict[str, Any]) -> None:
    """A pod with them avoids such a node, and on AMD, where no label states the architecture, its engine fails."""
    resource, quantized = model("quantized", **stated)
    quantized["spec"]["source"] = "hf://org/quantized-FP8"
    quantized["status"] |= {"format": "safetensors", "gguf": {"quantization": "fp8"}}
    nodes = {"v100": "Tesla V100-SXM2-32GB", "l4": "NVIDIA L4"}
    objects = [obj for name, product in nodes.items() for obj in gpu_node(name, product=product)]
    for name, product in (("mi250", "AMD Instinct MI250X"), ("mi300", "AMD Instinct MI300X")):
        listed, reported = gpu_node(name, product=product)
        listed[1]["status"]["allocatable"]["amd.com/gpu"] = listed[1]["status"]["allocatable"].pop(GPU)
        reported[1]["status"]["vendor"] = "amd"
        objects += [listed, reported]
    snapshot = build_source([*objects, (resource, quantized)]).take_snapshot()
    assert set(names(ask(snapshot, "quantized"))) == {"l4", "mi300"}
    refused = {
        ranked.node_name: ranked.model.shortfall
        for ranked in ask(snapshot, "quantized", min_fit="too_tight").ranked_nodes
        if ranked.fit_level == "too_tight"
    }
    assert refused.keys() == {"v100", "mi250"}
    assert "cannot serve fp8 weights on Tesla V100-SXM2-32GB, which is nvidia volta" in refused["v100"]
    assert "cannot serve fp8 weights on AMD Instinct MI250X, which is amd cdna2" in refused["mi250"]
    for memory_gb in (None, 10):
        simulated = simulate_model(snapshot, table(), None, SimulateRequest(model="quantized", memory_gb=memory_gb))
        assert {ranked.node_name for ranked in simulated.ranked_nodes if ranked.fit_level != "too_tight"} == {
            "l4",
            "mi300",
        }
        tight = {
            ranked.node_name: ranked.shortfall for ranked in simulated.ranked_nodes if ranked.fit_level == "too_tight"
        }
        assert tight == refused


def test_stated_memory_decides_a_simulation() -> None:
    answer = simulate_model(world(), table(), None, SimulateRequest(model="tiny", memory_gb=30))
    assert {node.node_name for node in answer.ranked_nodes if node.fit_level != "too_tight"} == {"mac", "g2"}
    assert not simulate_model(world(), table(), None, SimulateRequest(model="tiny", memory_gb=500)).can_fit_anywhere


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (SimulateRequest(model=" "), "model is empty"),
        (SimulateRequest(model="tiny", quantization="Q9"), "quantization is one of"),
        (SimulateRequest(model="tiny", context=1), "context is a number"),
        (SimulateRequest(model="tiny", memory_gb=-1), "memoryGb is a number"),
        (SimulateRequest(model="tiny", memory_gb=float("inf")), "memoryGb is a number"),
        (SimulateRequest(model="gemma"), "name one of them"),
        (SimulateRequest(model="mistral-medium-3-5", quantization="Q4_K_M"), "quantization is of GGUF files"),
    ],
)
def test_impossible_simulation_is_refused_with_the_way_out(request_: SimulateRequest, words: str) -> None:
    with pytest.raises(SimulationRefused, match=words):
        simulate_model(world(), table(), None, request_)


def shape(value: Any) -> Any:
    """Return the keys of a sample in camelCase, at any depth."""
    if isinstance(value, dict):
        return {camel(key): shape(part) for key, part in value.items() if not key.startswith("_")}
    return [shape(value[0])] if isinstance(value, list) and value else []


def camel(key: str) -> str:
    head, *rest = key.split("_")
    return head[:1].lower() + head[1:] + "".join(word.capitalize() for word in rest)


def missing(sample: Any, answer: Any, path: str = "") -> list[str]:
    """Return the keys of a sample that an answer lacks."""
    if isinstance(sample, dict):
        lacks = [f"{path}/{key}" for key in sample if key not in answer]
        return lacks + [
            lacking
            for key, part in sample.items()
            if key in answer
            for lacking in missing(part, answer[key], f"{path}/{key}")
        ]
    return missing(sample[0], answer[0], path) if sample and answer else []


def test_answers_have_the_keys_of_the_original_in_camel_case() -> None:
    snapshot = world(service("chat", "tiny"), pod("p", "g2", {GPU: "1"}, "chat"))
    request = SimulateRequest(model="tiny")
    answers = {
        "nodes": list_nodes(snapshot, table(), VENDORS, None, Page()),
        "node-detail": describe_node(snapshot, table(), VENDORS, None, name="g1", page=Page()),
        "runtimes-when-nats-build": list_runtimes(snapshot, VENDORS, None, Page()),
        "query": ask(snapshot),
        "catalog": list_catalog(snapshot, table(), None, Page()),
        "cost": list_costs(snapshot, DensityPrices(), None, Page()),
        "simulate": {"response": simulate_model(snapshot, table(), None, request)},
    }
    for name, answer in answers.items():
        sample = shape(json.loads((SAMPLES / f"sympozium-api-{name}.json").read_text()))
        assert missing(sample, json.loads(msgspec.json.encode(answer))) == [], name


def test_report_of_fit_has_the_keys_of_the_original() -> None:
    report = build_report(world(*gpu_node("stale", observed_at=OLD)), table(), DensityQuery("tiny"), 20)
    sample = json.loads((SAMPLES / "sympozium-llmfit-cluster-fit.json").read_text())
    assert sample.keys() == report.keys()
    assert sample["ranked_nodes"][0].keys() == report["ranked_nodes"][0].keys()
    by_node = {result["node"]: result for result in report["node_results"]}
    assert sample["node_results"][0].keys() == by_node["g1"].keys()
    assert by_node["stale"] == {"node": "stale", "error": "not considered", "reason": "its facts are stale"}
    assert [node["node"] for node in report["ranked_nodes"]] == ["mac", "g1", "g2", "c1"]


def test_metrics_are_the_nine_of_the_original() -> None:
    snapshot = world(*gpu_node("stale", observed_at=OLD))
    text = render_metrics(build_process_registry(), snapshot, table()).decode()
    metrics = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE pomona_density_")}
    per_node = ("score", "stale", "ram_total_gb", "ram_available_gb", "gpu_vram_gb", "gpu_count", "model_count")
    assert metrics == {f"pomona_density_node_{name}" for name in per_node} | {
        "pomona_density_cluster_nodes_total",
        "pomona_density_cluster_nodes_stale",
    }
    assert 'pomona_density_node_stale{node="stale"} 1.0' in text
    assert "pomona_density_cluster_nodes_stale 1.0" in text
    assert 'node_gpu_vram_gb{node="c1"}' not in text


sizes = st.integers(1, 90)
frees = st.integers(0, 24)


@given(
    gpus=st.lists(st.tuples(frees, st.integers(1, 4)), max_size=4),
    cpus=st.lists(frees, max_size=3),
    tensors=st.lists(sizes, min_size=1, max_size=25),
    limit=st.integers(1, 50),
)
def test_pages_together_are_ranked_and_lose_nothing(
    gpus: list[tuple[int, int]], cpus: list[int], tensors: list[int], limit: int
) -> None:
    objects = [entry for n, (free, count) in enumerate(gpus) for entry in gpu_node(f"g{n}", count, free=free * GIB)]
    objects += [entry for n, free in enumerate(cpus) for entry in cpu_node(f"c{n}", free * GIB)]
    for number, size in enumerate(tensors):
        kind, built = model(f"m{number}")
        built["status"]["layout"]["tensorBytes"] = size * GIB // 2
        objects.append((kind, built))
    snapshot, fits = build_source(objects).take_snapshot(), table()
    query = DensityQuery("team/m", min_fit="too_tight")
    ranked, offset = list[Any](), 0
    while True:
        page = query_nodes(snapshot, fits, None, query, Page(offset, limit))
        ranked += page.ranked_nodes
        if page.next_offset is None:
            break
        offset = page.next_offset
    pairs = {(row.node_name, row.model.name) for row in ranked}
    assert len(pairs) == len(ranked) == page.total == (len(gpus) + len(cpus)) * len(tensors)
    ranks = [(RANKS[row.fit_level], -row.score) for row in ranked]
    assert ranks == sorted(ranks)
    for row in ranked:
        fits_in = row.model.memory_required_gb <= row.model.memory_available_gb + 0.01
        assert fits_in == (row.fit_level != "too_tight")


@given(free=st.lists(st.integers(0, 100), max_size=8), count=st.integers(1, 4), needed=st.integers(1, 100))
def test_a_further_replica_never_adds_room(free: list[int], count: int, needed: int) -> None:
    machine = world().machines["g1"]._replace(free_bytes=tuple(sorted(free, reverse=True)))
    for hardware in (machine.hardware, machine.hardware._replace(is_shared=True)):
        after = compute_remaining_bytes(machine._replace(hardware=hardware), count, needed)
        assert sum(after) <= sum(free)
        assert list(after) == sorted(after, reverse=True)
    assert all(replica.free_bytes is not None for replica in list_replicas(machine.bases, machine.free_bytes))


def test_rows_of_llmfit_are_one_for_each_model_on_its_best_node() -> None:
    snapshot = world()
    answer = list_llmfit_models(snapshot, table(), None, DensityQuery("*"), Page())
    rows = {row["name"]: row["node_name"] for row in answer["models"]}
    assert rows["team/tiny"] == "mac"
    assert len(rows) == answer["total_models"] == answer["returned_models"]
    sample = json.loads((SAMPLES / "rest-models-keys.json").read_text())
    assert set(sample) <= answer.keys()


def test_node_without_facts_is_listed_and_ranked_nowhere() -> None:
    source = build_source([(NODES, node("bare", {"cpu": "4", "memory": "8Gi"})), model("tiny")])
    answer = ask(source.take_snapshot())
    assert names(answer) == []
    assert [(excluded_node.node_name, excluded_node.reason) for excluded_node in answer.excluded_nodes] == [
        ("bare", "its hardware is unknown")
    ]


class CountedModels(list[Any]):
    """Models that count how often all of them are looked at."""

    looks = 0

    def __iter__(self) -> Iterator[Any]:
        self.looks += 1
        return super().__iter__()


def test_models_on_disks_are_looked_at_once_and_not_for_each_node() -> None:
    resource, tiny = model("tiny")
    tiny["status"]["copies"] = [{"node": node, "name": "w", "claim": "uid", "path": "tiny"} for node in ("n3", "n7")]
    objects = [entry for number in range(20) for entry in gpu_node(f"n{number}")]
    snapshot = build_source([*objects, (resource, tiny)]).take_snapshot()
    stored = CountedModels(snapshot.stored)
    snapshot = dataclasses.replace(snapshot, stored=stored)
    answer = list_nodes(snapshot, table(), VENDORS, None, Page())
    assert [node.node_name for node in answer.nodes if node.installed_models] == ["n3", "n7"]
    assert stored.looks == 1


def test_heartbeat_of_a_node_lets_no_pod_be_counted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    source = build_source(
        [*gpu_node("g1"), *cpu_node("c1"), service("chat", "tiny"), pod("chat-1", "g1", {GPU: "2"}, "chat")]
    )
    source.take_snapshot()
    asked, offers = list[str](), Vendor.offers

    def count(vendor: Vendor, name: str) -> bool:
        asked.append(name)
        return offers(vendor, name)

    monkeypatch.setattr(Vendor, "offers", count)
    _, (resource, beat) = cpu_node("c1", observed_at="2026-11-21T11:59:59Z")
    source.view.store.put(resource, {**beat, "metadata": {**beat["metadata"], "resourceVersion": "2"}})
    assert [replica.devices for replica in source.take_snapshot().placed] == [2]
    assert GPU not in asked


def test_orders_of_models_that_are_kept_are_bounded_by_their_models(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [entry for number in range(1, 25) for entry in gpu_node(f"g{number}", free=number * GIB)]
    snapshot, kept = build_source(nodes).take_snapshot(), table()
    assert len(snapshot.profiles) == 24
    monkeypatch.setattr(fit_table, "MOST_RANKED", 10 * len(snapshot.models))
    answers = [kept.rank_models(snapshot.models, profile) for profile in snapshot.profiles]
    assert sum(len(ranked) for _, ranked in kept._ranked.values()) <= 10 * len(snapshot.models)
    assert [kept.rank_models(snapshot.models, profile) for profile in snapshot.profiles] == answers
