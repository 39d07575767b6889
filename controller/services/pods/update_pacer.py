"""The order in which an update of Pomona replaces the pods of services: one service at a time, on the leader.

The next service follows when the pods of the one before are replaced and it is Ready again, or after a limit, so that
one service that cannot start does not keep the others on their earlier template for ever. That a service waits is in
memory alone, because each leader first decides about all services anew; a rollout that is under way is seen by the
annotation of its Deployments. If two leaders overlap, two services may be replaced at once, which is harmless.
"""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple

import structlog

from controller.reconcile.indexes import OWNER_INDEX, controller_of, namespaced
from controller.reconcile.plan import Leading
from controller.reconcile.stamp import ANNOTATION_STAMP, ANNOTATION_UPDATE
from controller.services.pods.template_rollout import is_rolled_out
from kube.client import Obj
from kube.resources import DEPLOYMENTS, INFERENCE_SERVICES, ObjectKey
from kube.store import Store

LIMIT_SECONDS: Final = 1800.0
"""Time for one service; weights that load for longer are rare."""
START_SECONDS: Final = 60.0
"""Time in which a service must have applied a template; a refusal is reported by its reconcile."""
LOOK_SECONDS: Final = 1.0
"""Pause between two looks at the service that is rolled out, while others wait."""

log = structlog.get_logger()


class UpdateRollout(NamedTuple):
    """The rollout of one service."""

    since: float
    """Time of the event loop, in seconds."""
    earlier: Mapping[str, str]
    """Stamps of the Deployments to change, by name; none if another leader has changed them already."""


class UpdatePacer:
    """The services that wait, and those that are rolled out; more than one only after another leader."""

    def __init__(self) -> None:
        # The names of the Deployments that each service waits to change; the longest waiting service first.
        self._waiting: dict[ObjectKey, frozenset[str]] = {}
        self._rollouts: dict[ObjectKey, UpdateRollout] = {}
        self._wake = asyncio.Event()  # set when a service begins to wait

    def may_roll_out(self, key: ObjectKey) -> bool:
        """Return whether the pods of a service may be replaced now."""
        return key in self._rollouts

    def set_waiting(self, key: ObjectKey, deployments: Collection[str]) -> None:
        """Record the Deployments of a service that await rollout; an empty set clears them."""
        if not deployments:
            self.forget(key)
            return
        self._waiting[key] = frozenset(deployments)
        self._wake.set()  # `run` sleeps while no service waits

    def forget(self, key: ObjectKey) -> None:
        """Note that a service does not wait: it has the template, was edited, or is gone."""
        self._waiting.pop(key, None)

    def restart(self) -> None:
        """Forget all services, before this replica leads."""
        self._waiting.clear()
        self._rollouts.clear()

    async def run(self, leading: Leading) -> None:
        """Start the rollouts of waiting services one after the other, for ever.

        Rollouts that an earlier leader has started are found first, and awaited. To start one is to enqueue the
        service: `may_roll_out` is True then, and its decision applies the new template.
        """
        # Rollouts that an earlier leader has started, by the annotation of their Deployments.
        loop = asyncio.get_running_loop()
        for deployment in leading.store.list(DEPLOYMENTS):
            owner = controller_of(deployment)
            if owner and _annotations(deployment).get(ANNOTATION_UPDATE) and not is_rolled_out(deployment):
                service = ObjectKey(deployment["metadata"]["namespace"], owner["name"])
                self._rollouts[service] = UpdateRollout(since=loop.time(), earlier={})  # no stamps: it has begun

        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                if (key := self.start_next(leading.store, loop.time())) is not None:
                    log.info("update_rollout_started", service=str(key), waiting=len(self._waiting))
                    leading.enqueue(INFERENCE_SERVICES, key)
                await asyncio.sleep(LOOK_SECONDS)

    def start_next(self, store: Store, now_seconds: float) -> ObjectKey | None:
        """Forget the rollouts that are over; if none is left, begin that of the next service, and return its key.

        None: a rollout goes on, or no service waits.
        """
        for key, rollout in list(self._rollouts.items()):
            if self._is_over(store, key, rollout, now_seconds):
                del self._rollouts[key]

        if self._rollouts or not self._waiting:
            return None
        longest_waiting, *_ = self._waiting  # the first that was added
        names = self._waiting.pop(longest_waiting)

        # A stamp is a digest of what was applied to a Deployment: it tells later whether the rollout has begun.
        stamps = _list_stamps(_list_deployments(store, longest_waiting))
        earlier = {name: stamp for name, stamp in stamps.items() if name in names}
        self._rollouts[longest_waiting] = UpdateRollout(since=now_seconds, earlier=earlier)
        return longest_waiting

    def _is_over(self, store: Store, key: ObjectKey, rollout: UpdateRollout, now_seconds: float) -> bool:
        """Return whether a rollout is complete, took too long, has not begun in START_SECONDS, or lost its service."""
        deployments = _list_deployments(store, key)
        service = store.get(INFERENCE_SERVICES, key.name, key.namespace)
        taken_seconds = now_seconds - rollout.since
        if not deployments or service is None or taken_seconds >= LIMIT_SECONDS:
            return True

        # A stamp is a digest of what was applied last: it changes once the new template is.
        stamps = _list_stamps(deployments)
        unchanged = [name for name, stamp in rollout.earlier.items() if stamps.get(name) == stamp]

        # All have changed, or some of them. Without stamps to compare, it began under an earlier leader.
        has_begun = not unchanged or len(unchanged) < len(rollout.earlier)
        if not has_begun:
            return taken_seconds >= START_SECONDS

        is_ready = service.get("status", {}).get("phase") in {"Ready", "Suspended"}
        return not unchanged and all(map(is_rolled_out, deployments)) and is_ready


def _list_deployments(store: Store, key: ObjectKey) -> Sequence[Obj]:
    """Return the Deployments of a service; none if it is gone."""
    service = store.get(INFERENCE_SERVICES, key.name, key.namespace)
    if service is None:
        return ()
    return store.by_index(DEPLOYMENTS, OWNER_INDEX, namespaced(key.namespace, service["metadata"]["uid"]))


def _list_stamps(deployments: Sequence[Obj]) -> dict[str, str]:
    return {
        deployment["metadata"]["name"]: _annotations(deployment).get(ANNOTATION_STAMP, "") for deployment in deployments
    }


def _annotations(deployment: Obj) -> Obj:
    return deployment["metadata"].get("annotations") or {}
