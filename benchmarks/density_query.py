"""The time of a query of the density API over 1,000 nodes and hosts and 2,000 Models.

A third of the devices is partly in use, each to another extent. Between two queries the agents of sixteen nodes report,
as in each second of such a cluster. The figures are the median of the processor's time from the snapshot to the encoded
answer; the first query estimates the need of each model on each device class.
"""

import copy
import random
import statistics
import time
from collections.abc import Callable
from typing import Final

import msgspec

from benchmarks.report import Figure, print_figures
from console.density_queries import DensityQuery, Page, query_nodes
from console.density_snapshot import CONTEXT_LENGTH, SnapshotSource
from console.fit_table import FitTable
from controller.placement.cluster_view import ClusterView
from kube.client import Obj
from kube.resources import MODELS, NODE_FITNESSES
from tests.support.density_worlds import GIB, build_source, cpu_node, gpu_node, host, model

NODES: Final = 1000
MODELS_COUNT: Final = 2000
REPORTS: Final = 16
"""Node agents that report in a second, of 1,000 with a heartbeat of a minute."""
REPEATS: Final = 20
GOAL_MS: Final = 50.0
_PRODUCTS: Final = (
    ("NVIDIA L4", 24, 300),
    ("NVIDIA A100-SXM4-80GB", 80, 2039),
    ("NVIDIA H100 80GB HBM3", 80, 3350),
    ("NVIDIA L40S", 48, 864),
)


def build_cluster(chance: random.Random) -> SnapshotSource:
    """Return the cluster."""
    objects: list[tuple[object, Obj]] = []
    for number in range(NODES):
        name = f"node-{number:04}"
        if number % 10 < 6:  # noqa: PLR2004 - six of ten
            product, memory, bandwidth = _PRODUCTS[number % len(_PRODUCTS)]
            free = memory * GIB if number % 3 else chance.randrange(memory) * GIB
            objects += gpu_node(name, 8, product, memory * GIB, free=free, bandwidth=bandwidth * 10**9)
        elif number % 10 < 9:  # noqa: PLR2004 - three of ten
            objects += cpu_node(name, chance.randrange(2, 22) * GIB)
        else:
            objects.append(host(name, chance.randrange(10, 60) * GIB))
    for number in range(MODELS_COUNT):
        resource, built = model(f"model-{number:04}")
        built["status"]["layout"]["tensorBytes"] = chance.randrange(1, 90) * GIB + number
        objects.append((resource, built))
    return build_source(objects)


def report_again(view: ClusterView, chance: random.Random, moment: int) -> None:
    """Make some agents report that a device is used otherwise."""
    for obj in chance.sample(list(view.store.list(NODE_FITNESSES)), REPORTS):
        changed = copy.deepcopy(obj)
        changed["metadata"]["resourceVersion"] = str(moment + 2)
        changed["status"]["availableBytes"] = chance.randrange(2, 22) * GIB
        for device in changed["status"].get("devices", ()):
            device["freeBytes"] = chance.randrange(device["memoryBytes"] // GIB) * GIB
        view.store.put(NODE_FITNESSES, changed)


def measure(work: Callable[[], object], between: Callable[[int], None]) -> float:
    """Return the median of the processor's time in milliseconds."""
    taken = []
    for moment in range(REPEATS):
        between(moment)
        began = time.process_time()
        work()
        taken.append(1000 * (time.process_time() - began))
    return statistics.median(taken)


def main() -> None:
    """Print the figures."""
    chance = random.Random(12)  # noqa: S311 - the same cluster each time
    source, table = build_cluster(chance), FitTable(CONTEXT_LENGTH)
    page = Page()

    def ask(text: str) -> bytes:
        return msgspec.json.encode(query_nodes(source.take_snapshot(), table, None, DensityQuery(text), page))

    began = time.process_time()
    ask("*")
    first = 1000 * (time.process_time() - began)
    moments = iter(range(10**6))

    def report(_moment: int) -> None:
        report_again(source.view, chance, next(moments))

    def wait(_moment: int) -> None:
        return None

    profiles = len(source.take_snapshot().profiles)
    machines = len(source.take_snapshot().machines)
    size = f"{source.view.store.count(NODE_FITNESSES)} nodes, {machines} machines in {profiles} groups"
    print_figures(
        f"density query: {size}, {source.view.store.count(MODELS)} Models",
        [
            Figure("one model, nothing has changed", measure(lambda: ask("model-0123"), wait), None, GOAL_MS, "ms"),
            Figure("one model, after 16 heartbeats", measure(lambda: ask("model-0123"), report), None, GOAL_MS, "ms"),
            Figure("all models, nothing has changed", measure(lambda: ask("*"), wait), None, GOAL_MS, "ms"),
            Figure("all models, after 16 heartbeats", measure(lambda: ask("*"), report), None, GOAL_MS, "ms"),
            Figure("the first query", first, None, None, "ms"),
        ],
    )


if __name__ == "__main__":
    main()
