"""The verdict on a service: it serves, is on its way, waits for something or cannot serve; and what to do next."""

from typing import Final, Literal, NamedTuple

from artifacts.errors import REASONS
from cli.api_objects import Obj, find_condition, list_model_names
from cli.cluster_options import ClusterOptions
from crds.meta import CONTROLLER_NAMESPACE

State = Literal["serves", "serves partly", "on its way", "waits", "cannot serve", "suspended", "not seen"]
DONE: Final = frozenset({"serves", "suspended"})
"""States after which `pomona deploy` has nothing to wait for."""

_LOADING: Final = frozenset({"ModelNotReady", "Downloading", "Fetching", "Starting", "Loading", "Progressing"})
_CHECKING: Final = frozenset({"Probing", "MeasuringSpeed", "Binding", "Restarting"})
_UNANSWERED: Final = frozenset({"NoEndpoints", "ForeignEndpoints", "NotAnswering"})
_PASSING: Final = _LOADING | _CHECKING | _UNANSWERED
"""Reasons of normal progress, which end by themselves."""
_BEFORE_REPLICAS: Final = frozenset({"ModelNotReady", "Downloading", "Binding", "MeasuringSpeed"})
_MISFITS: Final = frozenset({"MemoryUnderstated", "MemoryUnknown", "DeviceTooSmall"})
_REFUSALS: Final = _MISFITS | {"InvalidSpec", "ModelFailed", "NoImage", "NoDeviceClaims", "PriorityClassMissing"}
"""Reasons that only an edit ends, also of a service whose earlier spec still serves."""
_ENDED_ENGINES: Final = frozenset({"EngineExited", "CrashLoopBackOff"})
"""Reasons that the log of an engine explains."""
_NONE_GIVEN: Final = ClusterOptions()


class Verdict(NamedTuple):
    """The state of a service, in words."""

    state: State
    message: str
    """The condition's message."""
    reason: str
    next_step: str
    """An action of the user, with its command if there is one."""


def judge_service(service: Obj, program: str = "pomona", target: ClusterOptions = _NONE_GIVEN) -> Verdict:
    """Return whether a service serves, and what the user can do next, by the status that the controller has written.

    The first of these that is so decides: the controller has not seen or refuses the latest spec; only an edit by the
    user helps; it serves; it is on its way; it waits for something. The commands of the next step name `program` as it
    was called, and the cluster that the user means (`target`).
    """
    # 1. What comes before its phase: an unseen or refused spec. The condition Ready has the reason and the message.
    options = target.render()
    name, status = service["metadata"]["name"], service.get("status", {})
    ready = find_condition(service, "Ready")
    reason, message = str(ready.get("reason", "")), str(ready.get("message", ""))
    if status.get("observedGeneration", 0) < service["metadata"].get("generation", 1):
        return Verdict(
            state="not seen",
            message="the controller has not seen its latest spec yet",
            reason="NotObserved",
            next_step=f"wait; if it stays so, see if the controller runs: "
            f"kubectl get pods{target.render(namespace=CONTROLLER_NAMESPACE)}",
        )

    phase = status.get("phase", "Pending")
    still_serving = " (its earlier spec still serves)" if ready.get("status") == "True" else ""
    refused = find_condition(service, "Reconciled")
    if refused.get("status") == "False":
        step = "mend what the message names: the controller tries again by itself" + still_serving
        state: State = "cannot serve" if phase == "Failed" else "waits"
        return Verdict(state, message=str(refused["message"]), reason=str(refused["reason"]), next_step=step)

    # 2. What only the user can change (_REFUSALS); REASONS are why weights cannot be fetched or read.
    edit = f"kubectl edit isvc {name}{options}"
    if phase == "Suspended":
        return Verdict("suspended", message, reason, next_step=f"start it: {edit}")
    if phase == "Failed" or reason in _REFUSALS:
        step = f"edit it: {edit}"
        if reason == "ModelFailed" or reason in REASONS:
            # The message is about the service's own Model, or about that of a companion.
            names = list_model_names(service)
            model = next((model for model in names if message.startswith(f"Model {model}: ")), names[0])
            step = f"edit the Model: kubectl edit mdl {model}{options}"
        elif reason in _ENDED_ENGINES:
            step = f"see its log: {program} logs {name}{options}"
        return Verdict("cannot serve", message, reason, next_step=step + still_serving)

    # 3. What serves, or will by itself (_PASSING).
    if phase == "Ready":
        return Verdict("serves", message, reason, next_step=f"ask it: {program} chat {name}{options}")
    if phase == "Degraded":
        return Verdict("serves partly", message, reason, next_step="see the replicas below that are not Ready")
    if reason in _PASSING:
        # Before its weights are there, a service has no replica with a log.
        log = "" if reason in _BEFORE_REPLICAS else f", or see its log: {program} logs {name}{options}"
        return Verdict("on its way", message, reason, next_step=f"wait{log}")

    # 4. What waits for something, such as a device.
    step = "wait, or provide what is missing: it goes on by itself then"
    if phase == "WaitingForGPU" and reason != "WaitingForKueue":
        step = f"see what would help: {program} queue explain {name}{options}"
    return Verdict("waits", message, reason, next_step=step)
