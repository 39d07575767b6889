"""Turns of the services whose pods an update of Pomona replaces: one service at a time, on the leader.

The next service follows when the pods of the one before are replaced and it is Ready again, or after a limit, so that
one service that cannot start does not keep the others on their earlier template for ever. That a service waits is in
memory alone, because each leader first decides about all services anew; a rollout that is under way is seen by the
annotation of its Deployment. If two leaders overlap, two services may be replaced at once, which is harmless.
"""

import asyncio
from typing import Final, NamedTuple

import structlog

from controller.reconcile.plan import Leading
from controller.reconcile.stamp import ANNOTATION_STAMP, ANNOTATION_UPDATE
from controller.services.pods.template_rollout import is_rolled_out
from kube.client import Obj
from kube.resources import DEPLOYMENTS, INFERENCE_SERVICES, ObjectKey, object_key
from kube.store import Store

LIMIT_SECONDS: Final = 1800.0
"""Time for one service; weights that load for longer are rare."""
START_SECONDS: Final = 60.0
"""Time in which a service whose turn it is must have applied its template; a refusal is reported by its reconcile."""
LOOK_SECONDS: Final = 1.0
"""Pause between two looks at the service whose turn it is, while others wait."""

log = structlog.get_logger()


class Turn(NamedTuple):
    """The turn of one service."""

    since: float
    """Time of the event loop, in seconds."""
    earlier: str | None
    """Stamp of the Deployment before; None: another leader has replaced it already."""


class UpdatePacer:
    """The services that wait for their turn, and those whose turn it is; more than one only after another leader."""

    def __init__(self) -> None:
        self._waiting: dict[ObjectKey, None] = {}
        self._turns: dict[ObjectKey, Turn] = {}
        self._wake = asyncio.Event()

    def has_turn(self, key: ObjectKey) -> bool:
        """Return whether a service may be replaced now."""
        return key in self._turns

    def wait(self, key: ObjectKey) -> None:
        """Note that a service waits for its turn."""
        self._waiting[key] = None
        self._wake.set()

    def forget(self, key: ObjectKey) -> None:
        """Note that a service does not wait: it has the template, was edited, or is gone."""
        self._waiting.pop(key, None)

    def restart(self) -> None:
        """Forget all turns, before this replica leads."""
        self._waiting.clear()
        self._turns.clear()

    async def run(self, leading: Leading) -> None:
        """Give one service after the other its turn."""
        loop = asyncio.get_running_loop()
        for deployment in leading.store.list(DEPLOYMENTS):
            if _annotations(deployment).get(ANNOTATION_UPDATE) and not is_rolled_out(deployment):
                self._turns[object_key(deployment)] = Turn(loop.time(), None)
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                if (key := self.give_turn(leading.store, loop.time())) is not None:
                    log.info("update_turn_given", service=str(key), waiting=len(self._waiting))
                    leading.enqueue(INFERENCE_SERVICES, key)
                await asyncio.sleep(LOOK_SECONDS)

    def give_turn(self, store: Store, now_seconds: float) -> ObjectKey | None:
        """End the turns that are over, and return the service whose turn has begun, if any."""
        for key, turn in list(self._turns.items()):
            if _is_over(store, key, turn, now_seconds):
                del self._turns[key]
        if self._turns or not self._waiting:
            return None
        key = next(iter(self._waiting))
        del self._waiting[key]
        deployment = store.get(DEPLOYMENTS, key.name, key.namespace)
        earlier = _annotations(deployment).get(ANNOTATION_STAMP, "") if deployment is not None else None
        self._turns[key] = Turn(now_seconds, earlier)
        return key


def _is_over(store: Store, key: ObjectKey, turn: Turn, now_seconds: float) -> bool:
    deployment = store.get(DEPLOYMENTS, key.name, key.namespace)
    service = store.get(INFERENCE_SERVICES, key.name, key.namespace)
    taken_seconds = now_seconds - turn.since
    if deployment is None or service is None or taken_seconds >= LIMIT_SECONDS:
        return True
    if _annotations(deployment).get(ANNOTATION_STAMP, "") == turn.earlier:
        return taken_seconds >= START_SECONDS
    return is_rolled_out(deployment) and service.get("status", {}).get("phase") in {"Ready", "Suspended"}


def _annotations(deployment: Obj) -> Obj:
    return deployment["metadata"].get("annotations") or {}
