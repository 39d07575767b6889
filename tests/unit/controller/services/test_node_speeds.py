"""`status.nodeSpeeds`: on replicas of different hardware, and rewritten only when a speed changes notably."""

from collections.abc import Mapping

import msgspec
import pytest

from controller.reconcile.plan import Snapshot
from controller.services.accelerator_choice import ChosenAccelerators
from controller.services.service_view import build_view
from controller.services.speed_report import SpeedReport, SpeedSources, report_node_speeds
from crds.accelerator_choice import AcceleratorShare
from crds.placement import MOST_NODE_SPEEDS, ClassSpeed, NodeSpeed
from devices.vendors import VENDORS
from kube.client import Obj
from kube.resources import METAL_HOSTS, MODELS, NODES
from tests.support.api_objects import GIB, NOW, as_service, host, model, service, store
from tests.support.service_decisions import KEY, SETTINGS, chat_service, decide_chat

MAC, H100 = "apple-m4-max-40c-128gb", "nvidia-h100-80gb-hbm3x1"
PLACES = {"gpu-a": H100, "studio-1": MAC}


def list_classes(h100: float | None = 120.0, mac: float | None = 30.0) -> tuple[ClassSpeed, ...]:
    return tuple(
        ClassSpeed(device_class=name, tokens_per_second=f"{rate}" if rate else None)
        for name, rate in ((H100, h100), (MAC, mac))
    )


def list_speeds(**rates: float) -> list[NodeSpeed]:
    return [NodeSpeed(node=node, tokens_per_second=f"{rate}") for node, rate in rates.items()]


def report(
    last: list[NodeSpeed], classes: tuple[ClassSpeed, ...], places: Mapping[str, str] = PLACES
) -> list[NodeSpeed]:
    return list(report_node_speeds(last, classes, places.keys(), places))


def gpu_node(name: str) -> Obj:
    labels = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
    metadata = {"name": name, "uid": name, "resourceVersion": "1", "labels": labels}
    return {"metadata": metadata, "spec": {}, "status": {"allocatable": {"nvidia.com/gpu": "8"}}}


def observe(*nodes: str) -> SpeedReport:
    """Return the report about a service on NVIDIA's nodes and on hosts, with replicas on `nodes`."""
    mac = host(chip="Apple M4 Max", gpuCores=40, memoryBytes=128 * GIB)
    names = [node for node in nodes if node.startswith("studio")]
    hosts = [(METAL_HOSTS, mac | {"metadata": mac["metadata"] | {"name": name}}) for name in names]
    snapshot = Snapshot(store((MODELS, model()), (NODES, gpu_node("gpu-a")), *hosts), NOW)
    shares = [AcceleratorShare(accelerator=name, replicas=1) for name in ("nvidia", "metal")]
    view = build_view(snapshot, KEY, as_service(service(replicas=2)), SETTINGS)
    view = msgspec.structs.replace(
        view,
        accelerator_choice=ChosenAccelerators(shares, speeds=list_classes()),
        replicas=msgspec.structs.replace(view.replicas, nodes=frozenset(nodes)),
    )
    return SpeedSources().report(snapshot, KEY, view, VENDORS)


def test_speeds_of_a_mac_and_a_gpu_behind_one_service_are_in_its_status() -> None:
    observed = observe("gpu-a", "studio-1", "elsewhere")
    plan = decide_chat(chat_service(), speed=observed)
    assert plan.status is not None
    assert plan.status["nodeSpeeds"] == [
        {"node": "gpu-a", "tokensPerSecond": "120.0"},
        {"node": "studio-1", "tokensPerSecond": "30.0"},
    ]


def test_service_on_one_kind_of_hardware_lists_no_node() -> None:
    observed = observe("studio-1", "studio-2")
    assert observed.nodes == ()
    plan = decide_chat(chat_service(), speed=observed)
    assert plan.status is not None
    assert "nodeSpeeds" not in plan.status


@pytest.mark.parametrize(("h100", "mac"), [(120.0, None), (None, None), (100.0, 95.0)])
def test_unknown_or_about_equal_speeds_list_no_node(h100: float | None, mac: float | None) -> None:
    assert report([], list_classes(h100, mac)) == []


def test_small_change_of_a_measurement_rewrites_nothing() -> None:
    last = list_speeds(**{"gpu-a": 120.0, "studio-1": 30.0})
    assert report(last, list_classes(125.0, 28.0)) == last
    assert report(last, list_classes(125.0, 20.0)) == list_speeds(**{"gpu-a": 125.0, "studio-1": 20.0})
    assert report(last, list_classes(125.0, 120.0)) == []
    barely = list_speeds(**{"gpu-a": 112.0, "studio-1": 100.0})
    assert report(barely, list_classes(108.0, 100.0)) == barely, "it would come and go with each measurement"
    assert report([], list_classes(108.0, 100.0)) == []


def test_nodes_come_and_go_with_their_replicas() -> None:
    last = list_speeds(**{"gpu-a": 120.0, "studio-1": 30.0})
    more = report(last, list_classes(), {**PLACES, "studio-2": MAC})
    assert more == [*last, *list_speeds(**{"studio-2": 30.0})]
    assert report(more, list_classes(), PLACES) == last
    assert report(last, list_classes(), {"studio-1": MAC}) == []


def test_speeds_stay_while_the_spec_cannot_be_served() -> None:
    """Such as after an edit of the Model: its replicas serve on, and their conversations stay."""
    last = list_speeds(**{"gpu-a": 120.0, "studio-1": 30.0})
    assert list(report_node_speeds(last, (), {"gpu-a", "studio-1"}, {})) == last
    assert list(report_node_speeds(last, (), {"studio-1"}, {})) == []


def test_node_whose_speed_cannot_be_told_now_keeps_the_last_one() -> None:
    last = list_speeds(**{"gpu-a": 120.0, "studio-1": 30.0})
    assert report(last, list_classes(None, None)) == last
    assert report(last, list_classes(mac=None)) == last
    assert list(report_node_speeds(last, list_classes(), PLACES.keys(), {"gpu-a": H100})) == last


def test_rate_that_is_no_number_is_replaced() -> None:
    last = [NodeSpeed(node="gpu-a", tokens_per_second=""), NodeSpeed(node="studio-1", tokens_per_second="x")]
    assert report(last, list_classes()) == list_speeds(**{"gpu-a": 120.0, "studio-1": 30.0})


def test_list_is_bounded() -> None:
    observed = observe("gpu-a", *(f"studio-{number}" for number in range(150)))
    assert len(observed.nodes) == MOST_NODE_SPEEDS


def test_list_stays_bounded_when_nodes_come_that_are_sorted_before_it() -> None:
    """The API server would refuse the whole status."""
    places = {f"studio-{number}": H100 if number % 2 else MAC for number in range(100, 200)}
    last = report([], list_classes(), places)
    assert len(last) == MOST_NODE_SPEEDS
    more = dict.fromkeys(f"mac-{number}" for number in range(10))
    first = {node: places.get(node, MAC) for node in sorted((*places, *more))[:MOST_NODE_SPEEDS]}
    assert len(report_node_speeds(last, list_classes(), places.keys() | more.keys(), first)) == MOST_NODE_SPEEDS
