"""A new engine is a module of `runtimes/` and its line in the registry: no CRD and no other file of the product.

The module is that of docs/add-an-engine.md.
"""

from pathlib import Path
from typing import Any

import pytest

from crds import validation
from crds.serving import ServingOptions
from devices.vendor_file import parse_vendors
from devices.vendors import VENDORS
from fitness.memory import Workload, estimate_pod, refuse_device_count
from fitness.serving_devices import describe_devices
from fitness.speed import estimate_speed
from gateway.proxy.config import Backend, ServiceListener
from gateway.proxy.errors import RequestError, translate_engine_error
from gateway.proxy.pod import PodProxyOptions
from gateway.proxy.request_schemas import check_engines
from kube.client import Obj
from kube.resources import DEPLOYMENTS, INFERENCE_SERVICES, MODELS
from runtimes.quantization import refuse_quantization
from runtimes.registry import RUNTIMES, list_pod_engines
from runtimes.runtime import Runtime
from tests.controlplane.process import CHECKOUT
from tests.support.api_objects import model
from tests.support.documents import list_blocks
from tests.support.page_tables import describe_engine, describe_pairs, describe_vendor
from tests.support.refused_manifests import make_manifest
from tests.support.service_decisions import chat_service, decide_chat, list_applied, ready_outcome
from tests.unit.fitness.test_speed import LLAMA_8B
from tests.unit.gateway.proxy.test_request_schemas import answer, array, read

PAGE = CHECKOUT / "docs" / "add-an-engine.md"


def load_module() -> Runtime:
    """Return the engine of the page, whose module is run as it stands there."""
    (code,) = list_blocks(PAGE.read_text(), "python")
    module: dict[str, Any] = {"__name__": "runtimes.quick"}
    exec(compile(code, str(PAGE), "exec"), module)  # noqa: S102 - the code of this repository
    runtime = module["RUNTIME"]
    assert isinstance(runtime, Runtime)
    return runtime


QUICK = load_module()


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RUNTIMES, QUICK.name, QUICK)  # the line of the registry


def decide(**spec: object) -> tuple[tuple[str, str, str], list[Obj]]:
    manifest = model(memoryBytes=1 << 31)
    plan = decide_chat(chat_service(runtime="quick", **spec), (MODELS, manifest))
    return ready_outcome(plan), list_applied(plan, DEPLOYMENTS)


def test_new_engine_serves_in_pods() -> None:
    _, (deployment,) = decide(hardware={"accelerator": "nvidia", "count": 2}, extraArgs=["--speed", "9"])
    (container,) = deployment["spec"]["template"]["spec"]["initContainers"]
    assert (container["name"], container["image"]) == ("quick", "registry.example/quick:1")
    assert container["args"][2:] == ["--devices", "2", "--speed", "9"]
    assert container["resources"]["limits"] == {VENDORS["nvidia"].resource: "2"}


def test_new_engine_is_refused_what_it_does_not_take() -> None:
    assert decide(hardware={"accelerator": "nvidia"}, extraArgs=["--fast"]) == (("Failed", "False", "InvalidSpec"), [])
    assert decide(hardware={"accelerator": "amd"}) == (("Failed", "False", "InvalidSpec"), [])


def test_schema_takes_a_new_engine() -> None:
    assert validation.problems(make_manifest(INFERENCE_SERVICES, runtime="quick")) == []


def test_new_engine_has_a_memory_a_speed_and_quantizations() -> None:
    workload, options = Workload(LLAMA_8B, "quick"), ServingOptions(context_length=4096)
    memory = estimate_pod(workload, options, 2)
    assert memory
    assert memory.device
    assert (memory.container_bytes, memory.device.total_bytes) == (7, LLAMA_8B.tensor_bytes + 4096)
    assert refuse_device_count(workload, 4) == "32 heads on 4"
    one, two = (
        estimate_speed(LLAMA_8B, options, "quick", describe_devices("nvidia", "NVIDIA GeForce RTX 4090", count=count))
        for count in (1, 2)
    )
    assert one
    assert two
    assert one.generation.expected < two.generation.expected
    refusal = refuse_quantization("Q4_K_M", "quick", "nvidia", "NVIDIA A100-SXM4-80GB")
    assert refusal
    assert "quick on nvidia from ada on" in refusal


def test_answers_of_a_new_engine_are_judged_by_its_rows() -> None:
    assert translate_engine_error(500, b"too slow", "chat", "quick").status == 400
    backend = Backend("one", "http://127.0.0.1:1", engine="quick")
    service = ServiceListener("a/chat", "127.0.0.1", 0, "token", (backend,))
    check_engines(read(**answer(array(maxItems=9))).schema_demand, service)
    with pytest.raises(RequestError, match="quick ends by a bound above 9"):
        check_engines(read(**answer(array(maxItems=10))).schema_demand, service)


def test_metrics_of_a_new_engine_are_passed_on() -> None:
    options = PodProxyOptions("team/chat", "", 8080, Path("token"), 8000, "/health", engine="quick")
    metrics = options.engine_metrics
    assert metrics
    assert (metrics.path, metrics.prefixes) == ("/metrics", ("quick_",))
    assert options._replace(engine="generic").engine_metrics is None


def test_administrator_and_reader_of_the_documents_know_a_new_engine() -> None:
    vendors = parse_vendors("amd: {images: {quick: registry.example/quick:2}}\n", list_pod_engines())
    assert vendors["amd"].images["quick"] == "registry.example/quick:2"
    assert "`registry.example/quick:1`" in describe_engine(QUICK)
    assert "| quick | GGUF | nvidia |" in describe_pairs()
    assert "| quick | unquantized, gguf (from ada on) |" in describe_vendor("nvidia", VENDORS["nvidia"])
