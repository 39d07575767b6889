"""The protocol of a shared daemon: a server that its owner runs, and that serves many models at once.

The agent never starts and never ends a daemon. It is the owner's program, with the owner's settings, models and memory
limit; a second one beside it would load everything twice. So it is used where it runs, and where it does not, the
message says how to start it. The names of our models in it begin with our mark: so they are distinguished from
the owner's models, which are only counted, and found again by an agent that died before it recorded anything.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol

from crds.serving import RuntimeName
from runtimes.serving import Serving

NOT_RUNNING: Final = "DaemonNotRunning"
SILENT: Final = "DaemonSilent"
UNAUTHORIZED: Final = "DaemonUnauthorized"
UNKNOWN_MODEL: Final = "ModelMissing"
OnProgress = Callable[[int, int | None], None]
"""Called with the bytes that are in the daemon's store and, where it is known, the bytes in all."""


class DaemonError(Exception):
    """A daemon fails or refuses a request.

    `reason` is one CamelCase word for a status, the text says why and what to do. It never contains a key.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class LoadedModel(NamedTuple):
    """A model that a daemon holds in memory now."""

    name: str
    memory_bytes: int | None
    """None: the daemon does not say."""
    ours: bool
    """Loaded for a process of this agent, which has reserved its memory; else it is what others use."""


class ModelIdentity(NamedTuple):
    """Identity of a model of ours in a daemon: the same weights with the same settings have the same name."""

    owner: str
    """`owner_mark` of the agent."""
    model: str
    """Name of the Model, for people who look into their daemon."""
    weights: str
    settings: str


class Daemon(Protocol):
    """One shared daemon on this machine. Everything that talks to it raises DaemonError."""

    runtime: RuntimeName
    url: str
    """Where it answers OpenAI's API, on loopback."""

    copies: bool
    """The daemon copies the weights into a store of its own, so that our copy may be deleted."""

    @property
    def api_key(self) -> str | None:
        """Return the API key that its owner has set now. Never logged."""

    def installed(self) -> bool:
        """Return whether it is installed here, running or not; where it is not, its port is never used."""

    def name(self, identity: ModelIdentity) -> str:
        """Return what the model is called inside this daemon."""

    async def loaded(self) -> list[tuple[str, int | None]]:
        """List what it has in memory, the owner's models too: name and bytes."""

    async def bring(self, name: str, serving: Serving, on_progress: OnProgress) -> None:
        """Make the weights at `serving.model` known under `name`, with these settings; quick when they are.

        Where it has a library of its own, `serving.model` may be a source in that.
        """

    async def load(self, name: str) -> None:
        """Load it, to stay until it is unloaded; returns when it is in memory."""

    async def unload(self, name: str) -> None:
        """Unload it; no error where it is not loaded. It may take a moment longer than this call."""

    async def marked(self, owner: str) -> set[str]:
        """Name everything in it that carries the mark of `owner`, loaded or not."""

    async def remove(self, name: str) -> None:
        """Undo `bring`; no error where the model is not there."""

    async def close(self) -> None:
        """Close connections; the daemon goes on."""


def owner_mark(folder: str) -> str:
    """Return the mark of the agent whose state is in `folder`: another agent's models are not ours."""
    return f"pomona-{hashlib.sha256(folder.encode()).hexdigest()[:8]}"


def identify_model(owner: str, model: str, weights: Sequence[str], settings: Sequence[object]) -> ModelIdentity:
    """Identify a model: `weights` identify the artifacts, `settings` are all that changes how it serves."""
    return ModelIdentity(owner, model, _digest(weights), _digest([str(each) for each in settings]))


def _digest(parts: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:10]
