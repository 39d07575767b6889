"""The inspections of this host: MetalProcesses whose artifact the agent inspects and reports, and that it never serves.

An inspection is one attempt: the controller makes another one, here or on another host. It takes no memory of the
budget, so few run at a time, and only one of each namespace, whose source may be slow on purpose.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Final

import msgspec
import structlog

from artifacts.errors import ArtifactError
from crds.metalprocess import MetalProcessSpec, MetalProcessStatus
from kube.apply import apply_status
from kube.client import Client, Obj
from kube.errors import Invalid, NotFound
from kube.resources import METAL_PROCESSES
from kube.store import Store
from metal_agent.assignments import explain_unknown_features
from metal_agent.cluster.endpoint_slices import FIELD_MANAGER
from metal_agent.weights import HostWeights

AT_A_TIME: Final = 4
_MOST_MESSAGE_CHARACTERS: Final = 1024
_ENDED: Final = frozenset({"Stopped", "Failed", "Rejected"})

log = structlog.get_logger()


def is_inspection(process: Obj) -> bool:
    """Return whether a MetalProcess is to be inspected, and not served."""
    return bool((process.get("spec") or {}).get("inspect"))


class Inspections:
    """The inspections of one host; `store` has their objects.

    After each change, `enqueue` is called with ("inspection", UID), which has to lead to a call of `report`.
    """

    def __init__(
        self, client: Client, store: Store, weights: HostWeights, enqueue: Callable[[tuple[str, ...]], None]
    ) -> None:
        self._client = client
        self._store = store
        self._weights = weights
        self._enqueue = enqueue
        self._turns = asyncio.Semaphore(AT_A_TIME)
        self._namespace_turns: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(1))
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._states: dict[str, MetalProcessStatus] = {}
        self._group: asyncio.TaskGroup | None = None

    def start(self, group: asyncio.TaskGroup) -> None:
        """Run inspections in `group` from now on."""
        self._group = group

    def assign(self, processes: Iterable[Obj]) -> None:
        """Inspect the artifacts of `processes`, a fresh and full list; others are given up."""
        wanted = {each["metadata"]["uid"]: each for each in processes if "deletionTimestamp" not in each["metadata"]}
        for uid in [uid for uid in self._tasks if uid not in wanted]:
            self._tasks.pop(uid).cancel()
            self._states.pop(uid, None)
        for uid, process in wanted.items():
            is_reported = (process.get("status") or {}).get("phase") in _ENDED
            if uid not in self._tasks and not is_reported and self._group:
                self._states[uid] = MetalProcessStatus()
                self._tasks[uid] = self._group.create_task(self._inspect(uid, process))
                self._enqueue(("inspection", uid))

    async def report(self, uid: str) -> None:
        """Write the status of an inspection, if its object is still there. Raises ApiError and Unreachable."""
        observed = next((each for each in self._store.list(METAL_PROCESSES) if each["metadata"]["uid"] == uid), None)
        status = self._states.get(uid)
        if observed is None or status is None:
            return
        body = {"phase": status.phase, **msgspec.to_builtins(status)}
        try:
            written = await apply_status(self._client, METAL_PROCESSES, observed, body, FIELD_MANAGER)
        except NotFound:
            return
        except Invalid as error:
            if status.inspection is None:
                raise
            # The source states something that no status can have: the same write never succeeds.
            message = f"the facts of the header cannot be reported: {error.message}"[:_MOST_MESSAGE_CHARACTERS]
            self._enter(uid, MetalProcessStatus(phase="Failed", reason="HeaderInvalid", message=message))
            return
        self._store.put(METAL_PROCESSES, written)

    async def _inspect(self, uid: str, process: Obj) -> None:
        metadata = process["metadata"]
        async with self._namespace_turns[metadata["namespace"]], self._turns:
            self._enter(uid, MetalProcessStatus(phase="Fetching"))
            self._enter(uid, await self._read(process))
        log.info(
            "inspection_ended", process=f"{metadata['namespace']}/{metadata['name']}", **_outcome(self._states[uid])
        )

    async def _read(self, process: Obj) -> MetalProcessStatus:
        try:
            spec = msgspec.convert(process["spec"], MetalProcessSpec)
            if unknown := explain_unknown_features(spec):
                # Not Rejected, which is the end of the inspection: another host may know them.
                return MetalProcessStatus(phase="Failed", reason="Unsupported", message=unknown)
            return MetalProcessStatus(phase="Stopped", inspection=await self._weights.inspect(spec.artifact))
        except ArtifactError as error:
            return MetalProcessStatus(
                phase="Failed" if error.retryable else "Rejected",
                reason=error.reason,
                message=error.message[:_MOST_MESSAGE_CHARACTERS],
            )
        except Exception as error:  # a defect must not end the agent
            log.exception("inspection_crashed", uid=process["metadata"]["uid"])
            message = f"internal error of the agent: {type(error).__name__}: {error}"
            return MetalProcessStatus(
                phase="Failed", reason="InternalError", message=message[:_MOST_MESSAGE_CHARACTERS]
            )

    def _enter(self, uid: str, status: MetalProcessStatus) -> None:
        self._states[uid] = status
        self._enqueue(("inspection", uid))


def _outcome(status: MetalProcessStatus) -> dict[str, str]:
    return {"phase": status.phase, "reason": status.reason, "message": status.message}
