"""The description of an engine in a pod: image, arguments, environment, health path and metrics.

A pod is made of three things that do not know each other: the vendor's entry (`devices/vendors.py`), the engine's
`EnginePod`, and the service. An engine module fills an `EnginePod` in; the controller reads it and names no engine.
"""

import posixpath
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from artifacts.repositories.address_policy import Networks
from crds.pods import ContainerOptions, EnvVar
from devices.vendors import Vendor, explain_device_variable, is_runtime_variable
from runtimes.daemon import DaemonError, OnProgress
from runtimes.serving import Listen, Serving

SERVICE_PORT: Final = 8080
"""Port of every pod that serves: that of Pomona's proxy, which checks the token; engines listen on loopback."""
RESERVED_FOLDERS: Final = (
    *("/dev", "/proc", "/sys", "/tmp"),  # noqa: S108 - the container's own
    # /var/run is a link to /run in most images.
    *("/run/secrets", "/var/run/secrets"),
)
"""Folders of every container that Pomona or the container runtime mounts, so that no user can mount a volume there."""
LABEL_ARCHITECTURE: Final = "kubernetes.io/arch"
"""Label of each node with its processor."""


class PodServing(NamedTuple):
    """One engine in one pod, as its renderers see it."""

    serving: Serving
    listen: Listen
    vendor: Vendor
    devices: int = 0
    """Devices of the vendor that the container gets; 0: it runs on the processor."""
    cache_bytes: int | None = None
    """Bytes of the KV cache in the container's memory, for an engine that takes them as an argument; None: unknown."""
    chat_format: str = ""
    """Form of the model's chat template; empty: it is unknown, or the image may have other parsers of it."""


class EngineMetrics(NamedTuple):
    """Names of an engine's Prometheus metrics, without labels; None where the engine has none.

    Pomona's proxy reads `path`, and adds the series with one of `prefixes` to its own, which a service's traffic comes
    from. The other names are for the dashboards of users: only the page of the engine shows them, and tests compare
    them with the real metrics.
    """

    requests_running: str
    requests_waiting: str | None
    prompt_tokens: str | None
    generated_tokens: str | None
    prefixes: tuple[str, ...]
    """Prefixes of the names of all its series, those of its libraries included, in order."""
    requests: str | None = None
    """Counter of the requests that have ended."""
    cache_usage: str | None = None
    """Share of the KV cache in use, from 0 to 1."""
    first_token_seconds: str | None = None
    """Histogram."""
    request_seconds: str | None = None
    """Histogram of whole requests."""
    path: str = "/metrics"


class PodModel(NamedTuple):
    """The model that an engine gets before the first request, and the engine itself."""

    port: int
    """Port of the engine on 127.0.0.1."""
    name: str
    """Name of the model in the engine."""
    source: str
    """ollama://NAME:TAG, or the path of a GGUF file."""
    context_length: int
    """Tokens of context of one request."""
    allowed_networks: Networks = ()
    """Private networks from which models may be pulled."""
    threads: int | None = None
    """Threads on the processor; None leaves them to the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePod:
    """One engine as it runs in a pod."""

    container: str
    """Name of its container."""
    images: Mapping[str, str]
    """Container image by vendor. A vendor's own entry may name another one, or one that is missing here."""
    architectures: Mapping[str, str] = field(default_factory=dict)
    """Processor, as kubernetes.io/arch names it, of each of these images that is built for one only."""
    arguments: Callable[[PodServing], list[str]]
    """Render the container's arguments. They contain no secret."""
    environment: Callable[[PodServing], Mapping[str, str]] = lambda _pod: {}
    """Render its variables; those of the vendor's entry are added, and none is a secret."""
    command: tuple[str, ...] = ()
    """Entry point; empty: that of the image."""
    health_path: str = "/health"
    """Path that answers 200 once the model is loaded; the proxy asks it."""
    port: int = 8000
    """Port on loopback, behind the proxy."""
    served_name: Callable[[Serving], str | None] = lambda _serving: None
    """Its name for the model, which the proxy writes into requests; None: it takes any name."""
    store: str | None = None
    """Folder that it may write and in which it keeps a copy of the weights."""
    prepare: Callable[[PodModel, OnProgress, Callable[[DaemonError], None]], Awaitable[None]] | None = None
    """Bring the model into that folder before the first request, and report progress and failures; `pomona pod-proxy`
    calls it. May raise DaemonError. None: the engine is started with its model."""
    has_slots: bool = False
    """True if the proxy sends it no more requests at once than `parallel`, and queues the others."""
    models_path: str | None = None
    """Path at which it finds the volume of weights; None: the same as for every engine."""
    from_container: "Callable[[ContainerOptions], EnginePod] | None" = None
    """For an engine that Pomona does not know: make its description from the container that the service states."""
    metrics: EngineMetrics | None = None
    cores: int | None = None
    """Cores that it wants with devices, beside one for each of them; None: unknown, so that its pods request none."""
    shared_memory: bool = False
    """True if its processes exchange tensors by /dev/shm, which is 64 MiB in a container unless it is mounted."""
    compiles: bool = False
    """True if it compiles code at its start, below its HOME: that is kept for later pods."""
    read_only_root: bool = True
    """False if the image writes outside of /tmp and its home."""
    warning: str | None = None
    """Remark about the engine that its users should read, such as that it is maintained no more."""

    slow_on_processor: str | None = None
    """Remark for users of the engine on a processor, where it serves, but is meant for devices."""

    def find_image(self, vendor_name: str, vendor: Vendor, engine: str) -> str | None:
        """Return the default image for a vendor, or None if there is none."""
        return vendor.images.get(engine) or self.images.get(vendor_name)

    def is_of_version(self, image: str | None) -> bool:
        """Return whether an image has the version of `images`: it may be one for another processor, or a copy."""
        versions = [name.rpartition(":")[2].partition("-")[0] for name in (image or "", *self.images.values())]
        return versions[0] in versions[1:]

    def select_nodes(self, image: str | None) -> dict[str, str]:
        """Return the labels of the nodes whose processor can run an image; none if it runs on any."""
        architecture = self.architectures.get(image or "")
        return {LABEL_ARCHITECTURE: architecture} if architecture else {}


def find_overlap(path: str, folders: Iterable[str]) -> str | None:
    """Return the first of `folders` that is at, above or below an absolute path, or None."""
    path_parts = _split_path(path)
    for folder in folders:
        folder_parts = _split_path(folder)
        length = min(len(path_parts), len(folder_parts))
        if path_parts[:length] == folder_parts[:length]:
            return folder
    return None


def _split_path(path: str) -> list[str]:
    """Return the folders of an absolute path; `..`, `.` and repeated slashes are resolved."""
    return [part for part in posixpath.normpath(path).split("/") if part]


def refuse_device_variables(field: str, variables: Iterable[EnvVar]) -> str | None:
    """Return which variable of a user would get devices past the device plugin, with the way out, or None."""
    for variable in variables:
        if reason := explain_device_variable(variable.name):
            return f"{field} sets {variable.name} to {variable.value!r}, {reason}: remove it, and state hardware.count"
        if is_runtime_variable(variable.name):
            return (
                f"{field} sets {variable.name} to {variable.value!r}, by which NVIDIA's container runtime would give "
                "the container more of its node: remove it; an administrator may set it for an accelerator by "
                "`pomona controller --vendors`"
            )
    return None
