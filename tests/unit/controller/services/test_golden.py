"""Every pair of engine and accelerator is kept as the Deployment that the controller applies, in golden/.

A pair is one for which the engine or the vendor has an image, or the table of quantizations has an entry, or the engine
takes any container: then the service names the image. `make golden` writes the files.
"""

import json
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from controller.placement.nodes import NodeSize
from controller.pod_settings import PodSettings
from controller.services.pods.deployment import build_deployment
from controller.services.pods.pod_template import EngineChoice, MountedWeights
from controller.services.serving_choice import apply_choice, choose_cpu
from crds.meta import Accelerator
from crds.serving import RuntimeName, ServingChoice
from devices.vendors import VENDORS
from kube.client import Obj
from runtimes.registry import RUNTIMES
from tests.support.api_objects import GIB, as_service, service
from tests.support.kept_text import IS_WRITING, check_kept_text

FOLDER = Path(__file__).with_name("golden")
STATED_IMAGE = "registry.example/engine:1.0"
LARGEST_CPU = 64_000
"""Millicores of the largest node, or for each of its devices."""
POMONAS_IMAGE = "registry.example/pomona:1.0"
CONTAINER: Obj = {
    "args": ["--model", "$(MODEL_PATH)", "--host", "127.0.0.1", "--port", "$(PORT)"],
    "env": [{"name": "LOG_LEVEL", "value": "info"}],
    "port": 9000,
    "healthPath": "/healthz",
}
WEIGHTS = {"gguf": "0123456789abcdef/Qwen3-8B-Q4_K_M.gguf", "safetensors": "0123456789abcdef"}


class Case(NamedTuple):
    """A pair, and the devices of each pod."""

    engine: RuntimeName
    accelerator: Accelerator
    devices: int = 1

    @property
    def path(self) -> Path:
        """The file of the pair."""
        several = f"-{self.devices}-devices" if self.devices > 1 else ""
        return FOLDER / f"{self.engine}-{self.accelerator}{several}.yaml"


def list_pairs() -> list[Case]:
    """Return the pairs that the tables allow."""
    return [
        Case(name, accelerator)
        for name, runtime in RUNTIMES.items()
        if runtime.pod is not None
        for accelerator, vendor in VENDORS.items()
        if vendor.in_pods
        and (
            runtime.pod.from_container
            or runtime.pod.find_image(accelerator, vendor, name)
            or accelerator in RUNTIMES[name].quantizations
        )
    ]


CASES = [*list_pairs(), *(Case("vllm", accelerator, devices=8) for accelerator in ("nvidia", "intel-gaudi"))]


def render(case: Case) -> str:
    """Return the text of a golden file."""
    pod, vendor = RUNTIMES[case.engine].pod, VENDORS[case.accelerator]
    assert pod is not None
    spec: Obj = {"modelRef": "qwen3-8b", "runtime": case.engine, "contextLength": 8192}
    spec["hardware"] = {"accelerator": case.accelerator} | ({"count": case.devices} if case.devices > 1 else {})
    if pod.find_image(case.accelerator, vendor, case.engine) is None:
        spec["image"] = STATED_IMAGE
    if pod.from_container:
        spec["container"] = CONTAINER
    stated = as_service(service(**spec))
    weights_format = "gguf" if "gguf" in RUNTIMES[case.engine].formats else "safetensors"
    weights = MountedWeights("qwen3-8b-cache", WEIGHTS[weights_format], 8 * GIB, has_one_node=True)
    choice = EngineChoice(
        case.engine, case.accelerator, vendor, 12 * GIB, cache_bytes=2 * GIB, container=stated.spec.container
    )
    devices = case.devices if vendor.resource else 0
    cpu = choose_cpu(pod, devices, [NodeSize(None, 0, LARGEST_CPU)])
    stated = apply_choice(stated, ServingChoice(context_length=8192, cpu=cpu))
    _, obj = build_deployment(stated, choice, weights, settings=PodSettings(image=POMONAS_IMAGE))
    beside = f" with {case.devices} of {vendor.resource}" if vendor.resource else ""
    return (
        f"# Deployment of a service with engine {case.engine} on accelerator {case.accelerator}{beside}.\n"
        "# `make golden` writes this file.\n" + dump_plainly(obj)
    )


def dump_plainly(obj: Obj) -> str:
    """Return YAML in the order of the object, without anchors for what occurs twice."""
    # A copy by JSON shares no part.
    return yaml.safe_dump(json.loads(json.dumps(obj)), sort_keys=False, width=120)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.path.stem)
def test_deployment_of_a_pair_is_as_it_was_read(case: Case) -> None:
    check_kept_text(case.path, render(case))


def test_every_golden_file_has_a_pair() -> None:
    orphans = sorted(set(FOLDER.iterdir()) - {case.path for case in CASES})
    if IS_WRITING:
        for path in orphans:
            path.unlink()
        return
    assert [path.name for path in orphans] == [], "run `make golden`"
