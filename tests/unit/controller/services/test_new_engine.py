"""A new engine is a module of `runtimes/` and its line in the registry: no CRD and no file of the controller."""

from types import MappingProxyType

import pytest

from controller.services import preconditions
from controller.services.pods import pod_template
from crds import validation
from devices.vendors import VENDORS
from kube.client import Obj
from kube.resources import DEPLOYMENTS, INFERENCE_SERVICES, MODELS
from runtimes.pod import EnginePod, PodServing
from runtimes.registry import RUNTIMES
from runtimes.runtime import Runtime
from tests.support.api_objects import model
from tests.support.refused_manifests import make_manifest
from tests.support.service_decisions import chat_service, decide_chat, list_applied, ready_outcome


def arguments(pod: PodServing) -> list[str]:
    return ["--weights", pod.serving.model, "--devices", str(pod.devices), *pod.serving.options.extra_args]


QUICK = Runtime(
    name="quick",
    formats=frozenset({"gguf"}),
    modes=frozenset({"chat"}),
    tuning=("--speed",),
    on_hosts=False,
    pod=EnginePod(container="quick", images={"nvidia": "registry.example/quick:1"}, arguments=arguments),
)


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    known = MappingProxyType({**RUNTIMES, QUICK.name: QUICK})
    for module in (pod_template, preconditions):
        monkeypatch.setattr(module, "RUNTIMES", known)


def decide(**spec: object) -> tuple[tuple[str, str, str], list[Obj]]:
    known = model(memoryBytes=1 << 31)
    plan = decide_chat(chat_service(runtime="quick", **spec), (MODELS, known))
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
