"""The messages of the control socket of `pomona up`, which its server and its client share."""

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Final

import msgspec

UP_SOCKET: Final = "up.sock"
"""The name of the socket in the state folder."""
LONGEST_NAME: Final = 80
"""Letters of a name that a message quotes."""
_MOST_NAMED: Final = 8


class UpEngineStatus(msgspec.Struct, frozen=True, rename="camel"):
    """One engine of a service; of a model on demand that is not loaded, the one that its next load starts."""

    log: str
    """The path of its log, which may not exist yet."""
    phase: str = ""
    """Phase of its process; empty: there is none."""
    pid: int | None = None


class UpServiceStatus(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """One service of the files."""

    name: str
    """The name of the model in requests."""
    namespace: str
    model: str
    source: str
    """Source of the weights, without secrets."""
    runtime: str = ""
    """The engine; empty until it is chosen."""
    on_demand: bool
    """Its model is loaded by requests, and unloaded when idle."""
    phase: str
    detail: str = ""
    """Progress, or the problem and the way out."""
    problem: str = ""
    """The reason why requests are refused; empty: they are answered, or will be without the user."""
    fetched_bytes: int | None = None
    """Bytes of the weights that have come; None: none are being fetched."""
    total_bytes: int | None = None
    """Bytes of the weights in all; None: not known, or none are being fetched."""
    reserved_bytes: int = 0
    """Memory that is reserved for its engines."""
    used_bytes: int | None = None
    """Memory that its engines use; None: not known, or none runs."""
    context_length: int | None = None
    running: int = 0
    """Requests that its engines work on."""
    waiting: int = 0
    """Requests that wait for an engine, or for a free slot of one."""
    requests: int = 0
    """Requests that have ended."""
    failed: int = 0
    """Those among them that failed."""
    idle_seconds: float | None = None
    """Time without a request since its load; None: it is not loaded."""
    unload_seconds: float | None = None
    """Time after which it is unloaded unless it is asked; None: it is not loaded, always loaded, or works."""
    engines: list[UpEngineStatus] = []

    @property
    def is_loaded(self) -> bool:
        """True if it has an engine that loads, serves or ends."""
        return any(engine.phase in {"Starting", "Ready", "Stopping"} for engine in self.engines)

    @property
    def can_serve(self) -> bool:
        """True if a request would be answered, after a load if it is on demand."""
        return not self.problem and self.phase in {"Ready", "Degraded", "Idle"}


class UpStatus(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """A running `pomona up`."""

    version: str
    """The version of the program, and a checksum of its modules."""
    pid: int
    started_at: str
    """RFC 3339."""
    endpoint: str
    """Base URL of the endpoint; empty while it is not open."""
    problem: str = ""
    """The reason why the endpoint is not open."""
    stopping: bool
    """True while everything is drained and stopped, after which the process ends."""
    budget_bytes: int
    available_bytes: int
    log: str
    """The path of its log."""
    services: list[UpServiceStatus]

    def find_service(self, name: str) -> UpServiceStatus | None:
        """Return the service with a name; None: there is none."""
        return next((service for service in self.services if service.name == name), None)


class LoadAnswer(msgspec.Struct, frozen=True, rename="camel"):
    """The answer to a call that loads or unloads a model."""

    message: str = ""
    """The reason why nothing is to be done; empty: it is being done."""


class PullRequest(msgspec.Struct, frozen=True, rename="camel"):
    """The body of a call that fetches weights."""

    source: str


class PullUpdate(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """One line of the answer to a pull: its progress or, in the last one, its result or the problem."""

    bytes: int = 0
    total_bytes: int | None = None
    digest: str = ""
    """Digest of the stored weights; empty until they are complete."""
    problem: str = ""
    """The reason why they cannot be fetched, with the way out."""


class WeightsFacts(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """Weights in the store."""

    digest: str
    size_bytes: int
    last_used: str
    """RFC 3339."""
    in_use: bool
    """They are locked: an engine has them open, or a service will load them."""
    source: str
    """Their source, without secrets."""
    services: list[str] = []
    """The services of the files that serve them."""


class WeightsList(msgspec.Struct, frozen=True, rename="camel"):
    """All weights in the store, the most recently used first."""

    weights: list[WeightsFacts]


def describe_missing_service(name: str, names: Sequence[str]) -> str:
    """Return the message that no service has a name, with those that the user may have meant."""
    missing = f"no service {name[:LONGEST_NAME]} here"
    if near := get_close_matches(name[:LONGEST_NAME], names, n=1):
        return f"{missing}: did you mean {near[0]}?"
    shown = ", ".join(sorted(names)[:_MOST_NAMED]) + (", ..." if len(names) > _MOST_NAMED else "")
    return f"{missing}; there {'is' if len(names) == 1 else 'are'}: {shown or 'none'}"
