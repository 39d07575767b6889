"""The writes of a node agent: the NodeFitness of its Node and the labels of that Node, each only when it is due.

What the API server has refused is sent again after a pause that grows, so that a thousand agents whose rights are
missing are no storm.
"""

import random
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

import structlog

from crds.nodefitness import NodeFitnessStatus
from kube.apply import apply_status, merge_conditions
from kube.backoff import backoff_seconds
from kube.client import Client, Obj
from kube.errors import ApiError, Conflict, NotFound, Unreachable
from kube.resources import NODE_FITNESSES, NODES
from node_agent.node_fitness import HEARTBEAT_SECONDS, build_object, encode_status, is_due
from node_agent.node_labels import FIELD_MANAGER, LabelPlan

FIRST_PAUSE_SECONDS = 10.0
LAST_PAUSE_SECONDS = 600.0
"""Longest pause after refusals: rights that an administrator adds are noticed this soon."""

log = structlog.get_logger()


class RefusedWrites:
    """The pause after writes of one kind that the API server has refused."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Begin without a pause, and without a refusal (in `_failures`, those in a row)."""
        self._clock = clock
        self._failures = 0
        self._paused_until = 0.0
        self.message = ""
        """The last refusal; empty: the last write was accepted."""

    @property
    def is_pause_over(self) -> bool:
        """True if the next write may be sent."""
        return self._clock() >= self._paused_until

    def note_refusal(self, error: ApiError) -> None:
        """Pause after a refusal, longer after each in a row, and log it if its message is new."""
        # _failures: refusals in a row; _paused_until: when the next write may be sent
        self._failures += 1
        pause = backoff_seconds(self._failures, first=FIRST_PAUSE_SECONDS, most=LAST_PAUSE_SECONDS)
        self._paused_until = self._clock() + pause
        if self.message != str(error):
            log.warning("write_refused", error=str(error), next_try_seconds=round(pause))
        self.message = str(error)

    def note_success(self) -> None:
        """Note a write that was accepted: the next one need not wait."""
        self._failures, self._paused_until, self.message = 0, 0.0, ""


class LabelWriter:
    """The writer of the labels of a Node."""

    def __init__(self, client: Client, clock: Callable[[], float]) -> None:
        self._client = client
        self.refused = RefusedWrites(clock)

    async def write(self, node: Obj, plan: LabelPlan) -> Obj | None:
        """Apply the labels if that changes the Node; return the changed Node, or None if it was not written.

        It is not written if it has the labels already, during the pause after a refusal, or if the write fails. A
        refusal, such as for a missing right, begins such a pause; a conflict or an unreachable API server does not.
        """
        if not plan.is_due:
            # The Node is as it should be, so an earlier refusal is over.
            self.refused.note_success()
            return None
        if not self.refused.is_pause_over:
            return None

        metadata = {"name": node["metadata"]["name"], "uid": node["metadata"]["uid"], "labels": dict(plan.applied)}
        try:
            written = await self._client.apply(NODES, {"metadata": metadata}, field_manager=FIELD_MANAGER, force=False)
        except Conflict as error:
            # Another labeller was faster; the watch brings its label, and the next probe decides again.
            log.info("labels_taken", error=str(error))
            return None
        except Unreachable as error:
            log.warning("labels_not_written", error=str(error))
            return None
        except ApiError as error:
            self.refused.note_refusal(error)
            return None

        self.refused.note_success()
        log.info("labels_written", labels=dict(plan.applied))
        return written


class FitnessWriter:
    """The writer of one NodeFitness."""

    def __init__(self, client: Client, clock: Callable[[], float], interval_seconds: float) -> None:
        """Write by `client`; a write is considered every `interval_seconds`, measured by `clock`."""
        self._client = client
        self._clock = clock
        self._interval_seconds = interval_seconds
        self._observed: Obj | None = None
        """The NodeFitness as the API server returned it last; None: it has to be read, or created, first."""
        self._written_at: float | None = None
        """When its status was written last, by `clock`, or a little before; None: not yet."""
        self._refused = RefusedWrites(clock)

    async def write(self, node: Obj, status: NodeFitnessStatus | None, condition: Obj, now: datetime) -> None:
        """Write the status and its condition if that is due. An error is logged.

        They are due at once if the devices or the condition have changed, else once a minute as a heartbeat.

        Args:
            node: the Node.
            status: the facts; None: none are known yet, so that those of the agent before this one stay.
            condition: the condition Ready, without lastTransitionTime.
            now: the wall clock.
        """
        if not self._refused.is_pause_over:
            return

        try:
            # _observed: the NodeFitness as the API server returned it last; None: it has to be read or created
            observed = self._observed or await self._get_or_create(node)
            before: Mapping[str, Any] = observed.get("status") or {}
            body = encode_status(status, before) if status else dict(before)

            written_at = self._written_at
            # silent_seconds: the time since the last write; without one, it is infinite
            silent_seconds = float("inf") if written_at is None else self._clock() - written_at
            body["conditions"] = merge_conditions(before.get("conditions", []), [condition], now)

            if not is_due(body, before, silent_seconds, self._interval_seconds):
                return
            self._observed = await apply_status(self._client, NODE_FITNESSES, observed, body, FIELD_MANAGER)
        except NotFound as error:
            # Somebody has deleted it, so the next probe creates it; or the CRD is not installed.
            if self._observed is None:  # it was just read or created: perhaps the CRD is missing
                self._refused.note_refusal(error)
            self._observed = None
            return
        except Unreachable as error:
            log.warning("nodefitness_not_written", error=str(error))
            return
        except ApiError as error:
            self._observed = None  # it may have changed, so it is read again before the next try
            self._refused.note_refusal(error)
            return

        self._refused.note_success()
        self._written_at = self._clock()

        # Agents that start together, or whose API server is back, have been silent for long, and would report together
        # for ever. So this write is dated back, and the next heartbeat comes after a random number of intervals.
        if silent_seconds > 2 * HEARTBEAT_SECONDS:
            probes_per_heartbeat = max(1, round(HEARTBEAT_SECONDS / self._interval_seconds))
            probe_number = random.randrange(probes_per_heartbeat)  # noqa: S311 - spreads load
            self._written_at -= max(0.0, HEARTBEAT_SECONDS - (probe_number + 1) * self._interval_seconds)

    async def _get_or_create(self, node: Obj) -> Obj:
        """Return the NodeFitness of a Node; create it if it does not exist."""
        name = node["metadata"]["name"]
        try:
            return await self._client.get(NODE_FITNESSES, name)
        except NotFound:
            pass
        try:
            return await self._client.create(NODE_FITNESSES, build_object(node))
        except Conflict:
            # Somebody else has created it meanwhile.
            return await self._client.get(NODE_FITNESSES, name)
