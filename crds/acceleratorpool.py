"""`AcceleratorPool`: nodes or hosts of one accelerator, and an administrator's limits for their use."""

from typing import Annotated, Final

from msgspec import Meta

from crds.meta import (
    LABEL_PATTERN,
    Accelerator,
    Amount,
    ApiObject,
    ApiStruct,
    Conditions,
    Count,
    Labels,
    Quantity,
    ShortText,
    checked_by,
    keyed_by,
    rule,
)

EACH_NAMESPACE: Final = "*"
"""Namespace of the quota that each namespace without one of its own has."""
WHOLE_PERCENT: Final = 100
"""Share of the memory of a device that its pods may take together by default."""
_QuotaNamespace = Annotated[
    str, Meta(min_length=1, max_length=63, extra_json_schema={"pattern": rf"^\*$|{LABEL_PATTERN}"})
]


class PoolElasticity(ApiStruct, frozen=True):
    """The growth of a pool whose nodes an autoscaler adds."""

    max_waiting: Annotated[
        int,
        Meta(ge=1, le=100),
        "Replicas that may be Pending at once without a node, so that the autoscaler adds one. All others wait in "
        "the queue.",
    ]


class NamespaceQuota(ApiStruct, frozen=True):
    """The most that services of a namespace use of the pool at once."""

    namespace: Annotated[
        _QuotaNamespace,
        'The namespace. "*" stands for each namespace that has no quota of its own here: each of them may use as much.',
    ]
    devices: Annotated[
        Count | None, "Devices. 0: the namespace may not use the pool. Default: no limit.", {"format": "int64"}
    ] = None
    memory: Annotated[
        Quantity | None,
        "Memory that the replicas request of their nodes, or take of their hosts, for example 256Gi. Default: no "
        "limit.",
    ] = None


class AcceleratorPoolSpec(ApiStruct, frozen=True):
    """Nodes or hosts of the pool, and its limits. A limit below what runs admits nothing more."""

    accelerator: Annotated[
        Accelerator,
        "Accelerator of the nodes, such as nvidia or amd, or metal for hosts. Each accelerator has a pool of its "
        "own name, also without an AcceleratorPool; an AcceleratorPool of that name sets its limits.",
    ]
    node_selector: Annotated[
        Labels,
        "Labels of the nodes of the pool, or with accelerator metal of the MetalHosts. A node that several pools "
        "select belongs to the first by name; one that none selects belongs to the pool with the name of its "
        "accelerator, which therefore has no selector.",
    ] = {}
    nominal: Annotated[
        Quantity | None,
        "The most that replicas at home in this pool use of it: devices, or with accelerator metal memory such as "
        "256Gi. The home of a replica is the first of its pools: see scheduling.pools of an InferenceService. "
        "Default: no limit.",
    ] = None
    borrowing_limit: Annotated[
        Quantity | None,
        "The most that replicas at home in this pool use of all other pools together, in the unit of nominal. 0: "
        "they borrow nothing. Default: no limit.",
    ] = None
    lending_limit: Annotated[
        Quantity | None,
        "The most that replicas at home in other pools use of this one, in the unit of nominal. 0: the pool lends "
        "nothing. Replicas that borrow are the first to be evicted for a replica of higher priority that is at "
        "home here, and evict none that is. Any service may name the pool as its home: quotas keep it for "
        "namespaces. Default: no limit.",
    ] = None
    elastic: Annotated[
        PoolElasticity | None,
        "The growth of the pool by an autoscaler. Default: none, and replicas wait for nodes that exist.",
    ] = None
    memory_overcommit_percent: Annotated[
        Annotated[int, Meta(ge=100, le=1600)] | None,
        "Memory that replicas on one time-sliced device may take together, in percent of what it has. A replica "
        "gets a slice only if it takes no more than the part of one slice. Above 100, replicas that use their "
        "memory at the same time run out of it: the device refuses more to some of them, and their engines crash. "
        "Nothing keeps one from taking what another needs. Devices that are shared by MPS are never overcommitted. "
        "Default: 100.",
    ] = None
    quotas: Annotated[
        list[NamespaceQuota],
        Meta(max_length=256),
        "The most that each namespace uses of the pool. Default: no quotas.",
        keyed_by("namespace"),
    ] = []


class PoolAmounts(ApiStruct, frozen=True):
    """Amounts as numbers: devices, or with accelerator metal bytes."""

    total: Annotated[Amount, "What the nodes or hosts of the pool have in all."] = 0
    used: Annotated[Amount, "What is not free of it, whoever uses it, pods without Pomona included."] = 0
    borrowed: Annotated[Amount, "What replicas at home in this pool use of other pools."] = 0
    lent: Annotated[Amount, "What replicas at home in other pools use of this one."] = 0


class AcceleratorPoolStatus(ApiStruct, frozen=True):
    """Observed state of a pool."""

    cells: Annotated[Count | None, "Number of nodes or hosts in the pool."] = None
    waiting: Annotated[Count | None, "Replicas at home in this pool that wait."] = None
    used: Annotated[
        ShortText, "What is used of all that the pool has: devices such as 12/16, or memory such as 96.0 GiB/256.0 GiB."
    ] = ""
    borrowed: Annotated[ShortText, "What replicas at home in this pool use of other pools."] = ""
    lent: Annotated[ShortText, "What replicas at home in other pools use of this one."] = ""
    amounts: Annotated[PoolAmounts | None, "The same as numbers: devices, or with accelerator metal bytes."] = None
    conditions: Conditions = []


def _counts_devices(field: str) -> dict[str, str]:
    """Return the rule that `field` is a whole number, unless the accelerator is metal.

    The field is an integer or a text, hence `string()`, and may be absent, hence `has()`.
    """
    return rule(
        f"self.accelerator == 'metal' || !has(self.{field}) || string(self.{field}).matches('^[0-9]+$')",
        f"{field} counts devices: use a whole number",
    )


SPEC_RULES = (
    _counts_devices("nominal"),
    _counts_devices("borrowingLimit"),
    _counts_devices("lendingLimit"),
    rule(
        "self.accelerator != 'metal' || !has(self.elastic)",
        "no autoscaler adds hosts to a pool of accelerator metal: remove elastic",
    ),
    rule(
        "self.accelerator != 'metal' || !has(self.memoryOvercommitPercent)",
        "processes of hosts share no device by slices: remove memoryOvercommitPercent",
    ),
    rule(
        "self.accelerator != 'metal' || !has(self.quotas) || self.quotas.all(each, !has(each.devices))",
        "hosts have memory and no devices: state memory in quotas of a pool of accelerator metal",
    ),
)


class AcceleratorPool(ApiObject, frozen=True, kw_only=True):
    """Nodes or hosts of one accelerator that share limits and quotas."""

    spec: Annotated[AcceleratorPoolSpec, "Nodes or hosts of the pool, and its limits.", checked_by(*SPEC_RULES)]
    status: Annotated[AcceleratorPoolStatus, "Use of the pool, as the controller reports it."] = AcceleratorPoolStatus()


_IS_SELECTED = "has(self.spec.nodeSelector) && size(self.spec.nodeSelector) > 0"
OBJECT_RULES = (
    rule(
        "size(self.metadata.name) <= 63 && !self.metadata.name.contains('.')",
        "use a name of at most 63 lower-case letters, digits and '-', as services name the pool in scheduling.pools",
    ),
    rule(
        f"self.metadata.name != self.spec.accelerator || !({_IS_SELECTED})",
        "the pool with the name of its accelerator has all nodes that no other pool selects: remove nodeSelector, or "
        "choose another name",
    ),
    rule(
        f"self.metadata.name == self.spec.accelerator || ({_IS_SELECTED})",
        "state in nodeSelector the labels of the pool's nodes, or give the pool the name of its accelerator",
    ),
)
"""Rules on the whole object."""
