"""A service shows the measured speed of its model on the hardware of its replicas, and hears of each change."""

from typing import Any

import pytest
from msgspec import structs

from controller.reconcile.plan import Snapshot
from controller.services.device_classes import find_replica_class
from controller.services.performance_source import PerformanceSource
from controller.services.speed_report import SpeedReport
from crds.rate import format_rate
from devices.vendors import VENDORS
from fitness.performance import MeasuredPerformance
from fitness.performance_store import RecordKey, build_config_map, follow_measurements, put_record
from kube.client import Obj
from kube.resources import CONFIG_MAPS, METAL_HOSTS, MODELS, NODE_FITNESSES, NODES, ObjectKey
from kube.store import Store
from tests.support.api_objects import NOW, as_service, host, model, service, store
from tests.support.service_decisions import chat_service, decide_chat

HASH, OTHER = "3f9a0c51d2e84b77", "00000000000000aa"
KEY = ObjectKey("team", "chat")
FAST = MeasuredPerformance(
    tokens_per_second=112.4,
    prompt_tokens_per_second=3400.5,
    time_to_first_token_ms=41.4,
    measured_at="2026-11-26T10:00:00Z",
)
SLOW = structs.replace(FAST, tokens_per_second=7.52, prompt_tokens_per_second=None, time_to_first_token_ms=None)


def measured(model_hash: str = HASH, **records: MeasuredPerformance) -> Obj:
    data: dict[str, str] = {}
    for name, record in records.items():
        device_class, _, namespace = name.partition("_")
        data = put_record(data, RecordKey(device_class, namespace), record).data
    return build_config_map(model_hash, data)


class Watched:
    """A store whose measurements are followed, and the services that were enqueued."""

    def __init__(self, *there: Obj) -> None:
        self.enqueued: list[ObjectKey] = []
        self.store: Store = store(*((CONFIG_MAPS, config_map) for config_map in there))
        self.source = PerformanceSource(self.store, follow_measurements(self.store), self.enqueued.append)

    def put(self, obj: Obj) -> None:
        metadata = {**obj["metadata"], "resourceVersion": str(100 + self.store.revision)}
        self.store.put(CONFIG_MAPS, {**obj, "metadata": metadata})


def test_slowest_of_the_classes_of_the_replicas_is_shown() -> None:
    source = Watched(measured(h100=FAST, l4=SLOW, t4=SLOW)).source
    fast = source.find_performance(KEY, HASH, {"h100"})
    assert fast is not None
    assert (fast.tokens_per_second, fast.prompt_tokens_per_second, fast.time_to_first_token_ms) == ("112", "3400", 41)
    assert (fast.device_class, fast.model_hash, fast.source) == ("h100", HASH, "job")
    assert fast.measured_at == "2026-11-26T10:00:00Z"
    slow = source.find_performance(KEY, HASH, {"h100", "l4"})
    assert slow is not None
    assert (slow.tokens_per_second, slow.prompt_tokens_per_second, slow.time_to_first_token_ms) == ("7.5", "", None)
    assert slow.device_class == "l4"


def test_unmeasured_hardware_shows_nothing() -> None:
    source = Watched(measured(h100=FAST)).source
    assert source.find_performance(KEY, HASH, {"l4"}) is None
    assert source.find_performance(KEY, HASH, ()) is None
    assert source.find_performance(KEY, OTHER, {"h100"}) is None


def test_claim_of_another_namespace_is_not_shown() -> None:
    source = Watched(measured(h100_other=FAST, l4_team=SLOW)).source
    assert source.find_performance(KEY, HASH, {"h100"}) is None
    assert source.find_performance(KEY, HASH, {"l4"}) is not None


def test_change_of_a_measurement_concerns_the_services_of_its_model_alone() -> None:
    watched = Watched()
    other = ObjectKey("team", "other")
    watched.source.find_performance(KEY, HASH, {"h100"})
    watched.source.find_performance(other, OTHER, {"h100"})
    watched.put(measured(h100=FAST))
    assert watched.enqueued == [KEY]
    watched.put(measured(OTHER, h100=FAST))
    assert watched.enqueued == [KEY, other]
    watched.store.remove(CONFIG_MAPS, "pomona-system", f"bench-{HASH}")
    assert watched.enqueued == [KEY, other, KEY]
    assert watched.source.find_performance(KEY, HASH, {"h100"}) is None


def test_service_that_is_gone_or_has_another_model_is_not_enqueued() -> None:
    watched = Watched()
    watched.source.find_performance(KEY, HASH, {"h100"})
    watched.source.find_performance(KEY, OTHER, {"h100"})
    watched.put(measured(h100=FAST))
    assert watched.enqueued == []
    watched.source.forget(KEY)
    watched.put(measured(OTHER, h100=FAST))
    assert watched.enqueued == []


def test_config_map_of_another_namespace_is_no_measurement() -> None:
    foreign = measured(h100=FAST)
    foreign["metadata"]["namespace"] = "team"
    assert Watched(foreign).source.find_performance(KEY, HASH, {"h100"}) is None


@pytest.mark.parametrize(
    ("rate", "shown"), [(1234.6, "1235"), (100, "100"), (99.96, "100.0"), (7.52, "7.5"), (0.0123, "0.012"), (0, "0.0")]
)
def test_rate_is_a_decimal_number(rate: float, shown: str) -> None:
    assert format_rate(rate) == shown


def node(name: str = "n1", product: str = "NVIDIA-H100-80GB-HBM3", **labels: str) -> Obj:
    shown = {"nvidia.com/gpu.product": product} if product else {}
    metadata = {"name": name, "uid": name, "resourceVersion": "1", "labels": shown | labels}
    return {"metadata": metadata, "status": {"allocatable": {"nvidia.com/gpu": "8", "cpu": "16"}}}


def find_class(accelerators: str, *objects: Any, place: str = "n1", **spec: Any) -> str | None:
    snapshot = Snapshot(store(*objects), NOW)
    return find_replica_class(snapshot, as_service(service(**spec)), accelerators.split(","), place, VENDORS)


def test_class_of_a_pod_is_that_of_the_devices_of_its_node() -> None:
    two: dict[str, Any] = {"hardware": {"accelerator": "nvidia", "count": 2}}
    assert find_class("nvidia", (NODES, node())) == "nvidia-h100-80gb-hbm3x1"
    assert find_class("nvidia", (NODES, node()), **two) == "nvidia-h100-80gb-hbm3x2"
    assert find_class("amd,nvidia", (NODES, node())) == "nvidia-h100-80gb-hbm3x1"


def test_hardware_that_does_not_say_what_it_is_has_no_class() -> None:
    assert find_class("nvidia", (NODES, node(product=""))) is None
    assert find_class("amd", (NODES, node())) is None
    assert find_class("nvidia") is None
    assert find_class("cpu", (NODES, node())) is None
    shared = {"nvidia.com/gpu.sharing-strategy": "time-slicing", "nvidia.com/gpu.replicas": "4"}
    assert find_class("nvidia", (NODES, node(**shared))) is None


def test_class_of_a_host_is_its_chip() -> None:
    studio = host("n1", chip="Apple M2 Ultra", gpuCores=76, memoryBytes=192 * 2**30)
    assert find_class("metal", (METAL_HOSTS, studio)) == "apple-m2-ultra-76c-192gb"
    assert find_class("nvidia,metal", (METAL_HOSTS, studio)) == "apple-m2-ultra-76c-192gb"
    assert find_class("metal", (METAL_HOSTS, host("n1", chip=""))) is None


def test_class_of_a_processor_has_its_cores() -> None:
    fitness = {"metadata": {"name": "n1", "uid": "f", "resourceVersion": "1"}, "status": {"processor": "AMD EPYC 7763"}}
    there = ((NODES, node()), (NODE_FITNESSES, fitness))
    assert find_class("cpu", *there) == "cpu-amd-epyc-7763x16"
    assert find_class("cpu", *there, resources={"cpu": "3500m"}) == "cpu-amd-epyc-7763x4"


def test_status_has_all_of_the_measurement() -> None:
    shown = Watched(measured(h100=FAST)).source.find_performance(KEY, HASH, {"h100"})
    status = decide_chat(chat_service(), (MODELS, model()), speed=SpeedReport(performance=shown)).status
    assert status is not None
    assert status["performance"] == {
        "tokensPerSecond": "112",
        "promptTokensPerSecond": "3400",
        "timeToFirstTokenMs": 41,
        "source": "job",
        "deviceClass": "h100",
        "modelHash": HASH,
        "measuredAt": "2026-11-26T10:00:00Z",
    }
    unknown = decide_chat(chat_service(), (MODELS, model())).status
    assert unknown is not None
    assert "performance" not in unknown
