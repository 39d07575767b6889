"""The events of one native process, to which `metal_agent.lifecycle` answers with the next state and its actions."""

import msgspec

from crds.metalprocess import LastExit
from metal_agent.engine_health import Suspicion


class ProcessEvent(msgspec.Struct, frozen=True):
    """An event of one process."""


class Admitted(ProcessEvent, frozen=True):
    """The host can run the process, and its memory is reserved."""


class Refused(ProcessEvent, frozen=True):
    """This host cannot run the process with this spec."""

    reason: str
    message: str
    needed_bytes: int | None = None
    """Memory that was needed and not free: the process is checked again once so much is free."""


class Fetched(ProcessEvent, frozen=True):
    """Verified weights are on the host."""


class Failed(ProcessEvent, frozen=True):
    """An action failed. A permanent failure is retried too, but rarely: the source may be repaired."""

    reason: str
    message: str
    permanent: bool = False
    retry_after_seconds: float = 0.0
    """The pause that the server of the weights asks for; 0 if it asks for none."""


class MemoryFreed(ProcessEvent, frozen=True):
    """The host has as much memory free as the process needed at its refusal."""


class LoadSlotBusy(ProcessEvent, frozen=True):
    """Another engine of this host is loading, so this one was not started."""


class LoadSlotGranted(ProcessEvent, frozen=True):
    """This process has the load slot: its engine may load."""


class Spawned(ProcessEvent, frozen=True):
    """The engine was started; `pid` if it has a process of its own."""

    pid: int | None = None


class Answered(ProcessEvent, frozen=True):
    """The engine generated a token."""


class StartProblem(ProcessEvent, frozen=True):
    """The starting engine answers, but not with a token; it is asked again."""

    message: str


class Suspected(ProcessEvent, frozen=True):
    """The proxy sees signs that the Ready engine is sick."""

    suspicion: Suspicion


class Trusted(ProcessEvent, frozen=True):
    """The suspect engine has answered the agent, or the proxy sees that it works again."""


class Hung(ProcessEvent, frozen=True):
    """The engine was Ready, and now neither answers nor uses the processor, or answers with errors only."""

    message: str
    reason: str = "EngineHung"
    answers: bool = False
    """True if it answers, so that requests in progress may end well."""


class Exited(ProcessEvent, frozen=True):
    """The engine is gone: its process ended, or its daemon unloaded the model."""

    last: LastExit
    reason: str = ""
    message: str = ""
    """The cause, if more is known than exit code and signal."""
    fetched: bool = True
    """False if the weights are gone too, and have to be fetched again."""


class EndOverdue(ProcessEvent, frozen=True):
    """The engine that is being ended has not ended in time: a process that ignores SIGKILL, or a daemon."""

    message: str


class BackoffElapsed(ProcessEvent, frozen=True):
    """The back-off is over."""


class Removed(ProcessEvent, frozen=True):
    """The MetalProcess is no longer assigned to this host."""


class Held(ProcessEvent, frozen=True):
    """The host starts no engine now: the process waits for Released. A running engine goes on."""

    reason: str
    message: str


class Evicted(ProcessEvent, frozen=True):
    """The host needs the memory: the engine is drained, stopped, and not started again before Released."""

    reason: str
    message: str
    is_urgent: bool = True
    """True: running requests get seconds to end. False: they get as long as those of a process that is removed."""


class Released(ProcessEvent, frozen=True):
    """The host allows the engine to be started again."""
