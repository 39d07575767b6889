"""The type of a runtime, and of what a service demands of one.

A runtime is data and a few functions. It lists the formats, modes and settings that it supports, by which
`runtimes/runtime_choice.py` refuses a service that it cannot serve, and the figures by which `fitness/` estimates.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from artifacts.repositories.address_policy import Networks
from crds.meta import Accelerator
from crds.pods import ContainerOptions
from crds.serving import CacheType, Mode, Role, RuntimeName, ServingOptions
from crds.weights_header import GGUF, WeightsFormat
from devices.vendors import VENDORS, Vendors
from runtimes.daemon import Daemon
from runtimes.engine_errors import ErrorTable, SchemaLimits
from runtimes.engine_estimate import EngineMemory, SpeedPrior
from runtimes.pod import EnginePod
from runtimes.serving import Listen, Serving, Setting, count_requests, count_shared_tokens

Quantizations = Mapping[str, Mapping[str, str]]
"""Architectures by accelerator and method. `*` is every product, `ada+` this architecture of NVIDIA and later ones, and
`~` stands before an architecture that keeps weights in this form but computes with 16 bits, so that they save memory
and no time."""
PLAIN: Final = "unquantized"
"""Method of weights with 16 or 32 bits."""
CacheSharing = Literal["blocks", "context", "none"]
"""Sharing of the KV cache by requests at once. blocks: they take blocks as they grow, and `parallel` is a limit. The
others have a whole context for each of `parallel` requests; if it is unset, context: they share one and some more
(`count_shared_tokens`), none: there is one request."""
TEXT_ROUTES: Final = frozenset({"chat", "completions"})
"""Routes of every engine that generates text."""
GGUF_QUANTIZATIONS: Final[Quantizations] = {
    vendor: {PLAIN: "*", "gguf": "*"} for vendor in ("nvidia", "amd", "intel", "cpu", "metal")
}
"""That of engines made of llama.cpp."""


class RuntimeDemand(NamedTuple):
    """The abilities that a service demands of a runtime."""

    format: WeightsFormat
    accelerator: Accelerator
    in_pods: bool
    options: ServingOptions = ServingOptions()
    draft: bool = False
    projector: bool = False
    adapter_scales: Sequence[str] = ()
    adapters_on_request: bool = False
    """True if requests choose some of the adapters."""
    vendors: Vendors = VENDORS
    """The table of accelerators, with those of the administrator's file."""
    has_image: bool = False
    """True if the service states the container image."""
    is_split: bool = False
    """True if the weights are known to be a GGUF model in several files."""
    container: ContainerOptions | None = None
    """The container that the service states, for an engine that Pomona does not know."""
    header: GGUF = GGUF()
    """Facts of the model's header, as far as they are known."""
    companion_headers: Sequence[tuple[Role, GGUF]] = ()
    """The same of the artifacts that are served with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLaunch:
    """Launch of a runtime on hosts that has a separate process for each model."""

    command: Callable[[], list[str] | None]
    """Return the argv prefix that starts the engine on this machine, or None if it is not installed. Blocks, since it
    may read files."""
    arguments: Callable[[Serving, Listen], list[str]]
    """Render the arguments after the command. They contain no secret."""
    environment: Callable[[Mapping[str, str]], dict[str, str]]
    """Make the child's environment from ours: see `runtimes.environment`."""
    variables: Callable[[ServingOptions], dict[str, str]] = lambda _options: {}
    """Return further variables, which depend on the options."""
    served_name: str | None = None
    """Value of `model` that the engine wants in a request; None: the service's name."""
    package: str = ""
    """Python package that is the engine, if the command starts none of its own programs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """One engine: its abilities, its installation, and its start."""

    name: RuntimeName
    formats: frozenset[WeightsFormat]
    modes: frozenset[Mode]
    settings: frozenset[Setting] = frozenset()
    cache_types: frozenset[CacheType] = frozenset({"f16"})
    cache_block_size: int = 1
    """Elements of a block of a quantized cache, which have to divide the heads of a model; 1: its engine says so."""
    tuning: tuple[str, ...] = ()
    """Arguments that a user may set in extraArgs. All others are refused, unknown ones too: they could change arguments
    that Pomona renders, open the engine to the network, name files of its machine, log prompts, or take memory that is
    not reserved."""
    switches: frozenset[str] = frozenset()
    """Those of `tuning` that take no value; each of the others takes one."""
    pulse: str | None = None
    """Path that the engine answers between two steps of its work, so that an answer proves that it works. Unlike a
    token, an answer evicts no cached prompt. None: the engine has no such path, and only a token is a proof."""
    launch: EngineLaunch | None = None
    """Its launch on hosts. None: a daemon that serves many models, whose API the agent calls instead of starting a
    process; or an engine for pods only."""
    installed: Callable[[], bool] = lambda: False
    """Return whether this host has the engine. Blocks, since it may read files."""
    install_hint: str = "it runs in pods only"
    """Instruction to install it, for a message."""
    daemon: Callable[[Networks], Daemon] | None = None
    """Return the daemon of this machine, which may fetch from these private networks; None: it is no daemon."""
    pod: EnginePod | None = None
    """Its start in pods; None: it runs on hosts only."""
    errors: ErrorTable = ()
    """Its errors that are not what their status says."""
    routes: Mapping[Mode, frozenset[str]] = field(default_factory=dict)
    """By mode: the routes of the proxy that the engine answers, as `gateway/proxy/paths.py` names them; some only for
    models of a kind, such as those that hear. Empty: they are not known."""
    adapter_routes: frozenset[str] = frozenset()
    """The routes of the proxy on which a request may choose adapters; empty: it applies all to each request."""
    prompt_counts: Mapping[str, str] = field(default_factory=dict)
    """By route of the proxy: the path that counts the tokens of a prompt. Empty: none, nor does it run out of cells."""
    schema_limits: SchemaLimits | None = None
    """The schemas that end it; None: it survives all."""
    quantizations: Quantizations = field(default_factory=dict)
    """The weights that it can serve; an accelerator that is not here is refused, unless there is none: then the engine
    is not judged."""
    memory: EngineMemory = field(default_factory=EngineMemory)
    """Its memory; if it is unknown, the user must state it."""
    speed_priors: Mapping[str, SpeedPrior] = field(default_factory=dict)
    """Its speed by accelerator, fitted to the part of llmfit's community measurements that
    `benchmarks/speed_estimate.py` does not hold back; that on others is unknown."""
    cache_sharing: CacheSharing = "none"
    divides_layers: bool = False
    """True if it divides each layer among devices; others give each device some of the layers, which take turns."""
    refusal: Callable[[RuntimeDemand], str | None] = lambda _demand: None
    """Return why the engine cannot serve a demand that the fields above allow, with the remedy, or None."""

    def limit_requests(self, options: ServingOptions) -> int | None:
        """Return how many requests the proxy sends the engine at once; None: the engine decides by itself."""
        if self.cache_sharing == "context":
            return count_requests(options)
        return options.parallel or (None if self.cache_sharing == "blocks" else 1)

    def count_shared_tokens(self, options: ServingOptions) -> int | None:
        """Return the tokens beside one context that short requests share; None: requests do not share a context."""
        return count_shared_tokens(options) if self.cache_sharing == "context" else None

    @property
    def on_hosts(self) -> bool:
        """True if it runs on hosts, and not in pods only."""
        return self.launch is not None or self.daemon is not None
