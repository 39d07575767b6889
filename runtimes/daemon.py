"""The protocol of a shared daemon: a server that its owner runs, and that serves many models at once.

The agent never starts and never ends a daemon. The daemon is the owner's program, with the owner's settings, models and
memory limit; a second daemon would load everything twice. So the daemon is used if it runs; otherwise the message says
how to start it. Only `pomona up --start-daemons` starts one, where none runs. The names of our models in a daemon begin
with the agent's mark, which separates them from the owner's models, which are only counted. By the mark, an agent that
died before it recorded a model finds it again.
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
"""Called with the bytes in the daemon's store and the total number of bytes (None: unknown)."""


class DaemonError(Exception):
    """A daemon fails or refuses a request.

    `reason` is one CamelCase word for a status, the text states the cause and the remedy. It never contains a key.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class LoadedModel(NamedTuple):
    """A model that a daemon holds in memory now."""

    name: str
    memory_bytes: int | None
    """None: the daemon does not report it."""
    ours: bool
    """Loaded for a process of this agent, which has reserved its memory; otherwise others use it."""


class Daemon(Protocol):
    """One shared daemon on this machine. Every method that calls it may raise DaemonError."""

    runtime: RuntimeName
    url: str
    """URL of its OpenAI API, on loopback."""

    serve_command: tuple[str, ...]
    """The command that runs it, its program first."""
    serve_address: dict[str, str]
    """The variables by which that listens at `url`, and at no other address, whatever the owner has set."""
    copies: bool
    """True if the daemon copies the weights into its own store, so that our copy may be deleted."""

    @property
    def api_key(self) -> str | None:
        """Return the API key that the owner has set at present. Never logged."""

    def installed(self) -> bool:
        """Return whether it is installed here, running or not; if it is not installed, its port is never used."""

    def build_name(self, owner: str, model: str, content: str) -> str:
        """Return the name of a model of ours inside this daemon.

        Args:
            owner: the `owner_mark` of the agent.
            model: the name of the Model, for people who look into their daemon.
            content: the digest of weights and settings, by `digest_content`.
        """

    async def list_loaded(self) -> list[tuple[str, int | None]]:
        """Return name and bytes of each model in its memory, also of the owner's models."""

    def identify_content(self, name: str) -> str:
        """Return an identity of the weights and settings of a model, as `list_loaded` and `load` have found them out.

        Two names have the same identity if the daemon has their weights in memory only once, and lists only one of the
        names.
        """

    async def add_model(self, name: str, serving: Serving, on_progress: OnProgress) -> None:
        """Register the weights at `serving.model` as `name`, with these settings; quick if they are registered already.

        If the daemon has its own library, `serving.model` may be a source in that library.
        """

    async def load(self, name: str) -> None:
        """Load the model, to stay until it is unloaded; return when it is in memory."""

    async def unload(self, name: str) -> None:
        """Unload the model; no error if it is not loaded. Unloading may take a moment longer than this call."""

    async def list_marked(self, owner: str) -> set[str]:
        """Return the names of all its models with the mark of `owner`, loaded or not."""

    async def remove(self, name: str) -> None:
        """Undo `add_model`; no error if the model does not exist."""

    async def close(self) -> None:
        """Close connections; the daemon keeps running."""


def owner_mark(folder: str) -> str:
    """Return the mark of the agent whose state is in `folder`: another agent's models are not ours."""
    return f"pomona-{hashlib.sha256(folder.encode()).hexdigest()[:8]}"


def digest_content(weights: Sequence[str], context_length: int) -> str:
    """Return the digest of weights and context length with which the name of a model in a daemon ends."""
    parts = ("\n".join(weights), str(context_length))
    return "-".join(hashlib.sha256(part.encode()).hexdigest()[:10] for part in parts)
