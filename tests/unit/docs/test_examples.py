"""Each accelerator in pods has an example, which nothing refuses."""

from pathlib import Path

import pytest

from controller.models.served import format_of, runtime_of
from controller.services.pods.devices import find_hardware_problem
from crds.inferenceservice import InferenceService
from crds.model import Model
from devices.vendors import VENDORS
from runtimes.quantization import refuse_quantization
from runtimes.registry import RUNTIMES
from runtimes.runtime import RuntimeDemand
from runtimes.runtime_choice import refuse_demand
from standalone.manifests import load_manifests
from tests.controlplane.process import CHECKOUT

FOLDER = CHECKOUT / "examples" / "vendors"
EXAMPLES = sorted(FOLDER.iterdir())


def read_example(path: Path) -> tuple[Model, InferenceService]:
    """Return the Model and the service of an example."""
    wanted = load_manifests([path])
    assert wanted.skipped == []
    ((_, model),) = wanted.models.items()
    ((_, service),) = wanted.services.items()
    return model, service


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_is_refused_by_nothing(path: Path) -> None:
    model, service = read_example(path)
    accelerator = service.spec.hardware.accelerator
    assert accelerator is not None
    vendor = VENDORS[accelerator]
    assert find_hardware_problem(service, accelerator, vendor) is None
    weights = format_of(model)
    engine = runtime_of(service, model, VENDORS)
    demand = RuntimeDemand(
        weights,
        accelerator,
        in_pods=True,
        options=service.spec,
        has_image=service.spec.image is not None,
        container=service.spec.container,
    )
    assert refuse_demand(RUNTIMES[engine], demand) is None
    for product in (*service.spec.hardware.products, ""):
        assert refuse_quantization("bfloat16", engine, accelerator, product) is None


def test_every_accelerator_in_pods_has_an_example_of_its_name() -> None:
    by_name = {path.stem: read_example(path)[1].spec.hardware.accelerator for path in EXAMPLES}
    in_pods = {name for name, vendor in VENDORS.items() if vendor.in_pods}
    assert {name: by_name.get(name) for name in in_pods} == {name: name for name in in_pods}
