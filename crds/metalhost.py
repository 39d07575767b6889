"""`MetalHost`: an off-cluster host run by a metal agent, as a Node is for a kubelet."""

from typing import Annotated

from crds.meta import Conditions, ObjectMeta, Resource, described, keyed_by, rule


class MetalHostSpec(Resource, frozen=True):
    """Nothing yet: a host is registered by its agent and wants nothing."""


class HostProcess(Resource, frozen=True):
    """One process whose memory the host's availableBytes already subtracts."""

    uid: Annotated[str, described("metadata.uid of the MetalProcess.")]
    namespace: Annotated[str, described("Namespace of the MetalProcess.")] = ""
    name: Annotated[str, described("Name of the MetalProcess.")] = ""
    memory_bytes: Annotated[int | None, described("Bytes reserved for it.", format="int64")] = None


class MetalHostStatus(Resource, frozen=True):
    """Facts that the agent reports. A fact that is not known is absent, never 0."""

    address: Annotated[str, described("Address at which the cluster reaches this host's services.")] = ""
    chip: Annotated[str, described("Chip, for example Apple M4 Max.")] = ""
    cpu_cores: Annotated[int | None, described("Processor cores.", format="int32")] = None
    os: Annotated[str, described("Operating system, for example macOS 26.1.")] = ""
    architecture: Annotated[str, described("Processor architecture, for example arm64.")] = ""
    memory_bytes: Annotated[int | None, described("Memory of the host.", format="int64")] = None
    budget_bytes: Annotated[int | None, described("Memory that models may use in all.", format="int64")] = None
    available_bytes: Annotated[
        int | None, described("Budget that is free now, less all in processes.", format="int64")
    ] = None
    available: Annotated[str, described("Free budget for people, for example 20.5 GiB.")] = ""
    agent_version: Annotated[str, described("Version of the metal agent.")] = ""
    runtimes: Annotated[
        list[str], described("Engines that this host can run.", **{"x-kubernetes-list-type": "set"})
    ] = []
    processes: Annotated[
        list[HostProcess],
        described("Processes whose memory is already subtracted from availableBytes.", **keyed_by("uid")),
    ] = []
    conditions: Conditions = []


class MetalHost(Resource, frozen=True):
    """An off-cluster host that serves models as native processes."""

    metadata: ObjectMeta
    spec: Annotated[MetalHostSpec, described("Nothing: a host is registered by its agent.")] = MetalHostSpec()
    status: Annotated[MetalHostStatus, described("Facts reported by the agent, and whether it is alive.")] = (
        MetalHostStatus()
    )
    api_version: str = ""
    kind: str = ""


NAME_RULE = rule(
    "size(self.metadata.name) <= 63",
    "use a name of at most 63 characters, as a MetalProcess's spec.hostName takes no more",
)
"""Held on the whole object: a host with a longer name could be registered and never be bound."""
