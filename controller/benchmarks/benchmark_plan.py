"""The decision about benchmarks: which start, how often one that fails is tried, and what its service says of it.

A benchmark is worth nothing to a service that waits. So none is started on a device while anything waits in the queue
for its accelerator, and those that the choice of an accelerator waits for come first. Namespaces take turns, however
many models each has. One that fails is tried again after a back-off, and after three tries not before its service or
the controller's image changes.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Final, NamedTuple

from controller.benchmarks.benchmark_job import BenchmarkKey
from controller.models.jobs import JobOutcome
from controller.services.endpoints import Endpoint
from controller.services.performance_source import BenchmarkProblem
from kube.backoff import EXACT, backoff_seconds
from kube.resources import ObjectKey

MOST_AT_ONCE: Final = 2
"""Benchmarks in the whole cluster that run at once, beside those for which a service waits."""
MOST_URGENT: Final = 4
"""Benchmarks in the whole cluster that run at once and for which a service waits."""
MOST_TRIES: Final = 3
FIRST_RETRY_SECONDS: Final = 60.0
LAST_RETRY_SECONDS: Final = 3600.0


class WantedBenchmark(NamedTuple):
    """A model on a device class that was not measured, and that a service uses or would use."""

    key: BenchmarkKey
    service: ObjectKey
    accelerator: str
    inputs: str
    """Digest of what the measurement depends on beside the model: another one is another measurement."""
    is_ready: bool
    """The service serves; one that does not is measured for the choice of its accelerator only."""
    nodes: tuple[str, ...] = ()
    """Nodes of the class with an idle device, for a Job."""
    replica: Endpoint | None = None
    """A replica of the service on the class that serves, and that nobody asks now: it is measured itself."""


class BenchmarkStart(NamedTuple):
    """A benchmark to start, on a node."""

    wanted: WantedBenchmark
    node: str


class BenchmarkFailure(NamedTuple):
    """The last failure of a benchmark."""

    inputs: str
    tries: int
    """Tries so far."""
    outcome: JobOutcome

    @property
    def is_final(self) -> bool:
        """True if it is not tried again."""
        return self.tries >= MOST_TRIES or self.outcome.state == "Failed"

    def find_wait(self, now: datetime) -> float:
        """Return the seconds until the next try; 0 or less if it is due."""
        pause = backoff_seconds(self.tries, first=FIRST_RETRY_SECONDS, most=LAST_RETRY_SECONDS, jitter=EXACT)
        retry_at = (self.outcome.ended or now) + timedelta(seconds=pause)
        return (retry_at - now).total_seconds()

    def describe(self, key: BenchmarkKey) -> BenchmarkProblem:
        """Return the failure as a condition of the service states it."""
        further = f"try {self.tries} of {MOST_TRIES}, and it is tried again"
        if self.is_final:  # after `MOST_TRIES`, or a failure that another try cannot change
            further = "it is not tried again before the service is edited"
        said = self.outcome.message.rstrip(".")
        message = f"the speed on {key.device_class} could not be measured: {said}; {further}"
        return BenchmarkProblem(self.outcome.reason or "BenchmarkFailed", message)


def choose_starts(
    due: Sequence[WantedBenchmark],
    going: Mapping[BenchmarkKey, str],
    busy: Collection[str],
    last_turns: Mapping[str, int],
    urgent: Collection[BenchmarkKey] = (),
) -> list[BenchmarkStart]:
    """Return the benchmarks to start, each with its node, as long as there are nodes and the limits allow more.

    They are chosen one by one, as each start changes the counts. The next one is urgent if any such one can start; then
    its namespace is the one with the fewest running ones of its kind; of equal ones, that with the oldest last start.
    Urgent benchmarks have a limit of their own (`MOST_URGENT`); all others share `MOST_AT_ONCE`.

    Args:
        due: the benchmarks that may start now.
        going: the node of each benchmark that runs.
        busy: the accelerators that something in the queue waits for: no Job starts on these.
        last_turns: by namespace the number of its last start; a later start has a higher number.
        urgent: the benchmarks that services wait for before their accelerator is chosen.
    """
    starts: list[BenchmarkStart] = []
    # These three are about the benchmarks that run, and each one that is chosen here is added.
    node_of = dict(going)  # their nodes, by key
    running = Counter((key in urgent, key.namespace) for key in going)  # their number, by (is urgent, namespace)
    totals = Counter(key in urgent for key in going)  # their number, by is urgent

    def is_below_limit(key: BenchmarkKey) -> bool:
        is_urgent = key in urgent
        return totals[is_urgent] < (MOST_URGENT if is_urgent else MOST_AT_ONCE)

    def rank(start: BenchmarkStart) -> tuple[bool, int, int]:
        """Return the key by which starts are sorted: urgent first, then fewest running, then oldest last start.

        The running ones (`running`), urgent or not as it is, and the last start (`last_turns`) are its namespace's.
        """
        key = start.wanted.key
        is_urgent = key in urgent
        # False sorts first, so `not is_urgent` puts the urgent ones first.
        return not is_urgent, running[is_urgent, key.namespace], last_turns.get(key.namespace, 0)

    while True:
        # All that may start now: neither running nor chosen yet, below the limit of its kind, and with a free node.
        startable = [
            BenchmarkStart(wanted, node)
            for wanted in due
            if wanted.key not in node_of
            and is_below_limit(wanted.key)
            and (node := _find_node(wanted, busy, set(node_of.values())))
        ]
        if not startable:
            return starts

        # Choose one of them and count it, so that the next choice sees it.
        first = min(startable, key=rank)
        key = first.wanted.key
        starts.append(first)
        node_of[key] = first.node
        running[key in urgent, key.namespace] += 1
        totals[key in urgent] += 1


def _find_node(wanted: WantedBenchmark, busy: Collection[str], used: Collection[str]) -> str:
    """Return a node for a benchmark on which no other runs; empty if there is none.

    A replica is measured where it is. A Job gets an idle node (`wanted.nodes`), unless anything waits for its
    accelerator (`busy`). On `used` nodes, another benchmark runs.
    """
    if wanted.replica is not None:
        return wanted.replica.node if wanted.replica.node not in used else ""
    if wanted.accelerator in busy:
        return ""
    return next((node for node in wanted.nodes if node not in used), "")
