"""The answers of the density API, as its OpenAPI document describes them. null is unknown; a list is never null."""

from typing import Literal

from msgspec import Struct

from fitness.fit import FitLevel
from fitness.machine_facts import MachineFacts
from fitness.speed import RunMode, SpeedMethod


class DensityAnswer(Struct, frozen=True, rename="camel", kw_only=True):
    """An answer, or a part of one."""


class PagedAnswer(DensityAnswer, frozen=True):
    """A page of an answer."""

    total: int
    next_offset: int | None
    """Offset of the next page; null: this is the last one."""


class EngineEntry(DensityAnswer, frozen=True):
    """An engine of a node or host."""

    name: str
    installed: bool
    """True: a host has it, or a replica on the node runs it. False: its image would be pulled."""


class InstalledModel(DensityAnswer, frozen=True):
    """A model that runs on a node or host, or whose weights are on its disk."""

    name: str
    namespace: str
    runtime: str
    """Engine that runs it; empty: only the weights are there."""


class DescribedNode(DensityAnswer, frozen=True):
    """A node or host."""

    node_name: str
    kind: Literal["node", "host"]
    last_seen: str | None
    stale: bool
    """True: its reporter is silent, and nothing is placed by its facts."""
    unavailable: str
    """Why nothing is placed there; empty: it may be."""
    system: MachineFacts
    runtimes: list[EngineEntry]
    installed_models: list[InstalledModel]


class NodeEntry(DescribedNode, frozen=True):
    """A node or host, and how many models fit there now."""

    model_fit_count: int


class NodesAnswer(PagedAnswer, frozen=True):
    """Answer of /density/nodes."""

    nodes: list[NodeEntry]


class ModelFit(DensityAnswer, frozen=True):
    """The fit of a model on one node or host."""

    name: str
    namespace: str
    """Empty: the model is of the catalog."""
    score: float
    fit_level: FitLevel
    fit_level_if_idle: FitLevel
    run_mode: RunMode
    runtime: str
    chosen_context: int | None
    """Context length of a service there that states none; null: that of the model is unknown. The memory is that of
    the context by which all models are compared."""
    best_quant: str
    device_class: str
    device_count: int
    estimated_tps: float | None
    low_tps: float | None
    high_tps: float | None
    speed_method: SpeedMethod | None
    prefill_tps: float | None
    memory_required_gb: float
    """On each device."""
    memory_available_gb: float
    utilization_pct: float | None
    shortfall: str
    """Shortfall and the way out; empty if it fits."""
    category: str


class NodeDetailAnswer(DescribedNode, frozen=True):
    """Answer of /density/nodes/{name}."""

    model_fits: list[ModelFit]
    total: int
    next_offset: int | None


class NodeRuntimes(DensityAnswer, frozen=True):
    """The engines of a node or host."""

    node_name: str
    runtimes: list[EngineEntry]


class RuntimesAnswer(PagedAnswer, frozen=True):
    """Answer of /density/runtimes."""

    nodes: list[NodeRuntimes]


class NodeModels(DensityAnswer, frozen=True):
    """The models on a node or host."""

    node_name: str
    models: list[InstalledModel]


class InstalledModelsAnswer(PagedAnswer, frozen=True):
    """Answer of /density/installed-models."""

    nodes: list[NodeModels]


class RankedNode(DensityAnswer, frozen=True):
    """A node or host for a model."""

    node_name: str
    score: float
    fit_level: FitLevel
    model: ModelFit


class ExcludedNode(DensityAnswer, frozen=True):
    """A node or host on which nothing is placed."""

    node_name: str
    reason: str


class QueryAnswer(PagedAnswer, frozen=True):
    """Answer of /density/query: the best level first, and there the fastest."""

    query: str
    min_fit: FitLevel
    use_case: str | None
    ranked_nodes: list[RankedNode]
    excluded_nodes: list[ExcludedNode]


class CatalogNode(DensityAnswer, frozen=True):
    """A node or host on which a model fits."""

    node_name: str
    score: float
    fit_level: FitLevel


class CatalogModel(DensityAnswer, frozen=True):
    """A model, and where it fits."""

    model_name: str
    namespace: str
    source: str
    best_score: float | None
    best_node: str | None
    """null: it fits nowhere now."""
    fit_level: FitLevel | None
    node_count: int
    """Nodes and hosts on which it fits."""
    nodes: list[CatalogNode]
    """The best of them, at most 20."""


class CatalogAnswer(PagedAnswer, frozen=True):
    """Answer of /catalog."""

    models: list[CatalogModel]


class SimulateRequest(DensityAnswer, frozen=True, forbid_unknown_fields=True):
    """Body of /density/simulate."""

    model: str
    quantization: str | None = None
    context: int | None = None
    memory_gb: float | None = None


class NodeState(DensityAnswer, frozen=True):
    """The free memory of a node or host: of its emptiest device."""

    free_gb: float
    free_devices: int
    """Devices that no pod holds."""


class SimulatedNode(DensityAnswer, frozen=True):
    """A node or host with the model on it."""

    node_name: str
    current_score: float
    fit_level: FitLevel
    run_mode: RunMode
    device_count: int
    context: int
    """Context length of the service there, in tokens."""
    estimated_tps: float | None
    available_memory_gb: float
    required_memory_gb: float
    remaining_memory_gb: float
    """Negative: so much is missing."""
    utilization_pct: float | None
    shortfall: str
    before: NodeState
    after: NodeState | None
    """null: it does not fit."""


class SimulateAnswer(DensityAnswer, frozen=True):
    """Answer of /density/simulate."""

    model: str
    namespace: str
    quantization: str
    context: int
    ranked_nodes: list[SimulatedNode]
    can_fit_anywhere: bool
    excluded_nodes: list[ExcludedNode]


class ModelCost(DensityAnswer, frozen=True):
    """Resources and costs of one service."""

    name: str
    namespace: str
    placed_node: str | None
    placed_nodes: list[str]
    phase: str
    replicas: int
    gpu: int
    """Devices of all replicas."""
    memory_required_gb: float | None
    """Memory of all replicas, on devices where they have some."""
    utilization_pct: float | None
    """Part of the memory of its devices that it needs."""
    fitness_score: float | None
    tokens_per_second: float | None
    speed_source: Literal["live", "measured", "estimated"] | None
    watts: float | None
    """Power of the devices while they work; replicas that share a machine or device share its watts equally."""
    cost_per_hour: float | None
    """Electricity and hire of the devices; null: a price or the watts are not stated."""
    cost_per_million_tokens: float | None
    """At the speed above; without requests, of one replica that generates all the time."""
    unknown: list[str]
    """Facts that are not known, so that a figure is null, such as `watts of nvidia-l4`."""


class NamespaceCost(DensityAnswer, frozen=True):
    """Resources and costs of the services of a namespace."""

    namespace: str
    model_count: int
    total_gpu: int
    total_memory_gb: float | None
    """null if that of any service is unknown."""
    watts: float | None
    """null if the watts of any service are unknown."""
    cost_per_hour: float | None
    """null if that of any service is unknown."""
    known_cost_per_hour: float
    """Sum of the known costs."""
    tokens_per_second: float | None
    """Speed of all replicas of its services; null if that of any service with replicas is unknown."""
    cost_per_million_tokens: float | None
    """At the speed above, for the cost above."""


class CostAnswer(PagedAnswer, frozen=True):
    """Answer of /density/cost."""

    currency: str
    models: list[ModelCost]
    namespaces: list[NamespaceCost]


class ErrorAnswer(DensityAnswer, frozen=True):
    """Any failure."""

    error: str
