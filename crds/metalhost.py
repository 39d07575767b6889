"""`MetalHost`: an off-cluster host run by a metal agent; the counterpart of a Node with a kubelet."""

from typing import Annotated, Final, Literal

from msgspec import Meta

from crds.meta import (
    AS_SET,
    Amount,
    ApiObject,
    ApiStruct,
    Conditions,
    Count,
    LabelName,
    ShortText,
    Time,
    keyed_by,
    rule,
)

MOST_WEIGHTS: Final = 128
"""Identities of weights that a host reports at most."""


_LABEL_PART = r"[A-Za-z0-9]([-_.A-Za-z0-9]*[A-Za-z0-9])?"


class HostTaint(ApiStruct, frozen=True):
    """A taint of a host, as a Node has them."""

    key: Annotated[
        str,
        Meta(min_length=1, max_length=253),
        "Key of the taint, for example dedicated or example.com/owner.",
        {"pattern": f"^([a-z0-9]([-.a-z0-9]*[a-z0-9])?/)?{_LABEL_PART}$"},
    ]
    effect: Annotated[
        Literal["NoSchedule", "NoExecute"],
        "NoSchedule: no process is placed on the host whose service does not tolerate the taint. NoExecute: those "
        "that run there move as well, each as soon as its replacement on another host answers.",
    ]
    value: Annotated[
        str, Meta(max_length=63), "Value of the taint, for example research.", {"pattern": f"^({_LABEL_PART})?$"}
    ] = ""

    @property
    def text(self) -> str:
        """The taint as commands and messages have it."""
        return f"{self.key}{'=' if self.value else ''}{self.value}:{self.effect}"


class MetalHostSpec(ApiStruct, frozen=True):
    """Decisions of an administrator about a host, which its agent registers without any."""

    namespaces: Annotated[
        list[LabelName],
        Meta(max_length=256),
        "Namespaces whose services this host may run. If the list is empty, the host runs services of all "
        "namespaces. Processes that run already stay when the list changes. To hold a new host to some namespaces "
        "from its start, create its MetalHost before its agent starts.",
        AS_SET,
    ] = []
    unschedulable: Annotated[
        bool,
        "True: the host is cordoned, and no process is placed on it any more. Processes that run there stay. "
        "The command pomona host cordon sets it, pomona host uncordon removes it.",
    ] = False
    drain: Annotated[
        bool,
        "True: the host is drained: no process is placed on it any more, and each of its processes is replaced on "
        "another host, serves until the replacement answers, and is then stopped. A process that fits on no other "
        "host stays and serves on: see the condition Drained. False ends the drain: what was not replaced yet "
        "stays. The command pomona host drain sets it, pomona host uncordon removes it.",
    ] = False

    taints: Annotated[
        list[HostTaint],
        Meta(max_length=64),
        "Taints of the host, as a Node has them. Only services run there whose spec.tolerations tolerate all of "
        "them. The command pomona host taint edits the list.",
        keyed_by("key", "effect"),
    ] = []

    @property
    def is_cordoned(self) -> bool:
        """True if an administrator places nothing more on the host."""
        return self.unschedulable or self.drain


class HostProcess(ApiStruct, frozen=True):
    """One process whose memory the host's availableBytes already subtracts."""

    uid: Annotated[ShortText, "metadata.uid of the MetalProcess."]
    namespace: Annotated[ShortText, "Namespace of the MetalProcess."] = ""
    name: Annotated[ShortText, "Name of the MetalProcess."] = ""
    memory_bytes: Annotated[Amount | None, "Memory reserved for the process, in bytes."] = None


class CoreLevel(ApiStruct, frozen=True):
    """The processor cores of one performance level."""

    name: Annotated[ShortText, "Name that the operating system gives the level, for example Performance."]
    cores: Annotated[Count, "Number of cores of this level."]


class MetalHostStatus(ApiStruct, frozen=True):
    """Observed state of a host, as its agent reports it. An unknown value is absent, never 0.

    A value that changes all the time is read once a minute, and written when it has changed by at least one step.
    """

    address: Annotated[ShortText, "Address at which the cluster reaches this host's services."] = ""
    reachability_port: Annotated[
        Annotated[int, Meta(ge=1024, le=65535)] | None,
        "Port at which the agent answers with the name of the host; the controller asks there whether the cluster "
        "reaches the host, and reports that in condition Reachable.",
    ] = None
    chip: Annotated[ShortText, "Chip, for example Apple M4 Max."] = ""
    machine: Annotated[ShortText, "Model identifier of the machine, for example Mac16,9."] = ""
    cpu_cores: Annotated[Count | None, "Number of processor cores."] = None
    core_levels: Annotated[
        list[CoreLevel], Meta(max_length=16), "Processor cores by performance level, the fastest first."
    ] = []
    gpu_cores: Annotated[Count | None, "Number of GPU cores."] = None
    os: Annotated[ShortText, "Operating system, for example macOS 26.1."] = ""
    architecture: Annotated[ShortText, "Processor architecture, for example arm64."] = ""
    memory_bytes: Annotated[Amount | None, "Memory of the host, in bytes."] = None
    memory_bandwidth_bytes_per_second: Annotated[
        Amount | None,
        "Memory bandwidth of the chip in bytes per second, according to its maker. The bandwidth limits tokens/s.",
    ] = None
    working_set_bytes: Annotated[Amount | None, "Maximum memory that Metal recommends to use, in bytes."] = None
    wired_limit_bytes: Annotated[
        Amount | None,
        "Memory that Metal may wire, in bytes. Absent unless the owner has set sysctl iogpu.wired_limit_mb.",
    ] = None
    boot_id: Annotated[ShortText, "Identifier of the current boot; it changes when the host is restarted."] = ""
    booted_at: Annotated[Time | None, "When the host was started."] = None
    memory_pressure: Annotated[
        ShortText, "Memory pressure of the host when it was last read: normal, warn or critical."
    ] = ""
    swap_used_bytes: Annotated[Amount | None, "Swap in use, in bytes, updated in steps of about 1 GiB."] = None
    gpu_used_bytes: Annotated[
        Amount | None, "Memory that all processes use on the GPU, in bytes, updated in steps of about 1 GiB."
    ] = None
    thermal_level: Annotated[
        ShortText,
        "Thermal level. nominal: normal. moderate or heavy: the host slows itself down. trapping or sleeping: "
        "the host is about to stop.",
    ] = ""
    power_source: Annotated[ShortText, "Power source: ac, battery or ups."] = ""
    battery_percent: Annotated[
        Count | None,
        "Charge of the battery in percent, updated in steps of about 10. Absent if the host has no battery.",
    ] = None
    budget_bytes: Annotated[Amount | None, "Memory that all models together may use, in bytes."] = None
    available_bytes: Annotated[
        Amount | None,
        "Part of budgetBytes that is free now, in bytes. The memory of all entries in status.processes, and "
        "the memory that other programs use beyond their share, are already subtracted.",
    ] = None
    available: Annotated[ShortText, "availableBytes in readable form, for example 20.5 GiB."] = ""
    agent_version: Annotated[ShortText, "Version of the metal agent."] = ""
    controller_version: Annotated[ShortText, "Version of the controller, which writes this field."] = ""
    lease_expiries: Annotated[
        list[Time],
        Meta(max_length=32),
        "When the Lease of the host has expired within the last hour. The controller writes this field. From the "
        "second time on, the host takes new processes only after it has been alive for one minute, which doubles "
        "with each further time up to ten minutes: see the condition Stable.",
    ] = []
    runtimes: Annotated[list[ShortText], Meta(max_length=64), "Engines that this host can run.", AS_SET] = []
    weights: Annotated[
        list[Annotated[str, Meta(max_length=64, extra_json_schema={"pattern": "^[0-9a-f]{64}$"})]],
        Meta(max_length=MOST_WEIGHTS),
        "Weights that are complete on the host's disk, those that were used last if there are many: the SHA-256 of "
        "the file or folder, and a digest of each source and revision that it came from. Of hosts that are equal "
        "otherwise, a replica goes to one that has its weights. Models of Ollama and the owner's own files "
        "(file://) are not among them.",
    ] = []
    processes: Annotated[
        list[HostProcess],
        Meta(max_length=1024),
        "Processes whose memory is already subtracted from availableBytes.",
        keyed_by("uid"),
    ] = []
    conditions: Conditions = []


class MetalHost(ApiObject, frozen=True):
    """An off-cluster host that serves models as native processes."""

    spec: Annotated[MetalHostSpec, "Decisions of an administrator about this host."] = MetalHostSpec()
    status: Annotated[MetalHostStatus, "Facts that the agent reports, and whether the agent is alive."] = (
        MetalHostStatus()
    )


NAME_RULE = rule(
    "size(self.metadata.name) <= 63",
    "use a name of at most 63 characters, as a MetalProcess's spec.hostName takes no more",
)
"""A rule on the whole object: a host with a longer name could be registered, but no process could be bound to it."""
