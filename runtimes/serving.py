"""The files and options that one engine serves, and where it listens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from crds.serving import Role, ServingOptions
from crds.weights_header import Layout

SHARED_REQUESTS: Final = 4
"""Requests at once that share the memory of one context and some more: llama-server's own default."""
PROBE_TOKENS: Final = 256
"""Tokens of probes, which go to an engine past the proxy."""
_SHARED_TOKENS: Final = 8192
Setting = Literal["draft", "projector", "adapters", "chat template", "parallel", "prompt cache"]
"""A setting that not every runtime supports; cache types are listed by each runtime."""


class CompanionFile(NamedTuple):
    """A draft, projector or LoRA adapter as the engine sees it."""

    role: Role
    path: str
    scale: str = "1"
    """Scale of an adapter: a decimal number as the user wrote it."""
    request_name: str | None = None
    """Name by which requests choose an adapter; None: it is applied to each request."""


def count_shared_tokens(options: ServingOptions) -> int | None:
    """Return the tokens beside one whole context that short requests share; None: each request has a whole context.

    They share where `parallel` is unset and the engine reserves its cache: one request may use the whole context, and
    short ones start beside it. The proxy admits what fits, since llama.cpp ends all requests if its cache overflows.
    """
    if options.parallel is not None or options.mode != "chat":
        return None
    return min(options.context_tokens, _SHARED_TOKENS)


def count_requests(options: ServingOptions) -> int:
    """Return the requests at once of an engine that reserves its cache."""
    return options.parallel or (1 if count_shared_tokens(options) is None else SHARED_REQUESTS)


@dataclass(frozen=True, slots=True)
class Serving:
    """The files and options that one engine serves, in a pod or on a host; paths are as the engine sees them."""

    service: str
    """Name of the InferenceService, which clients send as `model`."""
    model: str
    """Path of the weights."""
    options: ServingOptions
    """Serving options, such as the spec of an InferenceService or MetalProcess."""
    companions: Sequence[CompanionFile] = ()
    """Files that are served together with the model; at most one draft and one projector."""
    draft_max_tokens: int | None = None
    """Tokens that the draft guesses ahead at most; None leaves it to the engine."""
    layout: Layout | None = None
    """Layout of the weights by their header; None: unknown."""
    on_device: bool = False
    """True if the whole model has to be in the memory of an accelerator; false leaves the choice to the engine."""
    threads: int | None = None
    """Threads of the engine on the processor: those that its pod has requested; None leaves them to the engine."""

    @property
    def draft(self) -> str | None:
        """Path of the draft model."""
        return next((companion.path for companion in self.companions if companion.role == "draft"), None)

    @property
    def projector(self) -> str | None:
        """Path of the projector."""
        return next((companion.path for companion in self.companions if companion.role == "projector"), None)

    @property
    def adapters(self) -> list[CompanionFile]:
        """The adapters, in their order."""
        return [companion for companion in self.companions if companion.role == "adapter"]


class Listen(NamedTuple):
    """Address at which an engine listens."""

    host: str
    port: int
    """0 lets the kernel choose; `devices.sockets` then finds it."""
    api_key_file: str | None = None
    """Path of a file with the bearer token that the engine requires; None: it requires none."""
