"""The container of any image: its variables, and what of it is refused."""

from typing import Any

import pytest

from crds.pods import ContainerOptions, EnvVar
from crds.serving import ServingOptions
from devices.vendors import CPU
from runtimes.generic import RUNTIME, describe_container
from runtimes.pod import PodServing
from runtimes.registry import RUNTIMES
from runtimes.runtime import RuntimeDemand
from runtimes.runtime_choice import refuse_demand
from runtimes.serving import Listen, Serving

DEMAND = RuntimeDemand(format="gguf", accelerator="cpu", in_pods=True, has_image=True)


def refused(**container: Any) -> str:
    return refuse_demand(RUNTIME, DEMAND._replace(container=ContainerOptions(**container))) or ""


def test_container_gets_the_place_of_the_weights_in_variables() -> None:
    options = ContainerOptions(command=["/serve"], args=["--model=$(MODEL_PATH)"], env=[EnvVar("THREADS", "4")])
    engine = describe_container(options)
    serving = Serving("chat", "/models/0123/tiny.gguf", ServingOptions())
    pod = PodServing(serving, Listen("127.0.0.1", engine.port), CPU)
    assert (engine.command, engine.arguments(pod)) == (("/serve",), ["--model=$(MODEL_PATH)"])
    expected = {"MODEL_PATH": "/models/0123/tiny.gguf", "PORT": "8000", "SERVICE_NAME": "chat", "THREADS": "4"}
    assert engine.environment(pod) == expected


def test_ordinary_container_is_accepted() -> None:
    assert refused() == ""
    assert refused(port=9000, model_mount_path="/opt/weights", env=[EnvVar("THREADS", "4")]) == ""


@pytest.mark.parametrize(
    ("container", "named"),
    [
        ({"port": 8080}, "container.port 8080 is the port of Pomona's proxy"),
        ({"model_mount_path": "/"}, "container.modelMountPath / cannot hold weights: use"),
        ({"model_mount_path": "/var"}, "container.modelMountPath /var cannot"),
        ({"model_mount_path": "/tmp/x"}, "container.modelMountPath /tmp/x cannot"),
        ({"model_mount_path": "/run/secrets/pomona"}, "container.modelMountPath /run/secrets/pomona cannot"),
        ({"model_mount_path": "/models/../etc"}, "container.modelMountPath /models/../etc cannot"),
        ({"model_mount_path": "//"}, "cannot hold weights"),
        ({"model_mount_path": "/a:b"}, "cannot hold weights"),
        ({"env": [EnvVar("PORT", "1")]}, "container.env sets PORT"),
        ({"env": [EnvVar("NVIDIA_VISIBLE_DEVICES", "all")]}, "container.env sets NVIDIA_VISIBLE_DEVICES to 'all', by"),
        ({"env": [EnvVar("HABANA_VISIBLE_DEVICES", "all")]}, "container.env sets HABANA_VISIBLE_DEVICES to 'all', by"),
        ({"env": [EnvVar("HIP_VISIBLE_DEVICES", "all")]}, "container.env sets HIP_VISIBLE_DEVICES to 'all', which"),
        ({"env": [EnvVar("NVIDIA_MIG_CONFIG_DEVICES", "all")]}, "hardware.count"),
        ({"env": [EnvVar("CUDA_VERSION", "12.4")]}, "container.env sets CUDA_VERSION to '12.4', by which a node"),
        ({"env": [EnvVar("NVIDIA_MOFED", "enabled")]}, "container.env sets NVIDIA_MOFED to 'enabled', by which NVIDIA"),
    ],
)
def test_container_that_no_pod_can_have_is_refused(container: dict[str, Any], named: str) -> None:
    assert named in refused(**container)


def test_image_is_demanded() -> None:
    assert "name an image in spec.image" in (refuse_demand(RUNTIME, DEMAND._replace(has_image=False)) or "")


def test_container_of_another_engine_is_refused() -> None:
    demand = DEMAND._replace(container=ContainerOptions())
    assert "set runtime to generic" in (refuse_demand(RUNTIMES["llama.cpp"], demand) or "")


def test_settings_that_only_arguments_could_state_are_refused() -> None:
    demand = DEMAND._replace(options=ServingOptions(parallel=2))
    assert "cannot do parallel" in (refuse_demand(RUNTIME, demand) or "")
    demand = DEMAND._replace(options=ServingOptions(extra_args=["--any"]))
    assert "takes none" in (refuse_demand(RUNTIME, demand) or "")
