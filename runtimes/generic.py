"""Any image with an OpenAI-compatible API, as a service states its container in spec.container.

Pomona knows nothing of the engine, so nothing is asked of it but an API on loopback: Pomona's proxy in the same pod
checks the service's token, and forwards inference only. Settings that only the container's own arguments could state
are refused.
"""

from pathlib import PurePosixPath
from typing import Final, get_args

from crds.pods import ContainerOptions
from crds.serving import Mode
from runtimes.pod import RESERVED_FOLDERS, SERVICE_PORT, EnginePod, PodServing, find_overlap, refuse_device_variables
from runtimes.runtime import Runtime, RuntimeDemand

_VARIABLES: Final = frozenset({"MODEL_PATH", "PORT", "SERVICE_NAME"})
"""Variables that arguments may contain, such as $(MODEL_PATH)."""


def describe_container(container: ContainerOptions) -> EnginePod:
    """Return the `EnginePod` of an engine in a container that a service states."""

    def environment(pod: PodServing) -> dict[str, str]:
        """Return the variables of the service's container, and those that Pomona sets."""
        serving = pod.serving
        variables = {"MODEL_PATH": serving.model, "PORT": str(pod.listen.port), "SERVICE_NAME": serving.service}
        # Pomona's values take precedence.
        return {var.name: var.value for var in container.env} | variables

    return EnginePod(
        container="engine",
        images={},  # the service states the image
        command=tuple(container.command),
        arguments=lambda _pod: list(container.args),
        environment=environment,
        health_path=container.health_path,
        port=container.port,
        models_path=container.model_mount_path,
        read_only_root=False,
        from_container=describe_container,  # called again for each service, with its own container
    )


def refuse_container(demand: RuntimeDemand) -> str | None:
    """Return the first field of spec.container that no pod can have, with the way out, or None."""
    container = demand.container or ContainerOptions()
    if container.port == SERVICE_PORT:
        return f"container.port {container.port} is the port of Pomona's proxy in the same pod: use another one"
    path_text = container.model_mount_path
    path = PurePosixPath(path_text)
    is_ambiguous = ".." in path.parts or ":" in path_text or "//" in path_text
    # RESERVED_FOLDERS: those that Pomona or the container runtime mounts, such as /dev and /tmp.
    if is_ambiguous or find_overlap(path_text, RESERVED_FOLDERS):
        return f"container.modelMountPath {path} cannot hold weights: use a folder of its own, such as /models"
    # _VARIABLES: MODEL_PATH, PORT and SERVICE_NAME.
    if reserved := _VARIABLES & {var.name for var in container.env}:
        return f"container.env sets {min(reserved)}, which Pomona sets: remove it, or use another name"
    return refuse_device_variables("container.env", container.env)


RUNTIME: Final = Runtime(
    name="generic",
    formats=frozenset({"gguf", "safetensors"}),
    modes=frozenset[Mode](get_args(Mode)),
    pod=describe_container(ContainerOptions()),
    refusal=refuse_container,
)
