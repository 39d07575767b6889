"""The files and options that one engine serves, and where it listens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from crds.serving import Role, ServingOptions

Setting = Literal["draft", "projector", "adapters", "chat template", "parallel"]
"""A setting that not every runtime supports; cache types are listed by each runtime."""


class CompanionFile(NamedTuple):
    """A draft, projector or LoRA adapter as the engine sees it."""

    role: Role
    path: str
    scale: str = "1"
    """Scale of an adapter: a decimal number as the user wrote it."""


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
    on_device: bool = False
    """True if the whole model has to be in the memory of an accelerator; false leaves the choice to the engine."""

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
