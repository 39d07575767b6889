"""The Jobs of benchmarks in the watch cache: which this leader has started, and which hold or yield a device.

Tenants can make Jobs with any label and annotation. So the uid of each Job that this leader starts is kept, with what
it has ordered, and no Job that runs but these is believed.
"""

import math
from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Final, NamedTuple

from controller.benchmarks.benchmark_job import BenchmarkJob, BenchmarkKey, BenchmarkOrder, read_benchmark_job
from controller.models.jobs import has_ended
from controller.reconcile.indexes import ALL_BENCHMARKS, BENCHMARK_INDEX, OWNER_INDEX, namespaced
from controller.reconcile.plan import Snapshot
from fitness.performance_store import LABEL_BENCHMARK
from kube.client import Obj
from kube.resources import JOBS, PODS
from kube.store import Store

YIELD_SECONDS: Final = 45.0
"""Time in which a Job leaves its device once anything waits for it, or once the Job has ended or was to end; after
that, the device is lost to those who wait for it."""
_FINAL_PHASES: Final = frozenset({"Succeeded", "Failed"})


class StartedJob(NamedTuple):
    """A Job that this leader has started."""

    key: BenchmarkKey
    order: BenchmarkOrder
    name: str
    node: str
    """The only node on which its pod may be."""


class JobRegistry:
    """The Jobs of one leadership; `store` is the watch cache."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._started: dict[str, StartedJob] = {}
        """The Jobs that this leader has started and that hold a device, by uid."""
        self._foreign: frozenset[BenchmarkKey] = frozenset()
        """Pairs of the Jobs of others that were there in the last round."""
        self._leaving: dict[str, BenchmarkKey] = {}
        """The Jobs of others that were ended and held a device at the last look, by uid."""
        self._ended_at: dict[str, float] = {}
        """When a Job was first asked to end, or seen to have ended, in seconds of a monotonic clock, by uid."""
        self._awaited_at: dict[str, float] = {}
        """Since when anything waits for the accelerator of a Job, in seconds of that clock, by uid."""

    def clear(self) -> None:
        """Forget the Jobs of an earlier leadership."""
        self._started.clear()
        self._leaving.clear()
        self._ended_at.clear()
        self._awaited_at.clear()
        self._foreign = frozenset()

    def add_started(self, created: Obj, key: BenchmarkKey, order: BenchmarkOrder, node: str) -> None:
        """Take a Job that this leader has started on a node."""
        name, uid = created["metadata"]["name"], created["metadata"]["uid"]
        self._started[uid] = StartedJob(key, order, name, node)
        self._store.put(JOBS, created)

    def note_end(self, job: BenchmarkJob, seconds: float) -> None:
        """Note that a Job is about to be deleted, at a time of a monotonic clock."""
        self._ended_at.setdefault(job.ref.uid, seconds)
        if job.is_foreign:
            self._leaving[job.ref.uid] = job.key

    def note_waiting(self, accelerators: Collection[str], seconds: float) -> None:
        """Note for which accelerators anything waits, at a time of the clock of `note_end`.

        Whatever keeps the runner from ending a Job, nothing waits for its room for longer than `YIELD_SECONDS`.
        """
        self._awaited_at = {
            uid: self._awaited_at.get(uid, seconds)
            for uid, each in self._started.items()
            if each.order.accelerator in accelerators
        }

    def has_any(self) -> bool:
        """Return whether there is any Job of a benchmark."""
        return bool(self._list_labelled())

    def list_jobs(self, now: datetime) -> list[BenchmarkJob]:
        """Return the Jobs that exist; `now` is the time."""
        snapshot = Snapshot(self._store, now)
        found: list[BenchmarkJob] = []
        labelled = self._list_labelled()
        uids = {each["metadata"]["uid"] for each in labelled}
        self._started = {
            uid: each
            for uid, each in self._started.items()
            if uid in uids or self._holds_device(each.key.namespace, uid)
        }
        for job in labelled:
            namespace, uid = job["metadata"]["namespace"], job["metadata"]["uid"]
            started = self._started.get(uid)
            order = started.order if started is not None else None
            known = read_benchmark_job(job, snapshot.children(PODS, namespace, uid), now, order)
            if known is not None:
                found.append(known)
        self._foreign = frozenset(each.key for each in found if each.is_foreign)
        return found

    def list_measured(self) -> set[BenchmarkKey]:
        """Return the pairs whose Job is about to make its pod, or whose pod has not left its device yet."""
        return {
            each.key
            for uid, each in self._started.items()
            if self._holds_device(each.key.namespace, uid, without_pod=self._is_going(uid, each))
        }

    def list_yielding(self, seconds: float) -> tuple[dict[str, str], float | None]:
        """Return the node of each Job whose room is given up for whoever waits for it, by its key in `OWNER_INDEX`.

        Also return the time after which one of them has not left it, although it was to: a policy may protect it, its
        node may be lost, or its pod may not end.

        Args:
            seconds: the time of the clock of `note_end`.
        """
        ended = (uid for uid, each in self._started.items() if not self._is_going(uid, each))
        self._ended_at = dict.fromkeys(ended, seconds) | {
            uid: since for uid, since in self._ended_at.items() if uid in self._started
        }
        begun = {
            uid: min(self._ended_at.get(uid, math.inf), self._awaited_at.get(uid, math.inf)) for uid in self._started
        }
        left = {uid: since + YIELD_SECONDS - seconds for uid, since in begun.items() if since < math.inf}
        yielding = [uid for uid in self._started if left.get(uid, YIELD_SECONDS) > 0]
        nodes = {namespaced(self._started[uid].key.namespace, uid): self._started[uid].node for uid in yielding}
        return nodes, min((wait for wait in left.values() if wait > 0), default=None)

    def list_leaving(self) -> set[BenchmarkKey]:
        """Return the pairs whose Jobs of an earlier leader had not left their devices at the last look.

        Before the next look, nobody knows that such a device is idle now.
        """
        return {*self._leaving.values(), *self._foreign}

    def note_look(self) -> None:
        """Forget the Jobs of an earlier leader that have left, since a look at idle devices follows."""
        self._leaving = {uid: key for uid, key in self._leaving.items() if self._holds_device(key.namespace, uid)}

    def _holds_device(self, namespace: str, uid: str, *, without_pod: bool = False) -> bool:
        """Return whether the pod of a Job has not left its device; `without_pod` if there is none."""
        pods = self._store.by_index(PODS, OWNER_INDEX, namespaced(namespace, uid))
        phases = [(each.get("status") or {}).get("phase") for each in pods]
        return any(each not in _FINAL_PHASES for each in phases) if pods else without_pod

    def _is_going(self, uid: str, started: StartedJob) -> bool:
        """Return whether a Job exists, has not ended, and is known as that of a benchmark yet."""
        job = self._store.get(JOBS, started.name, started.key.namespace)
        if job is None or job["metadata"]["uid"] != uid or has_ended(job):
            return False
        return LABEL_BENCHMARK in job["metadata"].get("labels", {}) and "deletionTimestamp" not in job["metadata"]

    def _list_labelled(self) -> Sequence[Obj]:
        return self._store.by_index(JOBS, BENCHMARK_INDEX, ALL_BENCHMARKS)
