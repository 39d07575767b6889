"""The files and options that one engine serves, built by one function for pods and hosts."""

from collections.abc import Iterable, Sequence
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """The files and options that one engine serves; paths are as the engine sees them."""

    service: str
    """Name of the InferenceService, which clients send as `model`."""
    model: str
    """Path of the weights."""
    options: ServingOptions
    """Serving options, from which the engine's arguments are rendered."""
    on_device: bool = False
    """True if the whole model has to be in the memory of an accelerator; false leaves the choice to the engine."""
    draft: str | None = None
    """Path of the draft model."""
    draft_max_tokens: int | None = None
    projector: str | None = None
    """Path of the projector."""
    adapters: Sequence[CompanionFile] = ()


def build_serving(
    service: str,
    model: str,
    options: ServingOptions,
    companions: Iterable[CompanionFile] = (),
    *,
    draft_max_tokens: int | None = None,
    on_device: bool = False,
) -> Serving:
    """Build the files and options that an engine serves, in a pod or on a host.

    Args:
        service: name of the InferenceService.
        model: path of the weights as the engine sees it.
        options: serving options, such as the spec of an InferenceService or MetalProcess.
        companions: files that are served together with the model; at most one draft and one projector.
        draft_max_tokens: tokens that the draft guesses ahead at most; None leaves it to the engine.
        on_device: True if the whole model has to be in the memory of an accelerator.
    """
    companions = tuple(companions)
    paths = {companion.role: companion.path for companion in companions}
    return Serving(
        service=service,
        model=model,
        options=options,
        on_device=on_device,
        draft=paths.get("draft"),
        draft_max_tokens=draft_max_tokens,
        projector=paths.get("projector"),
        adapters=tuple(companion for companion in companions if companion.role == "adapter"),
    )


class Listen(NamedTuple):
    """Address at which an engine listens."""

    host: str
    port: int
    """0 lets the kernel choose; `devices.sockets` then finds it."""
    api_key_file: str | None = None
    """Path of a file with the bearer token that the engine requires; None: it requires none."""
