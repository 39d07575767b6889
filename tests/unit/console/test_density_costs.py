"""Costs: from watts, price and tokens, and what is unknown is said."""

from typing import Any

import pytest

from console.density_costs import list_costs
from console.density_prices import DensityPrices
from console.density_queries import Page
from console.density_snapshot import DensitySnapshot
from kube.resources import NODES
from tests.support.density_worlds import GIB, GPU, build_source, gpu_node, host, model, pod, process, service


def world(*more: Any) -> DensitySnapshot:
    return build_source([*gpu_node("g1"), *gpu_node("g2", 2), model("tiny"), *more]).take_snapshot()


def test_cost_follows_from_watts_price_and_tokens() -> None:
    snapshot = world(
        service("chat", "tiny", tokensPerSecond="20", deviceMemoryBytes=7 * GIB),
        pod("p", "g2", {GPU: "2"}, "chat"),
    )
    prices = DensityPrices(currency="EUR", per_kwh=0.3, watts={"nvidia-l4": 72}, per_hour={"nvidia": 0.5})
    answer = list_costs(snapshot, prices, None, Page())
    (cost,) = answer.models
    assert (cost.gpu, cost.watts, cost.memory_required_gb) == (2, 144, 14.0)
    assert cost.cost_per_hour == pytest.approx(2 * (0.072 * 0.3 + 0.5))
    assert cost.cost_per_million_tokens == pytest.approx(1.0432 / (20 * 3600) * 1e6, rel=1e-4)
    (namespace,) = answer.namespaces
    assert namespace.cost_per_hour == cost.cost_per_hour


def test_unknown_price_is_null_and_never_zero() -> None:
    snapshot = world(service("chat", "tiny"), pod("p", "g1", {GPU: "1"}, "chat"))
    (cost,) = list_costs(snapshot, DensityPrices(per_kwh=0.3), None, Page()).models
    assert (cost.watts, cost.cost_per_hour, cost.cost_per_million_tokens) == (None, None, None)
    (sums,) = list_costs(snapshot, DensityPrices(), None, Page()).namespaces
    assert (sums.cost_per_hour, sums.known_cost_per_hour) == (None, 0.0)


def test_costs_of_models_and_namespaces_are_those_that_are_computed_by_hand() -> None:
    stated = {"deviceClass": "nvidia-l4x1", "tokensPerSecond": "25", "source": "Estimated"}
    snapshot = build_source(
        [
            *gpu_node("n1", 2),
            host("m1"),
            model("tiny"),
            service("chat", "tiny", speeds=[stated], deviceMemoryBytes=7 * GIB),
            pod("c-1", "n1", {GPU: "1"}, "chat"),
            pod("c-2", "n1", {GPU: "1"}, "chat"),
            service("mac", "tiny", tokensPerSecond="10"),
            process("m-1", "m1", 6 * GIB, "mac"),
            service("mac", "tiny", "other"),
            process("m-2", "m1", 8 * GIB, "mac", "other"),
            service("idle", "tiny", "other"),
        ]
    ).take_snapshot()
    prices = DensityPrices(
        currency="EUR", per_kwh=0.30, watts={"nvidia-l4": 72, "metal": 90}, per_hour={"nvidia-l4": 0.50}
    )
    answer = list_costs(snapshot, prices, None, Page())
    idle, others, chat, mac = answer.models
    # Two L4 of 72 W at 0.30 per kWh and 0.50 of hire: 2 x (0.072 x 0.30 + 0.50). One makes 90,000 tokens an hour.
    assert (chat.watts, chat.unknown) == (144, [])
    assert chat.cost_per_hour == pytest.approx(1.0432)
    assert chat.cost_per_million_tokens == pytest.approx(0.5216 / 0.09, abs=1e-6)
    # One Mac of 90 W with two replicas: 0.045 x 0.30 for each. The first makes 36,000 tokens an hour.
    assert (mac.watts, mac.speed_source) == (45, "live")
    assert mac.cost_per_hour == pytest.approx(0.0135)
    assert mac.cost_per_million_tokens == pytest.approx(0.375)
    assert (others.watts, others.cost_per_million_tokens) == (45, None)
    assert others.cost_per_hour == pytest.approx(0.0135)
    assert others.unknown == ["tokens per second"]
    assert (idle.watts, idle.cost_per_hour, idle.unknown) == (0, 0, [])
    other, team = answer.namespaces
    # 50 tokens/s of both replicas of chat, and 10 of mac: 216,000 an hour for 1.0567.
    assert (team.watts, team.total_memory_gb, team.tokens_per_second) == (189, 20.0, 60)
    assert team.cost_per_hour == pytest.approx(1.0567)
    assert team.cost_per_million_tokens == pytest.approx(1.0567 / 0.216, abs=1e-6)
    assert (other.cost_per_hour, other.tokens_per_second, other.cost_per_million_tokens) == (0.0135, None, None)


def test_what_is_not_known_of_a_cost_is_named_and_spoils_the_sums() -> None:
    objects = [*gpu_node("n1"), host("m1"), service("chat", "tiny"), pod("c", "n1", {GPU: "1"}, "chat")]
    objects += [service("mac", "tiny", tokensPerSecond="10"), process("m", "m1", GIB, "mac")]
    snapshot = build_source(objects).take_snapshot()
    answer = list_costs(snapshot, DensityPrices(per_kwh=0.3, watts={"metal": 90}), None, Page())
    chat, mac = answer.models
    assert (chat.watts, chat.cost_per_hour, chat.cost_per_million_tokens) == (None, None, None)
    assert chat.unknown == ["memory of a replica", "tokens per second", "watts of nvidia-l4"]
    assert (mac.watts, mac.unknown) == (90, [])
    assert mac.cost_per_hour == pytest.approx(0.027)
    (team,) = answer.namespaces
    assert (team.watts, team.cost_per_hour, team.total_memory_gb, team.tokens_per_second) == (None,) * 4
    assert team.known_cost_per_hour == pytest.approx(0.027)
    chat, mac = list_costs(snapshot, DensityPrices(), None, Page()).models
    assert {"perKwh, or perHour of nvidia-l4", "watts of nvidia-l4"} < {*chat.unknown}
    gone = build_source([service("chat", "tiny"), pod("c", "gone", {GPU: "1"}, "chat")]).take_snapshot()
    (lost,) = list_costs(gone, DensityPrices(), None, Page()).models
    assert "hardware of a node or host" in lost.unknown


def test_replica_without_devices_does_not_pay_for_those_of_its_node() -> None:
    snapshot = world(
        *(service("gpu", "tiny"), pod("p", "g1", {GPU: "1"}, "gpu")),
        *(service("cpu", "tiny"), pod("q", "g1", {}, "cpu")),
    )
    cpu, gpu = list_costs(snapshot, DensityPrices(per_hour={"nvidia-l4": 1.0}), None, Page()).models
    assert gpu.cost_per_hour == 1.0
    assert cpu.cost_per_hour is None
    assert "processor of a node with devices" in cpu.unknown


def test_slice_of_a_shared_device_costs_its_part() -> None:
    (_, raw), fitness = gpu_node("n1", 2)
    shared = {"nvidia.com/gpu.product": "NVIDIA-L4-SHARED", "nvidia.com/gpu.sharing-strategy": "time-slicing"}
    raw["metadata"]["labels"] = {**shared, "nvidia.com/gpu.replicas": "4"}
    raw["status"]["allocatable"] = {**raw["status"]["allocatable"], GPU: "8"}
    more = [service("chat", "tiny"), pod("c", "n1", {GPU: "1"}, "chat")]
    prices = DensityPrices(per_kwh=0.5, watts={"nvidia": 72})
    (cost,) = list_costs(build_source([(NODES, raw), fitness, *more]).take_snapshot(), prices, None, Page()).models
    assert cost.watts == 18
    assert cost.cost_per_hour == pytest.approx(0.009)
    del raw["metadata"]["labels"]["nvidia.com/gpu.replicas"]
    (blind,) = list_costs(build_source([(NODES, raw), fitness, *more]).take_snapshot(), prices, None, Page()).models
    assert blind.watts is None
    assert "number of pods that share a device" in blind.unknown
