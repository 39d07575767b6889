"""The events of one native process, to which `metal_agent.lifecycle` answers with the next state and its actions."""

from dataclasses import dataclass

from crds.metalprocess import LastExit
from metal_agent.engine_health import Suspicion


@dataclass(frozen=True, slots=True)
class Admitted:
    """The host can run the process, and its memory is reserved."""


@dataclass(frozen=True, slots=True)
class Refused:
    """This host cannot run the process with this spec."""

    reason: str
    message: str
    needed_bytes: int | None = None
    """Memory that was needed and not free: the process is checked again once so much is free."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """Verified weights are on the host."""


@dataclass(frozen=True, slots=True)
class Failed:
    """An action failed. A permanent failure is retried too, but rarely: the source may be repaired."""

    reason: str
    message: str
    permanent: bool = False
    retry_after_seconds: float = 0.0
    """The pause that the server of the weights asks for; 0 if it asks for none."""


@dataclass(frozen=True, slots=True)
class MemoryFreed:
    """The host has as much memory free as the process needed at its refusal."""


@dataclass(frozen=True, slots=True)
class LoadSlotBusy:
    """Another engine of this host is loading, so this one was not started."""


@dataclass(frozen=True, slots=True)
class LoadSlotGranted:
    """This process has the load slot: its engine may load."""


@dataclass(frozen=True, slots=True)
class Spawned:
    """The engine was started; `pid` if it has a process of its own."""

    pid: int | None = None


@dataclass(frozen=True, slots=True)
class Answered:
    """The engine generated a token."""


@dataclass(frozen=True, slots=True)
class StartProblem:
    """The starting engine answers, but not with a token; it is asked again."""

    message: str


@dataclass(frozen=True, slots=True)
class Suspected:
    """The proxy sees signs that the Ready engine is sick."""

    suspicion: Suspicion


@dataclass(frozen=True, slots=True)
class Trusted:
    """The suspect engine has answered the agent, or the proxy sees that it works again."""


@dataclass(frozen=True, slots=True)
class Hung:
    """The engine was Ready, and now neither answers nor uses the processor, or answers with errors only."""

    message: str
    reason: str = "EngineHung"
    answers: bool = False
    """True if it answers, so that requests in progress may end well."""


@dataclass(frozen=True, slots=True)
class Exited:
    """The engine is gone: its process ended, or its daemon unloaded the model."""

    last: LastExit
    reason: str = ""
    message: str = ""
    """The cause, if more is known than exit code and signal."""
    fetched: bool = True
    """False if the weights are gone too, and have to be fetched again."""


@dataclass(frozen=True, slots=True)
class EndOverdue:
    """The engine that is being ended has not ended in time: a process that ignores SIGKILL, or a daemon."""

    message: str


@dataclass(frozen=True, slots=True)
class BackoffElapsed:
    """The back-off is over."""


@dataclass(frozen=True, slots=True)
class Removed:
    """The MetalProcess is no longer assigned to this host."""


@dataclass(frozen=True, slots=True)
class Held:
    """The host starts no engine now: the process waits for Released. A running engine goes on."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Evicted:
    """The host needs the memory: the engine is drained, stopped, and not started again before Released."""

    reason: str
    message: str
    is_urgent: bool = True
    """True: running requests get seconds to end. False: they get as long as those of a process that is removed."""


@dataclass(frozen=True, slots=True)
class Released:
    """The host allows the engine to be started again."""


ProcessEvent = (
    Admitted
    | Refused
    | MemoryFreed
    | Fetched
    | LoadSlotBusy
    | LoadSlotGranted
    | Failed
    | Spawned
    | StartProblem
    | Answered
    | Suspected
    | Trusted
    | Hung
    | Exited
    | EndOverdue
    | BackoffElapsed
    | Removed
    | Held
    | Evicted
    | Released
)
